"""The selective scan of a state-space layer as one operation of the graph.

For a compiler, transformers takes an associative scan; eagerly it loops over the tokens. Captured, the one would give
other bits than the original, and the other a graph for each length. As one operation, the original's code runs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

_SCANS = (("transformers.models.jamba.modeling_jamba", "mamba_selective_scan"),)
"""Module and name of the functions; only architectures with routed experts matter here."""


@contextmanager
def whole_selective_scans() -> Iterator[None]:
    """While it is open, the scans of transformers are operations that TorchDynamo does not look into.

    Opened around captures and around calls of captured code: Dynamo guards on the function that was called.
    """
    found = [(sys.modules[module], name) for module, name in _SCANS if module in sys.modules]
    originals = [(module, name, getattr(module, name)) for module, name in found if hasattr(module, name)]
    for module, name, original in originals:
        setattr(module, name, _as_one_operation(original))
    try:
        yield
    finally:
        for module, name, original in originals:
            setattr(module, name, original)


@cache
def _as_one_operation(original: Callable[..., Any]) -> Callable[..., Any]:
    def selective_scan(hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Scan `hidden` [B, D, S] along S: [B, D, S], and the last state [B, D, N] where it is asked for."""
        if isinstance(hidden, FakeTensor) or hidden.is_meta:
            return _shapes(original, hidden, *args, **kwargs)
        return original(hidden, *args, **kwargs)

    whole: Callable[..., Any] = torch._dynamo.allow_in_graph(selective_scan)
    return whole


def _shapes(original: Callable[..., Any], hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Empty results with the shapes and dtypes of the original's, found by scanning one token."""
    length = hidden.shape[-1]

    def first(value: Any) -> Any:
        along_the_sequence = isinstance(value, Tensor) and value.dim() == 3
        return value[..., :1] if along_the_sequence else value

    kwargs = {name: first(value) for name, value in kwargs.items()} | {"use_associative_scan": False}
    found = original(first(hidden), *map(first, args), **kwargs)
    out, *states = found if isinstance(found, tuple) else (found,)
    whole = out.new_empty((*out.shape[:-1], length))
    return (whole, *states) if isinstance(found, tuple) else whole
