"""Experts by grouped matrix products, on rows that lie in the order of their experts already.

transformers' own form of these products (`integrations/moe.py`) sorts, gathers, weighs and scatters rows itself. Here
are its steps between the sort and the scatter, for modules that do nothing else.
"""

# R rows, D width, I inner width, E experts of this rank

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook
from transformers.integrations import moe

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_PROTOCOL = ("has_gate", "has_bias", "is_transposed")
_EXTRAS = ("has_post_expert_norm", "_is_expert_parallel")
_TYPES = (torch.bfloat16, torch.float16, torch.float32)
_LINEAR = getattr(moe, "_grouped_linear", None)
"""transformers' grouped product: rows, weights, where the rows of each expert end, bias of each row, orientation."""
_FORWARD = getattr(moe, "grouped_mm_experts_forward", None)


@moe.use_experts_implementation
class _Decorated(nn.Module):
    """Its forward has the code that transformers gives to every class of experts."""

    def forward(self) -> None:
        raise NotImplementedError


def is_grouped(module: nn.Module) -> bool:
    """Whether the module's forward is transformers' `grouped_mm_experts_forward` and nothing besides.

    Not so for a forward, hook, adapter, norm, parametrisation or quantised weight of its own, nor for another choice of
    `experts_implementation`: such a module is called as it is.
    """
    forward: Any = type(module).forward
    return (
        _LINEAR is not None
        and _FORWARD is not None
        and getattr(forward, "__code__", None) is _Decorated.forward.__code__
        and "forward" not in vars(module)
        and moe.ALL_EXPERTS_FUNCTIONS.get(getattr(module.config, "_experts_implementation", None)) is _FORWARD
        and all(hasattr(module, name) for name in _PROTOCOL)
        and not any(getattr(module, name, False) for name in (*_EXTRAS, *_HOOKS))
        and not _has_any_global_hook()
        and _has_only_what_products_read(module)
    )


def _has_only_what_products_read(module: nn.Module) -> bool:
    names = {_first(module), "down_proj"}
    if module.has_bias:
        names |= {f"{name}_bias" for name in names}
    parameters = dict(module.named_parameters())
    return (
        parameters.keys() == names
        and {name for name, _ in module.named_children()} <= {"act_fn"}
        and next(module.buffers(), None) is None
        and all(p.dtype in _TYPES for p in parameters.values())
    )


def grouped_experts(module: nn.Module, own: dict[str, Tensor], rows: Tensor, ends: Tensor) -> Tensor:
    """What the experts of a module that `is_grouped` make of rows [R, D]: [R, D], not weighed.

    own    this rank's part of the module's parameters, by name; E experts of each
    ends   [E] int32, where the rows of each expert end
    """
    made = _linear(module, own, _first(module), rows, ends)
    made = module._apply_gate(made) if module.has_gate else module.act_fn(made)  # type: ignore[operator]
    return _linear(module, own, "down_proj", made, ends).to(rows.dtype)


def _first(module: nn.Module) -> str:
    return "gate_up_proj" if module.has_gate else "up_proj"


def _linear(module: nn.Module, own: dict[str, Tensor], name: str, rows: Tensor, ends: Tensor) -> Tensor:
    assert _LINEAR is not None
    bias = None
    if module.has_bias:
        each = ends.diff(prepend=ends.new_zeros(1))
        # By index, as the module does: the derivative of repeat_interleave adds in no fixed order on CUDA.
        expert_of_row = torch.arange(len(ends), device=ends.device).repeat_interleave(
            each, output_size=len(rows)
        )
        bias = own[f"{name}_bias"][expert_of_row]
    return _LINEAR(rows, own[name], ends, bias=bias, is_transposed=module.is_transposed)  # type: ignore[no-any-return]
