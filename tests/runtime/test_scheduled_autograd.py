"""A scheduled region under the rest of autograd: modes, hooks, checkpoints, errors."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
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

from fxskip.errors import PassError, ScheduleError
from fxskip.runtime.program import Program, Step
from fxskip.runtime.scheduled_backward import ScheduledRegion
from tests.runtime.random_programs import copies, loss_of, plain, random_case
from tests.runtime.test_scheduled_backward import assert_same_gradients

D = 6
"""Width of the tied network: its weights are [D, D], its values [5, D]."""


def first(x: Tensor, tied: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    normed = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * scale
    return F.linear(normed, tied), normed


def second(x: Tensor, tied: Tensor, bias: Tensor) -> tuple[Tensor]:
    return (F.gelu(F.linear(x, tied.t(), bias)),)


def third(x: Tensor, normed: Tensor, tied: Tensor) -> tuple[Tensor]:
    return (torch.matmul(F.linear(normed, tied), tied) + x,)


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


def compare(run: Callable[[dict[str, Tensor], Callable[..., tuple[Any, ...]]], None]) -> None:
    """`run` a training step plainly and scheduled; the gradients must be equal to the last bit."""
    (expected, reference), (inputs, region) = both()
    run(expected, reference)
    run(inputs, region)
    assert expected["tied"].grad is not None
    assert_same_gradients(inputs, expected)


# --- what training loops do ----------------------------------------------------------------------


def test_two_live_forwards_then_two_backwards() -> None:
    def run(inputs: dict[str, Tensor], call: Callable[..., tuple[Any, ...]]) -> None:
        (one,), (two,) = call(*inputs.values()), call(inputs["x"] * 2, *list(inputs.values())[1:])
        one.square().sum().backward()
        two.cos().sum().backward()

    compare(run)


def test_one_backward_through_two_calls() -> None:
    def run(inputs: dict[str, Tensor], call: Callable[..., tuple[Any, ...]]) -> None:
        (one,) = call(*inputs.values())
        (two,) = call(one, *[leaf.detach() for leaf in list(inputs.values())[1:]])
        two.square().sum().backward()

    compare(run)


def test_gradient_accumulation_over_three_micro_batches() -> None:
    def run(inputs: dict[str, Tensor], call: Callable[..., tuple[Any, ...]]) -> None:
        for seed in range(3):
            (out,) = call(leaves(seed)["x"].detach(), *list(inputs.values())[1:])
            out.square().mean().backward()

    compare(run)


@pytest.mark.parametrize("frozen", [("tied",), ("x",), ("x", "scale", "bias"), ("x", "tied", "scale")])
def test_frozen_parameters_and_inputs(frozen: tuple[str, ...]) -> None:
    (expected, reference), (inputs, region) = both()
    for leaf in (*(expected[n] for n in frozen), *(inputs[n] for n in frozen)):
        leaf.requires_grad_(False)
    reference(*expected.values())[0].square().sum().backward()
    region(*inputs.values())[0].square().sum().backward()
    assert_same_gradients(inputs, expected)


@pytest.mark.parametrize("cached", [True, False])
def test_autocast_casts_a_tied_weight_once(cached: bool) -> None:
    def run(inputs: dict[str, Tensor], call: Callable[..., tuple[Any, ...]]) -> None:
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=cached):
            for _ in range(2):
                (out,) = call(*inputs.values())
                out.float().square().sum().backward()

    compare(run)


def test_autocast_keeps_one_cast_a_parameter() -> None:
    seen: list[Tensor] = []

    def remember(x: Tensor, weight: Tensor) -> tuple[Tensor]:
        seen.append(weight)
        return (F.linear(x, weight),)

    steps = (Step("a", remember, ("x", "w"), ("a",)), Step("b", remember, ("a", "w"), ("y",)))
    region = ScheduledRegion(Program(steps, ("x", "w"), ("y",)))
    x, weight = torch.randn(2, D), torch.randn(D, D, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        for _ in range(3):
            region(x, weight)
    assert all(tensor is seen[0] for tensor in seen)  # autocast looks a cast up by its tensor
    assert seen[0] is not weight


def test_autograd_grad_is_right_and_leaves_parameters_alone() -> None:
    (expected, reference), (inputs, region) = both()
    for wanted in (["x"], ["tied"], ["x", "scale"], ["bias"]):
        want = torch.autograd.grad(
            reference(*expected.values())[0].sum(), [expected[name] for name in wanted]
        )
        got = torch.autograd.grad(region(*inputs.values())[0].sum(), [inputs[name] for name in wanted])
        assert all(map(torch.equal, got, want))
    assert all(leaf.grad is None for leaf in inputs.values())


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients_nothing_of_autograd_is_built(
    mode: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = leaves()
    want = plain(TIED, list(inputs.values()))[0]
    region = tied_region()
    monkeypatch.setattr("fxskip.runtime.scheduled_backward.RegionCall", None)
    monkeypatch.setattr("fxskip.runtime.scheduled_backward._Piece", None)
    with mode():
        (got,) = region(*inputs.values())
    assert torch.equal(got, want)
    assert not got.requires_grad


def test_nothing_is_built_where_nothing_wants_a_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    region = tied_region()
    monkeypatch.setattr("fxskip.runtime.scheduled_backward.RegionCall", None)
    assert not region(*leaves(gradient=False).values())[0].requires_grad


# --- refusals ------------------------------------------------------------------------------------


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


def one_step(function: Callable[..., Any], outputs: tuple[str, ...] = ("y",)) -> ScheduledRegion:
    return ScheduledRegion(Program((Step("only", function, ("x",), outputs),), ("x",), ("y",)))


def test_a_step_that_reaches_a_tensor_beside_its_inputs_is_refused() -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    region = one_step(lambda x: (x * weight,))
    for gradient in (True, False):
        x = torch.ones(3, requires_grad=gradient)
        if gradient:
            with pytest.raises(PassError, match=r"'only' differentiates by a Parameter of shape \[3\]"):
                region(x)


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


# --- random numbers ------------------------------------------------------------------------------


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


# --- checkpoints ---------------------------------------------------------------------------------


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


def test_a_checkpoint_around_the_region_keeps_nothing() -> None:
    alive: list[weakref.ref[Any]] = []

    def remember(x: Tensor) -> tuple[Tensor]:
        made = x.exp()
        alive.append(weakref.ref(made.untyped_storage()))
        return (made.sin(),)

    region = one_step(remember)
    x = torch.ones(3, requires_grad=True)
    out = checkpoint(lambda x: region(x)[0].cos(), x, use_reentrant=False)
    assert [weak() for weak in alive] == [None]
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


# --- errors and memory ---------------------------------------------------------------------------


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
        ScheduledRegion(program, forward=FORWARD, backward=BACKWARD, drain=lambda: drained.append("drained")),
    )


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
        assert caught.value.__notes__ == [f"in the {direction} of step 'second' of a scheduled region"]
        assert drained == ["drained"]

        fails[direction] = False
        for leaf in inputs.values():
            leaf.grad = None
        expected = leaves()
        plain(TIED, list(expected.values()))[0].sum().backward()
        region(*inputs.values())[0].sum().backward()
        assert_same_gradients(inputs, expected)
        assert drained == ["drained"]


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
