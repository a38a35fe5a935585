"""What a scheduled region refuses, and random numbers."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fxskip.backward.program import Program, Step
from fxskip.backward.scheduled_region import ScheduledRegion
from fxskip.errors import PassError, ScheduleError
from tests.backward.random_programs import plain
from tests.backward.tied_program import (
    leaves,
    one_step,
    tied_region,
)


def test_a_second_backward_is_refused() -> None:
    loss = tied_region()(*leaves().values())[0].sum()
    loss.backward(retain_graph=True)
    with pytest.raises(ScheduleError, match="a second backward through the same call"):
        loss.backward()


def test_double_backward_is_refused() -> None:
    inputs = leaves()
    loss = tied_region()(*inputs.values())[0].sum()
    with pytest.raises(ScheduleError, match="cannot be differentiated again"):
        torch.autograd.grad(loss, inputs["x"], create_graph=True)


@pytest.mark.parametrize(
    ("gradient", "found"),
    [
        (True, r"step 'only' differentiates by a Parameter of shape \[3\] that is not among its inputs"),
        (False, "a step differentiates by a tensor that is not among its inputs"),
    ],
)
def test_a_step_that_reaches_a_tensor_beside_its_inputs_is_refused(gradient: bool, found: str) -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    with pytest.raises(PassError, match=found):
        one_step(lambda x: (x * weight,))(torch.ones(3, requires_grad=gradient))


def test_a_step_that_reaches_a_value_of_another_step_is_refused() -> None:
    kept: list[Tensor] = []

    def keep(a: Tensor) -> tuple[Tensor]:
        kept.append(a * 2)
        return (kept[0],)

    steps = (
        Step("make", lambda x: (x * 2,), ("x",), ("a",)),
        Step("keep", keep, ("a",), ("b",)),
        Step("take", lambda b: (b + kept[0],), ("b",), ("y",)),
    )
    with pytest.raises(PassError, match="step 'take' differentiates by a value of another step"):
        ScheduledRegion(Program(steps, ("x",), ("y",)))(torch.ones(3, requires_grad=True))


def test_a_list_with_gradients_in_it_is_refused() -> None:
    with pytest.raises(PassError, match="'y' of step 'only' is a list with tensors that require"):
        one_step(lambda x: ([x * 2],))(torch.ones(3, requires_grad=True))


@pytest.mark.parametrize("result", [torch.ones(2), (torch.ones(2), 1)])
def test_a_step_returns_a_tuple_of_its_outputs(result: Any) -> None:
    with pytest.raises(PassError, match="instead of a tuple of its 1 outputs"):
        one_step(lambda x: result)(torch.ones(2))


def test_the_number_of_inputs_is_checked() -> None:
    with pytest.raises(PassError, match="called with 2 inputs instead of 4"):
        tied_region()(1, 2)


def writes(x: Tensor) -> tuple[Tensor]:
    return (x.mul_(2),)


@pytest.mark.parametrize("gradient", [True, False])
def test_a_write_into_what_another_step_reads_is_refused(gradient: bool) -> None:
    program = Program(
        (
            Step("make", lambda x: (x * 3,), ("x",), ("a",)),
            Step("write", writes, ("a",), ("b",)),
            Step("read", lambda a, b: (a + b,), ("a", "b"), ("y",)),
        ),
        ("x",),
        ("y",),
    )
    with pytest.raises(PassError, match="step 'write' writes into its input 'a'"):
        ScheduledRegion(program)(torch.ones(3, requires_grad=gradient))


def test_a_write_through_a_view_is_refused() -> None:
    program = Program(
        (
            Step("make", lambda x: ((y := x * 3), y[0]), ("x",), ("a", "view")),
            Step("write", writes, ("view",), ("b",)),
            Step("read", lambda a, b: (a + b,), ("a", "b"), ("y",)),
        ),
        ("x",),
        ("y",),
    )
    with pytest.raises(PassError, match="step 'read' reads 'a', which another step has overwritten"):
        ScheduledRegion(program)(torch.ones(3, 3, requires_grad=True))


def test_a_step_may_write_into_what_it_alone_reads() -> None:
    program = Program(
        (
            Step("make", lambda x: (x * 3,), ("x",), ("a",)),
            Step("write", writes, ("a",), ("y",)),
        ),
        ("x",),
        ("y",),
    )
    x = torch.ones(3, requires_grad=True)
    ScheduledRegion(program)(x)[0].sum().backward()
    assert torch.equal(x.grad, torch.full((3,), 6.0))  # type: ignore[arg-type]


def dropouts(random: bool) -> Program:
    drop = partial(F.dropout, p=0.5)
    return Program(
        (
            Step("a", lambda x: (drop(x),), ("x",), ("a",), random=random),
            Step("b", lambda x: (drop(x),), ("x",), ("b",), random=random),
            Step("c", lambda x: (x.cos(),), ("x",), ("c",)),
            Step("d", lambda a, b, c: (a + 2 * b + c,), ("a", "b", "c"), ("y",)),
        ),
        ("x",),
        ("y",),
    )


def test_random_numbers_are_drawn_in_program_order() -> None:
    program = dropouts(random=True)
    region = ScheduledRegion(program, forward=("c", "a", "b", "d"), backward=("d", "a", "b", "c"))
    x, expected = torch.ones(50, requires_grad=True), torch.ones(50, requires_grad=True)
    torch.manual_seed(3)
    plain(program, [expected])[0].sum().backward()
    torch.manual_seed(3)
    region(x)[0].sum().backward()
    assert torch.equal(x.grad, expected.grad)  # type: ignore[arg-type]


def test_an_order_that_draws_in_another_order_is_refused() -> None:
    with pytest.raises(
        ScheduleError, match="'b' runs before 'a', which it depends on: both draw random numbers"
    ):
        ScheduledRegion(dropouts(random=True), forward=("b", "a", "c", "d"))


@pytest.mark.parametrize("gradient", [True, False])
def test_undeclared_random_numbers_out_of_order_are_refused(gradient: bool) -> None:
    region = ScheduledRegion(dropouts(random=False), forward=("b", "a", "c", "d"))
    with pytest.raises(PassError, match="step 'b' draws random numbers and does not say so"):
        region(torch.ones(50, requires_grad=gradient))
