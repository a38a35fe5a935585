"""The backward graph: needs reversed, costs by the stated factors."""

import pytest

from fxskip.errors import ScheduleError
from fxskip.schedule.derive_backward import derive_backward
from fxskip.schedule.tasks import Task, TaskGraph
from tests.schedule.graphs import decoder, task


def forward():
    tasks = [
        task("gate", cost_us=10.0, has_weights=True),
        task("sizes", "host", 3.0),
        task("dispatch", "expert", 40.0, bytes_in_flight=64),
        task("experts", cost_us=100.0, has_weights=True),
        task("add", cost_us=4.0, work="elementwise", kernel="short"),
    ]
    needs = {"sizes": ["gate"], "dispatch": ["gate", "sizes"], "experts": ["dispatch"], "add": ["experts"]}
    return TaskGraph(tasks, needs)


def test_needs_are_reversed_and_the_host_has_no_gradient():
    graph = derive_backward(forward())
    assert graph.needs == {
        "experts.bwd": ("add.bwd",),
        "dispatch.bwd": ("experts.bwd",),
        "gate.bwd": ("dispatch.bwd",),
    }
    assert graph.program_order == ("add.bwd", "experts.bwd", "dispatch.bwd", "gate.bwd")


def test_compute_costs_the_factor_and_collectives_the_same():
    graph = derive_backward(forward(), compute_factor=2.5, costs={"add.bwd": 1.5})
    assert {one.name: one.cost_us for one in graph} == {
        "add.bwd": 1.5,
        "experts.bwd": 250.0,
        "dispatch.bwd": 40.0,
        "gate.bwd": 25.0,
    }
    assert graph["dispatch.bwd"].bytes_in_flight == 64
    assert {one.kernel for one in graph if one.work == "elementwise"} == {"short"}


def test_a_weight_gradient_is_waited_for_by_its_reduction_alone():
    sums = {reduction("sum", 77.0): ["experts"]}
    graph = derive_backward(forward(), split_weights=True, weight_share=0.4, reductions=sums)
    assert graph["experts.dgrad"].cost_us == pytest.approx(120.0)
    assert graph["experts.wgrad"].cost_us == pytest.approx(80.0)
    assert graph.producers("experts.wgrad") == ("experts.dgrad",)
    assert graph.consumers("experts.wgrad") == ("sum",)
    assert graph.consumers("gate.wgrad") == graph.consumers("sum") == ()
    assert graph.consumers("experts.dgrad") == ("experts.wgrad", "dispatch.bwd")
    assert (graph["sum"].lane, graph["sum"].cost_us, graph["sum"].bytes_in_flight) == ("data", 77.0, 640)
    assert "add.wgrad" not in graph  # no weights


def test_without_a_split_the_reduction_follows_the_whole_task():
    graph = derive_backward(forward(), reductions={reduction("sum", 5.0): ["gate", "experts"]})
    assert graph.producers("sum") == ("experts.bwd", "gate.bwd")
    assert graph.program_order[-1] == "sum"


def test_a_reduction_of_what_is_no_task_comes_first():
    graph = derive_backward(forward(), reductions={reduction("sum", 5.0): []})
    assert graph.producers("sum") == () and graph.program_order[0] == "sum"


def reduction(name: str, us: float) -> Task:
    return Task(name, "data", us, phase="backward", bytes_in_flight=640)


def test_the_backward_of_the_backward_has_the_needs_of_the_forward():
    graph = decoder(4, farskip=True)
    twice = derive_backward(derive_backward(graph))
    assert twice.needs.keys() == {f"{name}.bwd.bwd" for name in graph.needs}
    for name, producers in graph.needs.items():
        assert set(twice.producers(f"{name}.bwd.bwd")) == {f"{p}.bwd.bwd" for p in producers}
    assert not twice.backward


def test_what_finishes_a_pending_value_crosses_the_other_way():
    graph = derive_backward(decoder(3, farskip=True))
    assert graph["1.routed_add.bwd"].may_cross == "previous"
    assert graph["1.combine.bwd"].may_cross == "previous"  # issued where the gradient that it sends is made
    assert graph["1.dispatch.bwd"].may_cross == ""


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        ({"compute_factor": 0.0}, "compute_factor is 0.0"),
        ({"weight_share": 1.0}, "weight_share is 1.0"),
        (
            {"reductions": {reduction("sum", 1.0): ["dispatch"]}},
            "sum adds up gradients of 'dispatch', which is no",
        ),
        ({"costs": {"expert.bwd": 1.0}}, "did you mean 'experts.bwd'"),
    ],
)
def test_refusals(arguments, found):
    with pytest.raises(ScheduleError, match=found):
        derive_backward(forward(), **arguments)
