"""Whether somebody looks at the values between two decoder layers, who must then find them finished."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn.modules import module as global_hooks

from fxskip.capture.recorded_outputs import records_layers

_PASS_THROUGH = (
    "torch.distributed.fsdp.",
    "torch.distributed._composable.",
    "transformers.utils.output_capturing",
)
"""Modules whose hooks hand on what they get, or cast it; the last's record only while `records_layers`."""


def result_is_watched(layer: nn.Module) -> bool:
    """Whether a hook on `layer`, or transformers' recording of hidden states, reads what the layer returns."""
    return records_layers() or _has_others(
        *layer._forward_hooks.values(),
        *layer._backward_hooks.values(),
        *layer._backward_pre_hooks.values(),
        *global_hooks._global_forward_hooks.values(),
        *global_hooks._global_backward_hooks.values(),
        *global_hooks._global_backward_pre_hooks.values(),
    )


def arguments_are_watched(layer: nn.Module) -> bool:
    """Whether a hook reads what `layer` is called with."""
    return _has_others(*layer._forward_pre_hooks.values(), *global_hooks._global_forward_pre_hooks.values())


def _has_others(*hooks: Any) -> bool:
    return any(not _origin(hook).startswith(_PASS_THROUGH) for hook in hooks)


def _origin(hook: Any) -> str:
    return str(getattr(hook, "__module__", None) or getattr(getattr(hook, "func", None), "__module__", ""))
