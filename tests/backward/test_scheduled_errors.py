"""Errors in the middle of a scheduled region, and what lives how long."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from fxskip.backward.program import Program, Step
from fxskip.backward.scheduled_region import ScheduledRegion
from fxskip.backward.site import Site
from tests.backward.random_programs import copies, loss_of, plain, random_case
from tests.backward.test_scheduled_region import assert_same_gradients
from tests.backward.tied_program import (
    BACKWARD,
    FORWARD,
    TIED,
    leaves,
    plain_on,
    second,
    tied_region,
)


class Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise ValueError("broken")


@contextmanager
def failing_drain() -> Iterator[tuple[dict[str, bool], list[str], ScheduledRegion]]:
    """A region whose step "second" fails where told to."""
    fails, drained = {"forward": False, "backward": False}, []

    def flaky(h: Tensor, tied: Tensor, bias: Tensor) -> tuple[Tensor]:
        if fails["forward"]:
            raise ValueError("broken")
        return second(Failing.apply(h) if fails["backward"] else h, tied, bias)

    steps = tuple(
        Step(s.name, flaky if s.name == "second" else s.function, s.inputs, s.outputs) for s in TIED.steps
    )
    program = Program(steps, TIED.inputs, TIED.outputs)
    yield (
        fails,
        drained,
        ScheduledRegion(
            program,
            forward=FORWARD,
            backward=BACKWARD,
            drain=lambda: drained.append("drained"),
            site=partial(Noting, drained),
        ),
    )


class Noting(Site):
    """Writes down where errors were."""

    def __init__(self, noted: list[str]) -> None:
        self.noted = noted

    def failed(self, error: BaseException, where: str) -> None:
        self.noted.append(f"{error} in the {where}")


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("gradient", [True, False])
def test_an_error_drains_names_the_step_and_leaves_a_region_that_works(
    direction: str, gradient: bool
) -> None:
    if direction == "backward" and not gradient:
        return
    with failing_drain() as (fails, drained, region):
        inputs = leaves()
        fails[direction] = True
        with (
            pytest.raises(ValueError, match="broken") as caught,
            nullcontext() if gradient else torch.no_grad(),
        ):
            region(*inputs.values())[0].sum().backward()
        where = f"in the {direction} of step 'second' of a scheduled region"
        assert caught.value.__notes__ == [where]
        assert drained == [f"broken {where}", "drained"]  # told before it waits

        fails[direction] = False
        for leaf in inputs.values():
            leaf.grad = None
        expected = leaves()
        plain(TIED, list(expected.values()))[0].sum().backward()
        region(*inputs.values())[0].sum().backward()
        assert_same_gradients(inputs, expected)
        assert drained[1:] == ["drained"]


def test_an_error_between_the_steps_is_drained_by_the_next_call() -> None:
    with failing_drain() as (_, drained, region):
        inputs = leaves()

        def hook(bias: Tensor) -> None:
            raise ValueError("an optimizer failed")

        handle = inputs["bias"].register_post_accumulate_grad_hook(hook)
        with pytest.raises(ValueError, match="an optimizer failed"):
            region(*inputs.values())[0].sum().backward()
        assert drained == []
        handle.remove()
        region(*inputs.values())[0].sum().backward()
        assert drained == ["drained"]


def test_a_backward_that_needs_only_some_steps_is_drained() -> None:
    with failing_drain() as (_, drained, region):
        inputs = leaves()
        torch.autograd.grad(region(*inputs.values())[0].sum(), inputs["bias"])
        assert drained == ["drained"]
        torch.autograd.grad(region(*inputs.values())[0].sum(), inputs["scale"])
        assert drained == ["drained"]


def test_a_forward_whose_backward_is_never_called_is_freed() -> None:
    inputs = leaves()
    region = tied_region()
    gc.collect()
    gc.disable()
    try:
        for hooks in (nullcontext(), torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t)):
            with hooks:
                (out,) = region(*inputs.values())
            piece = weakref.ref(out.grad_fn)
            call = weakref.ref(out.grad_fn.backward_state.call)  # type: ignore[union-attr]
            del out
            assert piece() is None
            assert call() is None
    finally:
        gc.enable()


def test_random_programs_accumulate_and_interleave() -> None:
    """Two calls alive at once, then a third, against plain autograd doing the same."""
    for seed in range(300, 315):
        case = random_case(seed)
        expected, inputs = copies(case.inputs), copies(case.inputs)
        region = ScheduledRegion(case.program, forward=case.forward, backward=case.backward)
        for leaves_of, call in (
            (expected, partial(plain_on, case.program)),
            (inputs, region),
        ):
            losses = [loss_of(call(*leaves_of.values())) for _ in range(2)]
            for loss in losses:
                if loss is not None:
                    loss.backward()
            last = loss_of(call(*leaves_of.values()))
            if last is not None:
                last.backward()
        assert_same_gradients(inputs, expected)
