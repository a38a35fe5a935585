"""A small program whose weight is read by every step, in several ways."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fxskip.backward.program import Program, Step
from fxskip.backward.scheduled_region import ScheduledRegion
from tests.backward.random_programs import plain

D = 6
"""Width of the tied network: its weights are [D, D], its values [5, D]."""


def first(x: Tensor, tied: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    normed = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * scale
    return F.linear(normed, tied) + tied[1], normed


def second(x: Tensor, tied: Tensor, bias: Tensor) -> tuple[Tensor]:
    return (F.gelu(F.linear(x, tied.t(), bias)),)


def third(x: Tensor, normed: Tensor, tied: Tensor) -> tuple[Tensor]:
    return (torch.matmul(F.linear(normed, tied), tied) + x * tied[0],)  # cast twice, and as it is


def join(h: Tensor, second: Tensor, third: Tensor, tied: Tensor) -> tuple[Tensor]:
    return (h + second * third + F.linear(second, tied),)


TIED = Program(
    (
        Step("first", first, ("x", "tied", "scale"), ("h", "normed")),
        Step("second", second, ("h", "tied", "bias"), ("s",)),
        Step("third", third, ("x", "normed", "tied"), ("t",)),
        Step("join", join, ("h", "s", "t", "tied"), ("y",)),
    ),
    ("x", "tied", "scale", "bias"),
    ("y",),
)
FORWARD = ("first", "third", "second", "join")
BACKWARD = ("join", "second", "third", "first")


def plain_on(program: Program, *inputs: Any) -> tuple[Any, ...]:
    return plain(program, inputs)


def leaves(seed: int = 0, gradient: bool = True) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"x": (5, D), "tied": (D, D), "scale": (D,), "bias": (D,)}
    return {n: torch.randn(s, generator=generator).requires_grad_(gradient) for n, s in shapes.items()}


def tied_region(**options: Any) -> ScheduledRegion:
    return ScheduledRegion(TIED, forward=FORWARD, backward=BACKWARD, **options)


def both() -> Iterator[tuple[dict[str, Tensor], Callable[..., tuple[Any, ...]]]]:
    """The same leaves twice: for plain autograd and for the region."""
    yield leaves(), lambda *inputs: plain(TIED, inputs)
    yield leaves(), tied_region()


def one_step(function: Callable[..., Any], outputs: tuple[str, ...] = ("y",)) -> ScheduledRegion:
    return ScheduledRegion(Program((Step("only", function, ("x",), outputs),), ("x",), ("y",)))
