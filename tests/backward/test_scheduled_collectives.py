"""Starts and waits as steps: issued and waited for by the plan, with nothing read while it is in flight.

The collective is fake: its buffer is NaN from start to wait, and it is found again by its storage.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fxskip.backward.program import Program, Step
from fxskip.backward.scheduled_region import ScheduledRegion
from tests.backward.random_programs import plain

ROWS, D = 5, 6


class Network:
    """What is in flight, by storage, and what has happened."""

    def __init__(self) -> None:
        self.in_flight: dict[int, tuple[Tensor, Tensor]] = {}
        self.events: list[str] = []

    def issue(self, value: Tensor) -> Tensor:
        buffer = torch.full_like(value, float("nan"))
        self.in_flight[buffer.untyped_storage().data_ptr()] = (buffer, value.flip(0))
        return buffer

    def complete(self, buffer: Tensor) -> None:
        _, arrived = self.in_flight.pop(buffer.untyped_storage().data_ptr())
        buffer.data.copy_(arrived)

    def drain(self) -> None:
        self.in_flight.clear()


class Start(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, network: Network, name: str) -> Tensor:
        ctx.network, ctx.name = network, name
        network.events.append(f"start {name}")
        return network.issue(value)

    @staticmethod
    def backward(ctx: Any, token: Tensor) -> Any:
        ctx.network.events.append(f"wait reverse {ctx.name}")
        buffer, _ = TOKENS.pop(token.untyped_storage().data_ptr())
        ctx.network.complete(buffer)
        return buffer, None, None


class Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, buffer: Tensor, network: Network, name: str) -> Tensor:
        ctx.network, ctx.name = network, name
        network.events.append(f"wait {name}")
        network.complete(buffer)
        return buffer.view_as(buffer)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        ctx.network.events.append(f"start reverse {ctx.name}")
        token = gradient.new_full((1,), float("nan")).as_strided(gradient.shape, (0,) * gradient.dim())
        TOKENS[token.untyped_storage().data_ptr()] = (ctx.network.issue(gradient), token)
        return token, None, None


TOKENS: dict[int, tuple[Tensor, Tensor]] = {}
"""The buffers of reverse collectives, by the storage of the one-element token that travels in their place."""


def layers(network: Network, log: Callable[[str, Tensor], Tensor]) -> Program:
    """Two layers: experts between a dispatch and a combine, attention beside them, as in FarSkip."""
    steps: list[Step] = []

    def both(name: str, source: str, target: str) -> list[Step]:
        return [
            Step(
                f"start_{name}", lambda x: (Start.apply(x, network, name),), (source,), (f"{name}_in_flight",)
            ),
            Step(
                f"wait_{name}", lambda b: (Wait.apply(b, network, name),), (f"{name}_in_flight",), (target,)
            ),
        ]

    def block(name: str) -> Callable[..., tuple[Tensor]]:
        return lambda x, weight: (log(name, torch.tanh(F.linear(x, weight)) * x),)

    stream = "x"
    for i in range(2):
        steps += [Step(f"route{i}", block(f"route{i}"), (stream, f"wr{i}"), (f"t{i}",))]
        steps += both(f"dispatch{i}", f"t{i}", f"d{i}")
        steps += [
            Step(f"attention{i}", block(f"attention{i}"), (stream, f"wa{i}"), (f"a{i}",)),
            Step(f"experts{i}", block(f"experts{i}"), (f"d{i}", f"we{i}"), (f"e{i}",)),
        ]
        steps += both(f"combine{i}", f"e{i}", f"c{i}")
        steps += [Step(f"add{i}", lambda *v: (v[0] + v[1] + v[2],), (stream, f"a{i}", f"c{i}"), (f"h{i}",))]
        stream = f"h{i}"
    weights = [f"w{kind}{i}" for i in range(2) for kind in "rae"]
    return Program(tuple(steps), ("x", *weights), (stream,))


def inputs() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    names = [f"w{kind}{i}" for i in range(2) for kind in "rae"]
    shapes = {"x": (ROWS, D), **dict.fromkeys(names, (D, D))}
    return {n: torch.randn(s, generator=generator).requires_grad_() for n, s in shapes.items()}


class Log(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, network: Network, name: str) -> Tensor:
        ctx.network, ctx.name = network, name
        network.events.append(name)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        ctx.network.events.append(ctx.name)
        return gradient, None, None


def logged(network: Network) -> Program:
    return layers(network, lambda name, x: Log.apply(x, network, name))


BACKWARD_OF_A_LAYER = (
    "add",
    "wait_combine",
    "attention",
    "start_combine",
    "experts",
    "wait_dispatch",
    "start_dispatch",
    "route",
)
BACKWARD = [f"{step}{i}" for i in (1, 0) for step in BACKWARD_OF_A_LAYER]


def expected() -> tuple[Tensor, dict[str, Tensor | None]]:
    network, leaves = Network(), inputs()
    out = plain(logged(network), list(leaves.values()))[0]
    out.square().sum().backward()
    return out, {name: leaf.grad for name, leaf in leaves.items()}


def assert_expected(out: Tensor, leaves: dict[str, Tensor]) -> None:
    want, gradients = expected()
    assert torch.equal(out, want)
    for name, gradient in gradients.items():
        assert gradient is not None
        found = leaves[name].grad
        assert found is not None
        assert gradient.isfinite().all()
        assert torch.equal(found, gradient), name


def test_the_plan_says_when_collectives_start_and_when_they_are_waited_for() -> None:
    network, leaves = Network(), inputs()
    region = ScheduledRegion(logged(network), backward=BACKWARD, drain=network.drain)
    out = region(*leaves.values())[0]
    network.events.clear()
    out.square().sum().backward()
    assert network.events == [
        event
        for i in (1, 0)
        for event in (
            f"start reverse combine{i}",
            f"attention{i}",
            f"wait reverse combine{i}",
            f"experts{i}",
            f"start reverse dispatch{i}",
            f"wait reverse dispatch{i}",
            f"route{i}",
        )
    ]
    assert_expected(out, leaves)
    assert not network.in_flight


def test_an_early_read_would_be_seen() -> None:
    """The control: what reads a buffer before its wait gets NaN."""
    network, leaves = Network(), inputs()
    program = logged(network)
    early = Step("early", lambda e, b: (e + b,), ("e1", "combine1_in_flight"), ("early",))
    reads = Program((*program.steps, early), program.inputs, ("h1", "early"))
    order = [step.name for step in program.steps]
    order.insert(order.index("wait_combine1"), "early")
    result, read = ScheduledRegion(reads, forward=order)(*leaves.values())
    assert result.isfinite().all()
    assert read.isnan().all()


@pytest.mark.parametrize("fails", ["attention1", "experts0", "experts1"])
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_an_error_leaves_nothing_in_flight(fails: str, direction: str) -> None:
    network, leaves = Network(), inputs()
    broken = [True]

    class Breaks(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            if broken[0] and direction == "forward":
                raise RuntimeError("out of memory")
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            if broken[0]:
                raise RuntimeError("out of memory")
            return gradient

    program = layers(network, lambda name, x: Breaks.apply(x) if name == fails else x)
    program_order = [step.name for step in program.steps]
    region = ScheduledRegion(program, forward=program_order, backward=BACKWARD, drain=network.drain)
    with pytest.raises(RuntimeError, match="out of memory") as caught:
        region(*leaves.values())[0].square().sum().backward()
    assert caught.value.__notes__ == [f"in the {direction} of step '{fails}' of a scheduled region"]
    assert not network.in_flight

    broken[0] = False
    for leaf in leaves.values():
        leaf.grad = None
    out = region(*leaves.values())[0]
    out.square().sum().backward()
    assert_expected(out, leaves)


def test_only_some_gradients_leave_nothing_in_flight() -> None:
    network, leaves = Network(), inputs()
    region = ScheduledRegion(logged(network), backward=BACKWARD, drain=network.drain)
    torch.autograd.grad(region(*leaves.values())[0].sum(), leaves["wa1"])
    assert not network.in_flight


def test_a_checkpoint_around_the_region_issues_each_collective_once_more() -> None:
    network, leaves = Network(), inputs()
    region = ScheduledRegion(logged(network), backward=BACKWARD, drain=network.drain)
    out = checkpoint(lambda *given: region(*given)[0], *leaves.values(), use_reentrant=False)
    out.square().sum().backward()
    assert sum(event.startswith("start") and "reverse" not in event for event in network.events) == 8
    assert sum(event.startswith("start reverse") for event in network.events) == 4
    assert not network.in_flight
    assert_expected(out, leaves)
