"""Task graphs: what they say about themselves, and what they refuse."""

import math

import pytest

from fxskip.errors import ScheduleError
from fxskip.schedule.tasks import TaskGraph
from tests.schedule.graphs import task


def chain():
    tasks = [
        task("gate"),
        task("dispatch", "expert", 20.0, bytes_in_flight=8),
        task("experts"),
        task("shared"),
    ]
    return TaskGraph(tasks, {"dispatch": ["gate"], "experts": ["dispatch"]})


def test_a_graph_knows_producers_consumers_and_lanes():
    graph = chain()
    assert graph.producers("experts") == ("dispatch",)
    assert graph.consumers("gate") == ("dispatch",)
    assert graph.lanes == ("compute", "expert")
    assert [one.name for one in graph if one.is_collective] == ["dispatch"]
    assert len(graph) == 4 and "shared" in graph and "combine" not in graph


def test_program_order_is_the_order_given_with_needs_first():
    tasks = [task("c"), task("a"), task("b")]
    assert TaskGraph(tasks, {"c": ["b"]}).program_order == ("a", "b", "c")
    assert chain().program_order == ("gate", "dispatch", "experts", "shared")


def test_backward_runs_layers_from_the_last_to_the_first():
    tasks = [task("a", layer=0), task("b", layer=2), task("c", layer=1)]
    assert TaskGraph(tasks, {}).layers == (0, 1, 2)
    assert TaskGraph(tasks, {}, backward=True).layers == (2, 1, 0)


def test_other_costs_leave_the_graph_alone():
    graph = chain()
    other = graph.with_costs({"experts": 7.0})
    assert (other["experts"].cost_us, graph["experts"].cost_us) == (7.0, 10.0)
    assert other.needs == graph.needs


@pytest.mark.parametrize("cost", [0.0, -1.0, math.nan, math.inf])
def test_a_cost_is_positive_and_finite(cost):
    with pytest.raises(ScheduleError, match="cost_us is"):
        TaskGraph([task("a", cost_us=cost)], {})


def test_a_cycle_is_named():
    with pytest.raises(ScheduleError, match=r"a -> b -> a|b -> a -> b"):
        TaskGraph([task("a"), task("b")], {"a": ["b"], "b": ["a"]})


@pytest.mark.parametrize(
    ("needs", "where"), [({"gate": ["dispach"]}, "needs of gate"), ({"dispach": ["gate"]}, "dispach")]
)
def test_an_unknown_name_suggests_a_known_one(needs, where):
    with pytest.raises(ScheduleError, match="did you mean 'dispatch'") as caught:
        TaskGraph([task("gate"), task("dispatch", "expert")], needs)
    assert where in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "found"),
    [
        ({"layer": -1}, "layer is -1"),
        ({"host_us": -2.0}, "host_us is -2.0"),
        ({"bytes_in_flight": -3, "lane": "expert"}, "bytes_in_flight is -3"),
        ({"bytes_in_flight": 3}, "3 bytes in flight on the lane 'compute'"),
        ({"lane": ""}, "no lane"),
        ({"kernel": "medium"}, "kernel is 'medium'"),
        ({"work": "gemm"}, "work is 'gemm'"),
        ({"may_cross": "both"}, "may_cross is 'both'"),
    ],
)
def test_values_that_no_task_has(fields, found):
    with pytest.raises(ScheduleError, match=found):
        TaskGraph([task("a", **fields)], {})


def test_two_tasks_of_one_name():
    with pytest.raises(ScheduleError, match="two tasks have one name"):
        TaskGraph([task("a"), task("a")], {})


def test_costs_of_a_task_that_does_not_exist():
    with pytest.raises(ScheduleError, match="did you mean 'experts'"):
        chain().with_costs({"expert": 1.0})
