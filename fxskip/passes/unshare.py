"""Give each sub-block its own copy of what it shares with another, where the wiring makes one of them read elsewhere.

before   x -> norm -> attention          parallel blocks share a norm
              norm -> experts
after    x -> norm   -> attention        reroute can now move one of the two
         x -> norm_1 -> experts
"""

from __future__ import annotations

from dataclasses import replace

from torch import fx

from fxskip.ir import annotate, block_nodes, copy_graph, info, writes
from fxskip.wiring import RegionWiring


def unshare(graph: fx.Graph, wiring: RegionWiring) -> fx.Graph:
    """Return a copy of `graph` in which no sub-block that is to be moved shares a node with another.

    Needs    the annotations of `split_contributions`
    Changes  adds a copy of each shared node for every further block that uses it, right behind the node
    Leaves   `graph` itself; graphs whose sharing blocks all keep reading what the original code reads
    """
    new = copy_graph(graph)
    if not any(wiring.is_moved(write.number) for write in writes(new)):
        return new
    for write in writes(new):
        _copy_shared(new, write.number)
    for node in new.nodes:
        about = info(node)
        if about is not None and about.also:
            annotate(node, replace(about, also=()))
    new.lint()
    return new


def _copy_shared(graph: fx.Graph, number: int) -> None:
    """Copy what block `number` shares with an earlier one, and have its other nodes use the copies."""
    copies: dict[fx.Node, fx.Node] = {}
    nodes = list(block_nodes(graph, number))
    for node in nodes:
        about = info(node)
        assert about is not None
        if number in about.also:
            with graph.inserting_after(node):
                copies[node] = graph.node_copy(node, lambda operand: copies.get(operand, operand))
            annotate(copies[node], replace(about, write=number, also=()))
    for node in nodes:
        if node not in copies:
            for shared, own in copies.items():
                node.replace_input_with(shared, own)
