"""Whether somebody looks at the values between two decoder layers, who must then find them finished."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn.modules.module import _global_forward_hooks

from fxskip.capture.recorded_outputs import records_layers

_PASS_THROUGH = ("torch.distributed.fsdp.", "transformers.utils.output_capturing")
"""Modules whose hooks hand on what they get; the second's record only while `records_layers`."""


def border_is_watched(layer: nn.Module) -> bool:
    """Whether a hook on `layer`, or transformers' recording of hidden states, reads what the layer returns."""
    hooks: list[Any] = [
        *layer._forward_hooks.values(),
        *_global_forward_hooks.values(),
        *layer._backward_hooks.values(),
        *layer._backward_pre_hooks.values(),
    ]
    return records_layers() or any(not _origin(hook).startswith(_PASS_THROUGH) for hook in hooks)


def _origin(hook: Any) -> str:
    return str(getattr(hook, "__module__", ""))
