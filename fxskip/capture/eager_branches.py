"""Capture what transformers runs eagerly, where it would run something else for a compiler.

`sdpa_attention_forward` repeats keys and values for a compiler, and packs the query heads without one: the
same attention in another order of additions. A region runs its graph eagerly and must give the original's
bits, so it captures the eager branch.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from transformers.integrations import sdpa_attention

_ASKS: Any = sdpa_attention if hasattr(sdpa_attention, "is_torchdynamo_compiling") else None
"""The module whose question is answered; None for versions that have the eager branch alone."""


def _no_compiler() -> bool:
    return False


@contextmanager
def eager_branches() -> Iterator[None]:
    """While it is open, transformers' attention is told that no compiler is at work.

    Opened around captures and around calls of captured code: Dynamo guards on the function that was asked.
    """
    if _ASKS is None:
        yield
        return
    asked = _ASKS.is_torchdynamo_compiling
    _ASKS.is_torchdynamo_compiling = _no_compiler
    try:
        yield
    finally:
        _ASKS.is_torchdynamo_compiling = asked
