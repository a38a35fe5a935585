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
from fxskip.collectives.measuring import Place, Sent
from fxskip.ir import copy_graph, op_name
from fxskip.parallel import EXPERT, Mode, running_axis, running_number
from fxskip.passes.partial_values import enter, partial, reduce
from fxskip.passes.shard import exchange

Sum = Literal["reduce", "enter"]

FLIGHT_KIND = "fxskip_flight_kind"
"""Key in the metadata of a flight, and of what stands for it in the next layer: see `flight_kind`."""


def take_off(routing: Routing, direction: Direction, at_once: bool) -> Flight:
    """The flight of one exchange of the layer that runs; `at_once` waits where it is started."""
    sent = _sent(direction, direction, EXPERT)
    return made_once(lambda: Flight(sent, routing.exchange(direction), at_once=at_once))


def take_off_sum(kind: Sum, axis: str, at_once: bool) -> Flight:
    """The flight of one sum over the ranks of `axis`, of a value or of its gradient."""
    sent = _sent(f"{kind} ({axis})", kind, axis)
    group = running_axis(axis).get_group()
    collective = Reduce(group) if kind == "reduce" else Enter(group)
    return made_once(lambda: Flight(sent, collective, at_once=at_once))


def _sent(what: str, role: str, lane: str) -> Sent:
    layer = running_number()
    return Sent(f"{what} of decoder layer {layer}", Place(layer, role, lane))


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
                kind = str(how[1]), EXPERT
                flight = _like(node, new.call_function(take_off, (*how, at_once)))
            else:
                kind = op_name(node), str(how[0])
                flight = _like(node, new.call_function(take_off_sum, (op_name(node), *how, at_once)))
            buffer = _like(node, new.call_function(in_flight.start, (rows, flight)))
            arrived = _like(node, new.call_function(in_flight.wait, (buffer, flight)))
        flight.meta.pop("example_value", None)
        flight.meta[FLIGHT_KIND] = kind
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


def flight_of(node: fx.Node) -> fx.Node:
    """That of a start or a wait; a flight's own is itself."""
    flight = node.args[1] if is_start(node) or is_wait(node) else node
    assert isinstance(flight, fx.Node)
    return flight


def flight_kind(node: fx.Node) -> tuple[str, str]:
    """For a flight, its start or its wait: "dispatch", "combine", "reduce" or "enter", and the axis of the mesh."""
    found: tuple[str, str] = flight_of(node).meta[FLIGHT_KIND]
    return found


def sends_forward(node: fx.Node) -> bool:
    """Whether a flight, its start or its wait has something to send or receive in the forward pass."""
    return flight_kind(node)[0] != "enter"


def sends_back(node: fx.Node) -> bool:
    """Whether it has in the backward pass."""
    return flight_kind(node)[0] != "reduce"


def _like(node: fx.Node, new: fx.Node) -> fx.Node:
    new.meta.update(node.meta)
    return new
