"""Take each exchange and sum apart into its start and its wait, so that something can run in between.

before   rows -> exchange -> arrived
after    rows -> start -> buffer -> wait -> arrived
                   flight ----------^

So it goes with `reduce`, and with `enter`, whose start and wait send nothing in the forward pass, but in the backward.
"""

from __future__ import annotations

from typing import Literal

from torch import fx

from fxskip.collectives import in_flight
from fxskip.collectives.all_reduce import Enter, Reduce
from fxskip.collectives.expert_parallel import Direction, Routing
from fxskip.collectives.in_flight import Flight
from fxskip.collectives.kept import made_once
from fxskip.ir import copy_graph, op_name
from fxskip.leaves import running_layer
from fxskip.parallel import Mode, running_axis
from fxskip.passes.partial_values import enter, partial, reduce
from fxskip.passes.shard import exchange

Sum = Literal["reduce", "enter"]


def take_off(routing: Routing, direction: Direction, at_once: bool) -> Flight:
    """The flight of one exchange of the layer that runs; `at_once` waits where it is started."""
    name = f"{direction} of decoder layer {running_layer().fxskip_layer}"
    return made_once(lambda: Flight(name, routing.exchange(direction), at_once=at_once))


def take_off_sum(kind: Sum, axis: str, at_once: bool) -> Flight:
    """The flight of one sum over the ranks of `axis`, of a value or of its gradient."""
    name = f"{kind} ({axis}) of decoder layer {running_layer().fxskip_layer}"
    group = running_axis(axis).get_group()
    collective = Reduce(group) if kind == "reduce" else Enter(group)
    return made_once(lambda: Flight(name, collective, at_once=at_once))


def split_collectives(graph: fx.Graph, mode: Mode) -> fx.Graph:
    """Return a copy of `graph` in which each exchange and each sum is a start and a wait.

    Changes  the nodes `exchange`, `enter` and `reduce`; takes `partial` out. In the modes `reference` and `eager_wait`
             a start waits at once
    Leaves   `graph` itself; the order of everything else
    """
    new = copy_graph(graph)
    at_once = mode != "scheduled"
    for node in list(new.nodes):
        if node.target is partial:
            node.replace_all_uses_with(node.args[0])
            new.erase_node(node)
        if node.target not in (exchange, enter, reduce):
            continue
        rows, *how = node.args
        with new.inserting_before(node):
            if node.target is exchange:
                flight = _like(node, new.call_function(take_off, (*how, at_once)))
            else:
                flight = _like(node, new.call_function(take_off_sum, (op_name(node), *how, at_once)))
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


def sends_forward(node: fx.Node) -> bool:
    """Whether the start or wait has something to send or receive in the forward pass."""
    flight = node.args[1]
    return isinstance(flight, fx.Node) and not (flight.target is take_off_sum and flight.args[0] == "enter")


def _like(node: fx.Node, new: fx.Node) -> fx.Node:
    new.meta.update(node.meta)
    return new
