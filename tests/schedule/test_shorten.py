"""A step with fewer layers is the step that a model of fewer layers has."""

import networkx as nx
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

    def labelled(graph):
        return nx.relabel_nodes(graph.digraph, {t.name: (t.layer, t.role) for t in graph})

    assert set(labelled(short).edges) == set(labelled(expected).edges)
    assert [t.cost_us for t in short] == [t.cost_us for t in expected]


def test_a_short_step_is_left_alone():
    graph = decoder(4, farskip=True)
    assert shortened(graph, ["a", "b", "b", "b"], most=3) is graph
