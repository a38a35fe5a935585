"""Modules that a graph runs as they are, with their parameters as inputs of the region."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from fxskip.backward.module_calls import expose_parameters
from fxskip.backward.program import WeightGradient
from fxskip.backward.program_of import program_of
from fxskip.backward.scheduled_region import ScheduledRegion
from fxskip.backward.weight_gradients import WeightQueue
from fxskip.collectives.expert_parallel import Routing, run_own_experts
from fxskip.errors import PassError
from fxskip.leaves import make_leaf, run_leaf, running
from tests.zoo import tiny

WEIGHTS = ("experts_parameters_gate_up_proj", "experts_parameters_down_proj")


@pytest.fixture(params=["grouped_mm", "batched_mm", "eager"])
def layer(request: pytest.FixtureRequest) -> Iterator[nn.Module]:
    """The routed experts of a tiny model, as transformers runs them in each of its ways."""
    model = tiny("qwen2_moe", layers=2)
    model.set_experts_implementation(request.param)
    found = nn.Module()
    found.experts = model.model.layers[1].mlp.experts
    with running(found):
        yield found


def graph_of_experts() -> fx.Graph:
    graph = fx.Graph()
    rows, routing = graph.placeholder("rows"), graph.placeholder("routing")
    graph.output((graph.call_function(run_own_experts, ("experts", rows, routing)),))
    return graph


def gradients(tensors: tuple[Tensor, ...]) -> list[Tensor | None]:
    found = [tensor.grad for tensor in tensors]
    for tensor in tensors:
        tensor.grad = None
    return found


def test_weight_gradients_of_experts_come_later(layer: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of both stacks, whatever products the module takes; the same bits as autograd's."""
    later: list[set[str]] = []
    compute = WeightQueue.weight_gradients

    def noted(self: WeightQueue, leaves: Any) -> dict[str, list[Tensor]]:
        found = compute(self, leaves)
        later.append(set(found))
        return found

    monkeypatch.setattr(WeightQueue, "weight_gradients", noted)
    graph = graph_of_experts()
    [(held, placeholders)] = expose_parameters(graph, list(graph.nodes)[2])
    assert tuple(node.name for node in placeholders) == WEIGHTS
    program = program_of(graph, lambda node: "experts")
    assert program.weight_gradients == tuple(
        WeightGradient("experts", name, deferred=True) for name in WEIGHTS
    )
    region = ScheduledRegion(program, backward=("experts.dgrad", "experts.wgrad"), weights=WEIGHTS)

    rows = torch.randn(7, 64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    routing, weights = (
        Routing((7,), (7,), torch.tensor([[2, 2, 0, 3]]), None),
        tuple(layer.experts.parameters()),
    )
    run_own_experts("experts", rows, routing).square().sum().backward()
    want = gradients((rows, *weights))
    # Not leaves, as the local part of a DTensor.
    (out,) = region(rows, routing, *(parameter.view_as(parameter) for parameter in held.of_running_layer()))
    out.square().sum().backward()
    for got, expected in zip(gradients((rows, *weights)), want, strict=True):
        assert torch.equal(got, expected)
    assert later == [set(WEIGHTS)]


def test_a_leaf_runs_with_the_parameters_that_it_is_given() -> None:
    layer = nn.Module()
    layer.inner = nn.Linear(3, 3)
    make_leaf(layer, "inner")
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.output((graph.call_function(run_leaf, ("inner", "unknown", (x,), {})),))
    weight, bias, given = torch.ones(3, 3), torch.arange(3.0), torch.randn(4, 3)
    with running(layer):
        [(held, _)] = expose_parameters(graph, list(graph.nodes)[1])
        (out,) = fx.GraphModule(nn.Module(), graph)(given, weight, bias)
    assert held.names == ("weight", "bias")
    assert torch.equal(out, nn.functional.linear(given, weight, bias))
    assert layer.inner.weight is not weight


def test_other_parameters_are_refused(layer: nn.Module) -> None:
    graph = graph_of_experts()
    [(held, _)] = expose_parameters(graph, list(graph.nodes)[2])
    layer.experts.register_parameter("added", nn.Parameter(torch.ones(1)))
    with pytest.raises(
        PassError, match="has the parameters gate_up_proj, down_proj, added, and the region was made"
    ):
        held.of_running_layer()
