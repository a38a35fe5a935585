"""What a plan's estimates are for: the ranks and tokens that the caller, the spec or a default chooses."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import get_args

from fxskip.errors import SpecError
from fxskip.schedule.costs import CONTEXT, Costs
from fxskip.schedule.hardware import Hardware, MatrixType
from fxskip.schedule.roofline import CopiesPer, Deployment, Exchange
from fxskip.spec import Spec

"""What estimates are for unless the caller says otherwise."""
TOKENS = 4096
"""Tokens of a rank unless the caller says otherwise."""


@dataclass(frozen=True)
class Wishes:
    """What the caller of `plan` asked for; None leaves it to the spec, the model or a default."""

    hardware: Hardware
    tokens_per_rank: int = TOKENS
    context_tokens: int = CONTEXT
    expert_size: int | None = None
    tensor_size: int | None = None
    dtype: MatrixType | None = None
    copies_per: CopiesPer = "expert"

    def __post_init__(self) -> None:
        """Raises SpecError for values that mean nothing, before a model is captured for them."""
        for name in ("tokens_per_rank", "context_tokens", "expert_size", "tensor_size"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < 1):
                raise SpecError("plan", f"{name} is {value!r}", hint="write a whole number of 1 or more")
        if self.copies_per not in get_args(CopiesPer):
            raise SpecError(
                "plan",
                f"copies_per is {self.copies_per!r}",
                hint=f"write one of {', '.join(get_args(CopiesPer))}",
            )


def deployment(wishes: Wishes, spec: Spec, costs: Sequence[Costs], *, dtype: str) -> Deployment:
    """Settle what was left open. `dtype` is the model's.

    Raises SpecError for sizes that do not divide what they are to spread, and for a type without a figure.
    """
    hardware = wishes.hardware
    experts = math.gcd(*(c.experts for c in costs if c.experts))
    heads = math.gcd(*(c.heads for c in costs))
    axes = spec.parallel
    exchange: Exchange = axes.expert.exchange if axes and axes.expert else "all_to_all"
    expert = wishes.expert_size or (axes.expert.size if axes and axes.expert else None)
    # A spec that names a mesh means it; without one, an exchange inside one domain is what most people have.
    assumed = expert is None and axes is None
    if expert is None:
        expert = math.gcd(hardware.domain.gpus, experts) if assumed else 1
    tensor = wishes.tensor_size or (axes.tensor.size if axes and axes.tensor else 1)
    for size, shared, name in ((expert, experts, "experts"), (tensor, heads, "attention heads")):
        if shared % size:
            raise SpecError(
                "plan",
                f"{size} ranks cannot share {shared} {name} evenly",
                hint=f"write a size that divides {shared}",
            )
    matrix_type = _matrix_type(wishes.dtype, dtype, hardware)
    return Deployment(
        hardware,
        matrix_type,
        wishes.tokens_per_rank,
        wishes.context_tokens,
        expert,
        exchange,
        tensor,
        wishes.copies_per,
        assumed,
        "" if wishes.dtype or matrix_type == dtype else dtype,
    )


def _matrix_type(wish: str | None, own: str, hardware: Hardware) -> MatrixType:
    """The type that was asked for, or the model's; bfloat16, or what there is, where the latter has no figure."""
    figures = hardware.matrix_flop_per_s
    if wish is None:
        fallback: MatrixType = "bfloat16" if "bfloat16" in figures else next(iter(figures))
        return next((known for known in figures if known == own), fallback)
    for known in figures:
        if known == wish:
            return known
    raise SpecError(
        "plan",
        f"{hardware.name} has no figure for matrix products in {wish}",
        hint=f"pass dtype= one of {', '.join(figures)}, or add it to a copy of the hardware file",
    )
