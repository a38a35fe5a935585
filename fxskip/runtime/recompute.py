"""What a decoder layer computes again in the backward pass, as the spec's `runtime.recompute` says.

`layer` keeps a layer's inputs and nothing else. `selective` also keeps the results of matrix products and of
attention, the expensive part, and computes norms, activations and routing again. Both run the region under
torch's non-reentrant checkpoint, with the random numbers of the first run.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from transformers import Cache

from fxskip.collectives.kept import Kept
from fxskip.errors import PassError

Result = TypeVar("Result")

_KEPT = ("mm", "addmm", "bmm", "baddbmm", "_grouped_mm", "grouped_mm_fallback", "convolution")
"""Operators whose results `selective` keeps, beside all of scaled dot-product attention."""


def recomputes(layer: nn.Module, recompute: str) -> bool:
    """Whether this call of the layer is computed again in its backward pass, because the spec says so.

    Raises PassError where transformers' own switch is on as well, or is of the reentrant kind.
    """
    training = layer.training and torch.is_grad_enabled()
    if layer.training and getattr(layer, "gradient_checkpointing", False):
        _refuse_reentrant(layer)
        if training and recompute != "none":
            raise PassError(
                "gradient checkpointing",
                f"the spec says runtime.recompute: {recompute}, and transformers' gradient checkpointing is on too",
                where=type(layer).__name__,
                hint="model.gradient_checkpointing_disable(), or leave runtime.recompute out of the spec",
            )
    return training and recompute != "none"


def recomputed(recompute: str, run: Callable[..., Result], *args: Any, **kwargs: Any) -> Result:
    """`run(*args, **kwargs)`; its intermediate values are computed again in the backward pass.

    A key-value cache is left out, for the second run would append to it again. What other ranks sent is kept: the
    second run starts no collective.
    """
    kept = Kept()

    def run_and_keep(*args: Any, **kwargs: Any) -> Result:
        with kept.run():
            return run(*args, **kwargs)

    options: dict[str, Any] = {"use_reentrant": False}
    if recompute == "selective":
        options["context_fn"] = partial(create_selective_checkpoint_contexts, _policy)
    out: Result = checkpoint(run_and_keep, *args, **_without_caches(kwargs), **options)
    return out


def _policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    name = getattr(operator, "_opname", "")
    keep = name in _KEPT or name.startswith("_scaled_dot_product")
    return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE


def _without_caches(kwargs: dict[str, Any]) -> dict[str, Any]:
    caches = [value for value in kwargs.values() if isinstance(value, Cache)]
    if any(int(cache.get_seq_length()) > 0 for cache in caches):
        raise PassError(
            "runtime.recompute",
            "a call in training continues a key-value cache, which a layer that is computed twice cannot append to",
            hint="pass no cache and use_cache=False, or call the model in eval mode or under torch.no_grad()",
        )
    if caches:
        warnings.warn(
            "fxskip: runtime.recompute keeps no key-value cache in training; the one in the output stays empty. "
            "use_cache=False says so and silences this",
            stacklevel=2,
        )
    return {name: None if isinstance(value, Cache) else value for name, value in kwargs.items()}


def _refuse_reentrant(layer: nn.Module) -> None:
    """Reentrant checkpointing sees no tensors inside a tuple, so it would lose the gradient of the stream."""
    function = getattr(layer, "_gradient_checkpointing_func", None)
    # torch's own default is the reentrant form, so only a plain False will do.
    if not isinstance(function, partial) or function.keywords.get("use_reentrant") is not False:
        raise reentrant_refusal(layer)


def reentrant_refusal(layer: nn.Module) -> PassError:
    """The error for a layer that is called inside a reentrant checkpoint."""
    return PassError(
        "gradient checkpointing",
        "reentrant checkpointing loses the gradient of streams that cross a layer's border",
        where=type(layer).__name__,
        hint='model.gradient_checkpointing_enable({"use_reentrant": False}), or '
        "torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)",
    )
