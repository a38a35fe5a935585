"""A step with fewer layers is the step that a model of fewer layers has."""

import pytest

from fxskip.schedule.derive_backward import derive_backward
from fxskip.schedule.periodic import Periods
from fxskip.schedule.problem import Problem
from fxskip.schedule.shorten import shortened
from tests.schedule.graphs import decoder


@pytest.mark.parametrize("farskip", [False, True])
@pytest.mark.parametrize("backward", [False, True])
def test_a_cut_leaves_a_shorter_model(farskip, backward):
    def made(layers):
        graph = decoder(layers, farskip=farskip)
        return derive_backward(graph) if backward else graph

    long = made(20)
    kinds = Periods(long, Problem.of(long, rule="layers")).kinds
    short = shortened(long, kinds, most=6)
    layers = len(short.layers)
    assert 6 <= layers <= 9  # the first layers are of kinds of their own
    expected = made(layers)

    def edges(graph):
        return {
            ((graph[producer].layer, graph[producer].role), (task.layer, task.role))
            for task in graph
            for producer in graph.producers(task.name)
        }

    assert edges(short) == edges(expected)
    assert [t.cost_us for t in short] == [t.cost_us for t in expected]


def test_a_short_step_is_left_alone():
    graph = decoder(4, farskip=True)
    assert shortened(graph, ["a", "b", "b", "b"], most=3) is graph
