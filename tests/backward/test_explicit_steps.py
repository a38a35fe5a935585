"""Which step each operation of a layer's graph belongs to."""

import operator
from typing import Any

import torch
from torch import Tensor, fx

from fxskip.backward.explicit_region import _steps
from fxskip.backward.program_of import program_of
from fxskip.backward.scheduled_region import ScheduledRegion
from fxskip.schedule.region_tasks import TASK


def test_memory_is_written_in_one_step() -> None:
    """As a key is put together of two parts, between which a sum over ranks may stand; readers keep their step."""
    graph = fx.Graph()

    def add(task: str, function: Any, *args: Any, value: Tensor | None = None) -> fx.Node:
        node = graph.call_function(function, args)
        node.meta.update({TASK: (task, "compute")} | ({} if value is None else {"example_value": value}))
        return node

    x, y = graph.placeholder("x"), graph.placeholder("y")
    made = torch.empty(2, 4)
    key = add("first", torch.zeros, (2, 4), value=made)
    doubled = add("first", torch.mul, x, 2.0, value=torch.empty(2, 2))
    one = add("first", operator.setitem, key, (slice(None), slice(0, 2)), doubled)
    half = add("second", torch.mul, y, 0.5, value=torch.empty(2, 2))
    other = add("second", operator.setitem, key, (slice(None), slice(2, 4)), half)
    read = add("third", torch.square, key, value=torch.empty(2, 4))
    graph.output((read,))
    steps = _steps(graph)
    assert {steps[n] for n in (key, one, half, other)} == {"second"}
    assert (steps[doubled], steps[read]) == ("first", "third")
    a, b = (torch.randn(2, 2, requires_grad=True) for _ in range(2))
    (got,) = ScheduledRegion(program_of(graph, steps))(a, b)
    got.sum().backward()
    want = torch.cat((a * 2.0, b * 0.5), 1).square()
    assert torch.equal(got, want)
    wanted = torch.autograd.grad(want.sum(), (a, b))
    assert torch.equal(a.grad, wanted[0]) and torch.equal(b.grad, wanted[1])  # type: ignore[arg-type]
