"""Memory of a scheduled region: never above plain autograd's, after forward and at the peak."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from fxskip.backward.program import Program, Step
from fxskip.backward.scheduled_region import ScheduledRegion
from tests.backward.random_programs import plain

TOKENS, WIDTH, LAYERS = 64, 32, 5


class Memory(TorchDispatchMode):
    """Bytes of all storages that operations have made while it is on and that are alive."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: dict[int, int] = {}
        self.peak = 0

    @property
    def now(self) -> int:
        return sum(self.alive.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        inputs = {
            t.untyped_storage()._cdata for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)
        }
        for tensor in pytree.tree_leaves(out):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in self.alive and storage._cdata not in inputs:
                    self.alive[storage._cdata] = storage.nbytes()
                    weakref.finalize(storage, self.alive.pop, storage._cdata)
        self.peak = max(self.peak, self.now)
        return out


def norm(x: Tensor, scale: Tensor) -> tuple[Tensor]:
    return (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * scale,)


def mlp(x: Tensor, up: Tensor, down: Tensor) -> tuple[Tensor]:
    return (F.linear(F.gelu(F.linear(x, up)), down),)


def gate(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    scores = F.linear(x, weight).softmax(-1)
    return scores.amax(-1, keepdim=True), scores.argmax(-1)


def add(x: Tensor, routed: Tensor, shared: Tensor, score: Tensor) -> tuple[Tensor]:
    return (x + routed * score + shared,)


def network() -> tuple[Program, dict[str, Tensor]]:
    """Layers with a routed and a shared part, as steps; and their inputs."""
    torch.manual_seed(0)
    steps: list[Step] = []
    inputs: dict[str, Tensor] = {"x": torch.randn(TOKENS, WIDTH, requires_grad=True)}
    stream = "x"
    for i in range(LAYERS):
        sizes = {"scale": (WIDTH,), "gate": (4, WIDTH), "up": (4 * WIDTH, WIDTH), "down": (WIDTH, 4 * WIDTH)}
        sizes |= {"up_s": (2 * WIDTH, WIDTH), "down_s": (WIDTH, 2 * WIDTH)}
        inputs |= {f"{n}{i}": torch.randn(s).mul_(0.1).requires_grad_() for n, s in sizes.items()}
        steps += [
            Step(f"norm{i}", norm, (stream, f"scale{i}"), (f"normed{i}",)),
            Step(f"gate{i}", gate, (f"normed{i}", f"gate{i}"), (f"score{i}", f"index{i}")),
            Step(f"routed{i}", mlp, (f"normed{i}", f"up{i}", f"down{i}"), (f"routed{i}",)),
            Step(f"shared{i}", mlp, (f"normed{i}", f"up_s{i}", f"down_s{i}"), (f"shared{i}",)),
            Step(f"add{i}", add, (stream, f"routed{i}", f"shared{i}", f"score{i}"), (f"h{i}",)),
        ]
        stream = f"h{i}"
    return Program(tuple(steps), tuple(inputs), (stream,)), inputs


def measured(call: Callable[..., Sequence[Any]], inputs: dict[str, Tensor], steps: int) -> tuple[int, int]:
    """Bytes after the last forward, and at the peak of `steps` forwards and backwards that accumulate."""
    with Memory() as memory:
        for _ in range(steps):
            [out] = call(*inputs.values())
            after = memory.now
            out.square().sum().backward()
            del out
    return after, memory.peak


@pytest.mark.parametrize("steps", [1, 3])
def test_memory_is_not_above_plain_autograd(steps: int) -> None:
    program, inputs = network()
    plain_after, plain_peak = measured(lambda *given: plain_frees(program, given), inputs, steps)
    for leaf in inputs.values():
        leaf.grad = None
    after, peak = measured(ScheduledRegion(program), inputs, steps)
    assert after <= plain_after
    assert peak <= plain_peak


def plain_frees(program: Program, inputs: Sequence[Any]) -> tuple[Any, ...]:
    """As `plain`; values are let go after their last use, as local variables of a function would be."""
    values = dict(zip(program.inputs, inputs, strict=True))
    for number, step in enumerate(program.steps):
        values.update(zip(step.outputs, step.function(*(values[name] for name in step.inputs)), strict=True))
        later = {name for other in program.steps[number + 1 :] for name in other.inputs} | set(
            program.outputs
        )
        values = {name: value for name, value in values.items() if name in later}
    return tuple(values[name] for name in program.outputs)


def test_unused_results_keep_no_graph() -> None:
    """What no output depends on is freed when the forward ends, not when the backward has run."""
    step = Step("both", lambda x: (x.sin(), x.exp().exp().exp().exp()), ("x",), ("y", "unused"))
    region = ScheduledRegion(Program((step,), ("x",), ("y",)))
    x = torch.randn(1000, requires_grad=True)
    with Memory() as memory:
        out = region(x)
        assert memory.now == 4000
    assert len(out) == 1


def test_plain_is_the_reference() -> None:
    """The memory above is that of the same numbers."""
    program, inputs = network()
    assert torch.equal(
        plain(program, list(inputs.values()))[0], ScheduledRegion(program)(*inputs.values())[0]
    )
