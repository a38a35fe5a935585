"""Checkpoints and hooks for saved tensors, inside of steps and around a scheduled region."""

from __future__ import annotations

import weakref
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from fxskip.backward.program import Program, Step
from fxskip.backward.scheduled_region import ScheduledRegion
from tests.backward.random_programs import plain
from tests.backward.test_scheduled_region import assert_same_gradients
from tests.backward.tied_program import (
    D,
    both,
    one_step,
)


class Exchange(torch.autograd.Function):
    """Stands for a collective: counts how often it is issued in each direction."""

    issued = [0, 0]

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        Exchange.issued[0] += 1
        return x.flip(0)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        Exchange.issued[1] += 1
        return gradient.flip(0)


def exchanging(recomputed: bool) -> Program:
    """Blocks with a collective between them; `recomputed` keeps nothing of the blocks but their inputs."""

    def block(x: Tensor, weight: Tensor) -> Tensor:
        return torch.tanh(F.linear(x, weight)).square() + x.sin() * x

    def step(x: Tensor, weight: Tensor) -> tuple[Tensor]:
        return (checkpoint(block, x, weight, use_reentrant=False) if recomputed else block(x, weight),)

    def exchange(x: Tensor) -> tuple[Tensor]:
        return (Exchange.apply(x),)

    return Program(
        (
            Step("block0", step, ("x", "w0"), ("a",)),
            Step("exchange", exchange, ("a",), ("b",)),
            Step("block1", step, ("x", "w1"), ("c",)),
            Step("block2", step, ("b", "w0"), ("d",)),
            Step("add", lambda b, c, d: (b + c * d,), ("b", "c", "d"), ("y",)),
        ),
        ("x", "w0", "w1"),
        ("y",),
    )


def exchange_inputs() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {n: torch.randn(D, D, generator=generator).requires_grad_() for n in ("x", "w0", "w1")}


EXCHANGE_BACKWARD = ("add", "block2", "block1", "exchange", "block0")
SELECTIVE = partial(
    create_selective_checkpoint_contexts,
    lambda ctx, op, *args, **kwargs: (
        CheckpointPolicy.MUST_SAVE if op is torch.ops.aten.mm.default else CheckpointPolicy.PREFER_RECOMPUTE
    ),
)


@pytest.mark.parametrize(
    ("inside", "around", "forwards"),
    [
        (False, None, 1),
        (True, None, 1),
        (False, {"use_reentrant": False}, 2),
        (True, {"use_reentrant": False}, 2),
        (False, {"use_reentrant": False, "early_stop": False}, 2),
        (False, {"use_reentrant": False, "context_fn": SELECTIVE}, 2),
        (False, {"use_reentrant": True}, 2),
    ],
)
def test_checkpoints_recompute_each_step_once(
    inside: bool, around: dict[str, Any] | None, forwards: int
) -> None:
    expected, inputs = exchange_inputs(), exchange_inputs()
    plain(exchanging(False), list(expected.values()))[0].square().sum().backward()

    Exchange.issued[:] = [0, 0]
    region = ScheduledRegion(exchanging(inside), backward=EXCHANGE_BACKWARD)

    def run(*given: Tensor) -> Tensor:
        return region(*given)[0].square()

    out = checkpoint(run, *inputs.values(), **around) if around else run(*inputs.values())
    out.sum().backward()
    assert_same_gradients(inputs, expected)
    assert Exchange.issued == [forwards, 1]


def test_a_reentrant_checkpoint_inside_a_step_is_refused_by_torch() -> None:
    region = one_step(lambda x: (checkpoint(torch.sin, x, use_reentrant=True),))
    with pytest.raises(RuntimeError, match="set use_reentrant=False") as caught:
        region(torch.ones(3, requires_grad=True))[0].sum().backward()
    assert caught.value.__notes__ == ["in the backward of step 'only' of a scheduled region"]


def test_a_checkpoint_around_the_region_keeps_nothing() -> None:
    alive: list[weakref.ref[Any]] = []

    def remember(x: Tensor) -> tuple[Tensor]:
        made = x.exp()
        alive.append(weakref.ref(made.untyped_storage()))
        return (made.sin(),)

    region = one_step(remember)
    x = torch.ones(3, requires_grad=True)
    kept = region(x)
    assert [weak() is None for weak in alive] == [False]
    del kept
    out = checkpoint(lambda x: region(x)[0].cos(), x, use_reentrant=False)
    assert [weak() is None for weak in alive] == [True, True]
    out.sum().backward()
    assert torch.equal(x.grad, torch.autograd.grad(x.exp().sin().cos().sum(), x)[0])  # type: ignore[arg-type]


def test_saved_tensor_hooks_of_the_caller_see_all_saved_tensors() -> None:
    (expected, reference), (inputs, region) = both()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach().clone(), lambda t: t):
        want, got = reference(*expected.values())[0], region(*inputs.values())[0]
    inputs["scale"].data.zero_()
    want.sum().backward()
    got.sum().backward()
    assert_same_gradients(inputs, expected)
