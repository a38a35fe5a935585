"""Let the last exchange of a layer arrive in the next one.

What a layer computes from it, the *tail*, is cut off its graph and put in front of the next layer's. Between the two
travel the buffer in flight and whatever else the tail reads; in the place of a stream that is not finished travels a
stand-in full of NaN.

    layer k     ... experts -> start -> buffer        r = x + a       y' = r + shared
    border      buffer, flight, order, weights, r, shared, y'         (x' is a stand-in)
    layer k+1   attention reads y'
                wait -> unpermute -> x' = r + (routed + shared) -> router ...
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from fxskip.collectives import in_flight
from fxskip.collectives.border import Tail, arrived_value, join, leave_pending, stand_in
from fxskip.ir import (
    copy_graph,
    dataflow,
    is_leaf,
    is_matrix_product,
    reachable,
    storage,
    stream_inputs,
    stream_outputs,
    value,
    writers,
)
from fxskip.passes.dependencies import draws_random_numbers, switches
from fxskip.passes.shard import ROUTED_ROWS
from fxskip.passes.split_collectives import FLIGHT_KIND, is_start, is_wait, sends_forward


def defer(graph: fx.Graph) -> fx.Graph:
    """Return a copy of `graph` without the tail of its last exchange, which it leaves for the next layer.

    A tail is cut where it only moves, weighs and adds: no product, no random number, no other collective, no memory
    written in place, and where nothing but the outgoing streams depends on it.

    Needs    `split_collectives`; markers of the outgoing streams
    Changes  the outgoing streams that depend on the exchange, to stand-ins; adds the node that leaves the rest
    Leaves   `graph` itself
    """
    new = copy_graph(graph)
    last = _last_arrival(new)
    if last is None:
        return new
    unfinished, inside = _cone(new, last)
    tail, reads = _cut(inside, unfinished)
    start = last.args[0]
    assert isinstance(start, fx.Node)
    start.target = in_flight.start_of_next
    for marker in unfinished.values():
        with new.inserting_before(marker):
            nothing = new.call_function(stand_in, (stream_inputs(new)[0], *map(_not_in_flight, reads)))
        nothing.meta["example_value"] = torch.empty_like(value(marker))
        marker.replace_input_with(marker.all_input_nodes[0], nothing)
    with new.inserting_before(next(n for n in new.nodes if n.op == "output")):
        new.call_function(leave_pending, (tail.digest, *reads))
    for node in reversed(inside):
        new.erase_node(node)
    new.lint()
    return new


def _last_arrival(graph: fx.Graph) -> fx.Node | None:
    """The wait that the next layer may do: of those that fewest streams depend on the last; None where none may."""
    found: list[tuple[int, int, fx.Node]] = []
    for position, node in enumerate(graph.nodes):
        if is_wait(node) and sends_forward(node) and not any(n in switches(graph) for n in _from(node)):
            unfinished, inside = _cone(graph, node)
            if unfinished and all(map(_is_light, inside)) and not _is_used_otherwise(inside, unfinished):
                found.append((len(unfinished), -position, node))
    return min(found)[-1] if found else None


def _cone(graph: fx.Graph, wait: fx.Node) -> tuple[dict[int, fx.Node], list[fx.Node]]:
    """The markers of the outgoing streams that depend on a wait, and the nodes that do."""
    cone = reachable([wait], dataflow(graph))
    unfinished = {index: marker for index, marker in stream_outputs(graph).items() if marker in cone}
    inside = [n for n in graph.nodes if n in cone and n not in unfinished.values() and n.op != "output"]
    return unfinished, inside


def _not_in_flight(node: fx.Node) -> Any:
    """The node, or what a buffer in flight is started from: nobody may read the buffer, and both have gradients."""
    return node.args[0] if is_start(node) else node


def _from(node: fx.Node) -> list[fx.Node]:
    nodes = list(node.graph.nodes)
    return nodes[nodes.index(node) :]


def _is_light(node: fx.Node) -> bool:
    return (
        is_wait(node)
        or not (is_start(node) or is_matrix_product(node) or is_leaf(node) or draws_random_numbers(node))
    ) and storage(node) not in writers(node.graph)


def _is_used_otherwise(inside: list[fx.Node], unfinished: dict[int, fx.Node]) -> bool:
    allowed = {*inside, *unfinished.values()}
    return any(user not in allowed for node in inside for user in node.users)


def _cut(inside: list[fx.Node], unfinished: dict[int, fx.Node]) -> tuple[Tail, list[fx.Node]]:
    """The tail as a graph of its own, and what it reads."""
    cone = set(inside)
    reads = list(dict.fromkeys(a for n in inside for a in n.all_input_nodes if a not in cone))
    graph = fx.Graph()
    made = {}
    for position, node in enumerate(reads):
        made[node] = graph.placeholder(f"crossing_{position}")
        made[node].meta.update(_shape_alone(node))
    for node in inside:
        made[node] = graph.node_copy(node, lambda n: made[n])
        made[node].meta = _shape_alone(node)
    streams = tuple(sorted(unfinished))
    graph.output(tuple(made[unfinished[index].all_input_nodes[0]] for index in streams))
    return Tail(graph, streams), reads


def _shape_alone(node: fx.Node) -> dict[str, Any]:
    """A node's metadata without what it was in its own layer."""
    kept = {key: node.meta[key] for key in (ROUTED_ROWS, FLIGHT_KIND) if key in node.meta}
    return kept | ({"example_value": torch.empty_like(v)} if isinstance(v := value(node), Tensor) else {})


def arrive(graph: fx.Graph, tail: Tail) -> fx.Graph:
    """Return a copy of `graph` that finishes the incoming streams itself, from what crossed the border.

    Needs    markers of the incoming streams
    Changes  what reads the unfinished streams
    Leaves   `graph` itself
    """
    new = copy_graph(graph)
    markers = stream_inputs(new)
    first = next(n for n in new.nodes if n.op != "placeholder")
    made: dict[fx.Node, fx.Node] = {}
    with new.inserting_before(first):
        placeholders = [n for n in tail.graph.nodes if n.op == "placeholder"]
        for position, node in enumerate(placeholders):
            made[node] = new.call_function(arrived_value, (position,))
            made[node].meta.update(node.meta)
        for node in tail.graph.nodes:
            if node.op not in ("placeholder", "output"):
                made[node] = new.node_copy(node, lambda n: made[n])
    output = next(n for n in tail.graph.nodes if n.op == "output")
    for index, finished in zip(tail.streams, output.args[0], strict=True):
        arrived = markers[index]
        with new.inserting_after(arrived):
            joined = new.call_function(join, (arrived, made[finished]))
        joined.meta.update(made[finished].meta)
        arrived.replace_all_uses_with(joined, delete_user_cb=lambda user: user.target not in (stand_in, join))
    new.lint()
    return new
