"""Take each exchange apart into its start and its wait, so that something can run in between.

before   rows -> exchange -> arrived
after    rows -> start -> buffer -> wait -> arrived
                   flight ----------^
"""

from __future__ import annotations

from typing import Any

from torch import fx

from fxskip.collectives import in_flight
from fxskip.collectives.expert_parallel import Direction, Routing
from fxskip.collectives.in_flight import Flight
from fxskip.ir import copy_graph
from fxskip.leaves import running_layer
from fxskip.parallel import Mode
from fxskip.passes.shard import exchange


def take_off(routing: Routing, direction: Direction, at_once: bool) -> Flight:
    """The flight of one exchange of the layer that runs; `at_once` waits where it is started."""
    name = f"{direction} of decoder layer {running_layer().fxskip_layer}"
    return Flight(name, routing.exchange(direction), at_once=at_once)


def split_collectives(graph: fx.Graph, mode: Mode) -> fx.Graph:
    """Return a copy of `graph` in which each exchange is a start and a wait.

    Changes  `exchange` nodes; in the modes `reference` and `eager_wait` a start waits at once
    Leaves   `graph` itself; the order of everything else
    """
    new = copy_graph(graph)
    for node in [n for n in new.nodes if n.target is exchange]:
        rows, routing, direction = node.args
        with new.inserting_before(node):
            flight = _like(node, new.call_function(take_off, (routing, direction, mode != "scheduled")))
            buffer = _like(node, new.call_function(in_flight.start, (rows, flight)))
            arrived = _like(node, new.call_function(in_flight.wait, (buffer, flight)))
        flight.meta.pop("example_value", None)
        node.replace_all_uses_with(arrived)
        new.erase_node(node)
    new.lint()
    return new


def is_start(node: fx.Node) -> bool:
    """Whether the node starts a collective."""
    return node.target in (in_flight.start, in_flight.start_of_next)


def is_wait(node: fx.Node) -> bool:
    """Whether the node waits for one."""
    return node.target is in_flight.wait


def direction(node: fx.Node) -> Any:
    """Which way the exchange goes that a start node starts or a wait node waits for."""
    flight = node.args[1]
    assert isinstance(flight, fx.Node)
    return flight.args[1]


def _like(node: fx.Node, new: fx.Node) -> fx.Node:
    new.meta.update(node.meta)
    return new
