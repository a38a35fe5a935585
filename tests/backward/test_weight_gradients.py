"""Products whose weight gradients are split off: the same bits, and the weight's gradient at its event."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fxskip.backward.program import Program, Step
from fxskip.backward.scheduled_region import ScheduledRegion
from fxskip.backward.weight_gradients import product
from tests.backward.random_programs import plain

E, T, D, H = 3, 6, 8, 16
"""Experts, tokens of each, width, hidden width."""

Case = tuple[Callable[[Tensor, Tensor], Tensor], tuple[int, ...], tuple[int, ...], torch.dtype]
"""A product of x and w in a step, the shapes of x and w, the dtype."""

ENDS = torch.arange(1, E + 1, dtype=torch.int32) * T

CASES: dict[str, Case] = {
    "linear": (lambda x, w: product(F.linear, (1, 2), x, w), (2, T, D), (H, D), torch.float32),
    "linear, bfloat16": (lambda x, w: product(F.linear, (1,), x, w), (2, T, D), (H, D), torch.bfloat16),
    "linear with a bias": (
        lambda x, w: product(F.linear, (1, 2), x, w, w[:, 0]),
        (T, D),
        (H, D),
        torch.float32,
    ),
    "matmul": (lambda x, w: product(torch.matmul, (1,), x, w), (2, T, D), (D, H), torch.float32),
    "mm with a view": (lambda x, w: product(torch.mm, (1,), x, w.t()), (T, D), (H, D), torch.float32),
    "addmm": (lambda x, w: product(torch.addmm, (2,), x, x, w), (T, D), (D, D), torch.float32),
    "bmm": (lambda x, w: product(torch.bmm, (1,), x, w), (E, T, D), (E, D, H), torch.float32),
    "bmm with a view": (lambda x, w: product(torch.bmm, (1,), x, w.mT), (E, T, D), (E, H, D), torch.float32),
    "grouped_mm": (
        lambda x, w: product(F.grouped_mm, (1,), x, w, offs=ENDS),
        (E * T, D),
        (E, D, H),
        torch.bfloat16,
    ),
    "grouped_mm with a view": (
        lambda x, w: product(F.grouped_mm, (1,), x, w.mT, offs=ENDS),
        (E * T, D),
        (E, H, D),
        torch.bfloat16,
    ),
}


def leaves(case: Case, wanted: tuple[bool, bool]) -> tuple[Tensor, Tensor]:
    _, x, w, dtype = case
    generator = torch.Generator().manual_seed(0)
    made = [torch.randn(shape, generator=generator).to(dtype) for shape in (x, w)]
    return made[0].requires_grad_(wanted[0]), made[1].requires_grad_(wanted[1])


def program(case: Case) -> Program:
    """The product between two other steps, one before it only where x wants a gradient."""
    function = case[0]
    steps = (
        Step("before", lambda x: (x.sin(),), ("x",), ("a",)),
        Step("product", lambda a, w: (function(a, w).tanh(),), ("a", "w"), ("b",)),
        Step("after", lambda b: (b.square(),), ("b",), ("y",)),
    )
    return Program(steps, ("x", "w"), ("y",))


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("wanted", [(True, True), (False, True), (True, False)])
def test_split_gradients_are_bitwise_those_of_plain_autograd(name: str, wanted: tuple[bool, bool]) -> None:
    case = CASES[name]
    expected, (x, w) = leaves(case, wanted), leaves(case, wanted)
    want = plain(program(case), expected)[0]
    want.sum().backward()

    events: list[str] = []
    if wanted[0]:
        x.register_post_accumulate_grad_hook(lambda leaf: events.append("x"))
    if wanted[1]:
        w.register_post_accumulate_grad_hook(lambda leaf: events.append("w"))
    order = ("after", "product.dgrad", "before", "product.wgrad")
    (got,) = ScheduledRegion(program(case), backward=order)(x, w)
    assert torch.equal(got, want)
    got.sum().backward()
    for leaf, reference in zip((x, w), expected, strict=True):
        assert (leaf.grad is None) == (reference.grad is None)
        assert leaf.grad is None or torch.equal(leaf.grad, reference.grad)  # type: ignore[arg-type]
    assert events == [name for name, wants in zip("xw", wanted, strict=True) if wants]


def test_a_checkpoint_inside_the_step_is_not_recomputed_twice() -> None:
    """The weight's gradient then comes with the others."""
    runs = [0]

    def inside(a: Tensor, w: Tensor) -> Tensor:
        runs[0] += 1
        return product(F.linear, (1,), a, w).tanh()

    def step(a: Tensor, w: Tensor) -> tuple[Tensor]:
        return (checkpoint(inside, a, w, use_reentrant=False),)

    case = CASES["linear"]
    only = Program((Step("only", step, ("x", "w"), ("y",)),), ("x", "w"), ("y",))
    (x, w), expected = leaves(case, (True, True)), leaves(case, (True, True))
    F.linear(*expected).tanh().sum().backward()
    ScheduledRegion(only, backward=("only.dgrad", "only.wgrad"))(x, w)[0].sum().backward()
    assert runs == [2]
    assert torch.equal(w.grad, expected[1].grad)  # type: ignore[arg-type]


@pytest.mark.parametrize("gradient", [True, False])
def test_outside_of_a_split_step_a_product_is_a_plain_call(gradient: bool) -> None:
    x, w = leaves(CASES["linear"], (gradient, gradient))
    out = product(F.linear, (1,), x, w)
    assert torch.equal(out, F.linear(x, w))
    assert out.requires_grad is gradient
    assert type(out.grad_fn) is type(F.linear(x, w).grad_fn)


def test_a_weight_that_is_no_parameter_is_not_deferred() -> None:
    """A made value's gradient is wanted by the step that made it, right after `.dgrad`."""
    steps = (
        Step("make", lambda x, w: (w * 2, x.sin()), ("x", "w"), ("made", "a")),
        Step("product", lambda a, made: (product(F.linear, (1,), a, made),), ("a", "made"), ("y",)),
    )
    whole = Program(steps, ("x", "w"), ("y",))
    (x, w), expected = leaves(CASES["linear"], (True, True)), leaves(CASES["linear"], (True, True))
    plain(whole, expected)[0].cos().sum().backward()
    region = ScheduledRegion(whole, backward=("product.dgrad", "make", "product.wgrad"))
    region(x, w)[0].cos().sum().backward()
    assert torch.equal(w.grad, expected[1].grad)  # type: ignore[arg-type]
    assert torch.equal(x.grad, expected[0].grad)  # type: ignore[arg-type]
