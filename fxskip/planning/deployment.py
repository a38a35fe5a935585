"""What a plan's estimates are for: the ranks and tokens that the caller, the spec or a default chooses."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from os import PathLike
from typing import get_args

from fxskip.errors import SpecError
from fxskip.schedule.costs import CONTEXT, Costs
from fxskip.schedule.hardware import Hardware, MatrixType, load_hardware
from fxskip.schedule.roofline import Deployment
from fxskip.spec import Spec

TOKENS = 4096
"""Tokens of a rank unless the caller says otherwise."""


@dataclass(frozen=True)
class Wishes:
    """What the caller of `plan` asked for; None leaves it to the spec, the model or a default."""

    hardware: str | PathLike[str] | Hardware = "h200"
    tokens_per_rank: int = TOKENS
    context_tokens: int = CONTEXT
    expert_size: int | None = None
    tensor_size: int | None = None
    dtype: MatrixType | None = None


def deployment(wishes: Wishes, spec: Spec, costs: Sequence[Costs], *, dtype: str, heads: int) -> Deployment:
    """Settle what was left open. `dtype` and `heads` (of attention) are the model's.

    Raises SpecError for sizes that do not divide what they are to spread, and for a type without a figure.
    """
    hardware = load_hardware(wishes.hardware)
    for name in ("tokens_per_rank", "context_tokens", "expert_size", "tensor_size"):
        value = getattr(wishes, name)
        if value is not None and (type(value) is not int or value < 1):
            raise SpecError("plan", f"{name} is {value!r}", hint="write a whole number of 1 or more")
    kind = wishes.dtype or dtype
    if kind not in hardware.matrix_flop_per_s:
        known = ", ".join(hardware.matrix_flop_per_s)
        raise SpecError(
            "plan",
            f"{hardware.name} has no figure for matrix products in {kind}",
            hint=f"pass dtype= one of {known}, or add the figure to a copy of the hardware file",
        )
    assert kind in get_args(MatrixType)
    experts = math.gcd(*(c.experts for c in costs if c.experts))
    expert, exchange, assumed = wishes.expert_size, "all_to_all", False
    if spec.parallel is not None and spec.parallel.expert is not None:
        exchange = spec.parallel.expert.exchange
        expert = expert or spec.parallel.expert.size
    if expert is None:
        # A spec that names its mesh means it; without one, an exchange inside one domain is what people have first.
        assumed = spec.parallel is None
        expert = math.gcd(hardware.domain.gpus, experts) if assumed else 1
    if experts % expert:
        raise SpecError(
            "plan",
            f"{expert} ranks cannot share {experts} experts evenly",
            hint=f"write an expert size that divides {experts}",
        )
    tensor = wishes.tensor_size
    if tensor is None:
        tensor = spec.parallel.tensor.size if spec.parallel and spec.parallel.tensor else 1
    if heads % tensor:
        raise SpecError(
            "plan",
            f"{tensor} ranks cannot share {heads} attention heads evenly",
            hint=f"write a tensor size that divides {heads}",
        )
    return Deployment(
        hardware, kind, wishes.tokens_per_rank, wishes.context_tokens, expert, exchange, tensor, assumed
    )
