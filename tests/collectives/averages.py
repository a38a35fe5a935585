"""The same student with gradients averaged by call, and in the backward pass."""

from collections.abc import Callable
from functools import cache
from typing import Any

from torch import Tensor, nn

import fxskip
from fxskip.collectives.landing import poisoned_buffers, under_way
from fxskip.runtime.gradient_buckets import Bucket
from tests.collectives.spreads import gradients, in_mode, model, own_batch, regions, spread, unequal

LAYERS = 2
Loop = Callable[[nn.Module, int], None]
"""Forward and backward passes of a model, given the rank."""


@cache
def pair(backward: str = "mirrored", **overrides: Any) -> tuple[nn.Module, nn.Module]:
    """The same model: averaged by call, and in the backward pass."""
    original = model("qwen2_moe", layers=LAYERS, **overrides)
    by_call = spread(original, schedule={"backward": backward})
    return by_call, spread(original, schedule={"backward": backward, "gradients": "in_backward"})


def copies(mode: str = "scheduled", **options: Any) -> tuple[nn.Module, nn.Module]:
    by_call, in_backward = (in_mode(student, mode) for student in pair(**options))
    return by_call, in_backward


def buckets(student: nn.Module) -> tuple[Bucket, ...]:
    found = regions(student)[0].fxskip_gradients
    assert found is not None
    return found.plan.buckets


def backward(module: nn.Module, rank: int, rows: int = 2) -> None:
    loss_of(module, rank, rows).backward()


def loss_of(module: nn.Module, rank: int, rows: int = 2) -> Tensor:
    loss: Tensor = module(**own_batch(rank, rows), use_cache=False).loss
    return loss


def accumulation(module: nn.Module, rank: int) -> None:
    is_by_call = regions(module)[0].fxskip_gradients is None
    if is_by_call:
        backward(module, rank, 1)
    else:
        with fxskip.no_sync(module):
            backward(module, rank, 1)
    backward(module, rank, 3)


def assert_same_gradients(found: nn.Module, want: nn.Module) -> None:
    """To the last bit, and there are some."""
    got, expected = gradients(found), gradients(want)
    assert unequal(got, expected) == [] and len(got) > 20


def assert_as_by_call(loop: Loop, rank: int, modes: tuple[str, ...] = ("scheduled",), **options: Any) -> None:
    """`loop` without averages, and a call at its end; and with averages in its last backward pass."""
    for mode in modes:
        by_call, in_backward = copies(mode, **options)
        loop(by_call, rank)
        fxskip.average_gradients(by_call)
        with poisoned_buffers():
            loop(in_backward, rank)
        assert under_way() == []
        assert_same_gradients(in_backward, by_call)
