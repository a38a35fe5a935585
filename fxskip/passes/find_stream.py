"""Find the residual stream of a region by dataflow: no module or attribute name is looked at.

A value through which every path from the region's input to its output runs is a cut. The stream is the
chain of cuts; between two of them lies a sub-block, and the second must be the first plus something:

    x -> norm -> attention -> + -> norm -> mlp -> +      cuts: x, the first add, the second add
    |                         |                   |
    +-------------------------+-------------------+
"""

from __future__ import annotations

from itertools import pairwise

from torch import fx

from fxskip.errors import PassError
from fxskip.ir import (
    NodeInfo,
    annotate,
    copy_graph,
    dataflow,
    info,
    is_add,
    module_path,
    op_name,
    reachable,
    reverse,
    storage,
    stream_inputs,
    stream_outputs,
    writers,
)


def find_stream(graph: fx.Graph) -> fx.Graph:
    """Return a copy of `graph` with every node between the stream's input and output annotated.

    Needs    one `stream_in` marker with index 0 and one `stream_out` marker with index 0
    Changes  metadata only: role and write of each node on a path along the stream
    Leaves   `graph` itself; all nodes, their order and their arguments
    Raises   PassError where the stream is not a chain of additions
    """
    new = copy_graph(graph)
    start, end = stream_inputs(new)[0], stream_outputs(new)[0]
    edges = dataflow(new)
    between = reachable([start], edges) & reachable([end], reverse(edges))
    if end not in between:
        raise PassError(
            "find_stream",
            "the layer's output does not depend on its input",
            hint="only residual decoder layers can be rewired",
        )
    path = [n for n in new.nodes if n in between]

    for marker in stream_inputs(new).values():
        annotate(marker, NodeInfo("input", 0))
    for marker in stream_outputs(new).values():
        annotate(marker, NodeInfo("output", 0))
    position = {n: i for i, n in enumerate(path)}
    cuts = _cuts(path[:-1], edges)
    if len(cuts) == 1:
        raise PassError(
            "find_stream", "the layer adds nothing to the stream", hint="this architecture is not supported"
        )
    for number, (anchor, result) in enumerate(pairwise(cuts), start=1):
        _require_residual(anchor, result, between)
        for node in path[position[anchor] + 1 : position[result]]:
            annotate(node, NodeInfo("compute", number))
        annotate(result, NodeInfo("residual", number))
    _require_unwritten(new)
    return new


def _cuts(path: list[fx.Node], edges: dict[fx.Node, set[fx.Node]]) -> list[fx.Node]:
    """The nodes that no edge jumps over, in order; `path` holds the nodes on the way from its first to its last."""
    position = {n: i for i, n in enumerate(path)}
    cuts, farthest = [], 0
    for i, node in enumerate(path):
        if farthest <= i:
            cuts.append(node)
        farthest = max([farthest, *(position[n] for n in edges[node] if n in position)])
    return cuts


def _require_unwritten(graph: fx.Graph) -> None:
    """Refuse a stream that is overwritten in place: a block that reads an earlier value would read a later one."""
    written = writers(graph)
    for node in graph.nodes:
        about = info(node)
        if about is None or about.role not in ("input", "residual"):
            continue
        for writer in written.get(storage(node) or 0, ()):
            raise PassError(
                "find_stream",
                f"unsupported architecture: {op_name(writer)} ({writer.name!r}) writes into the stream in place",
                where=f"in module {module_path(writer) or 'the decoder layer itself'}",
                hint="write x = x + f(x): x += f(x) is understood, a write through a view of x is not",
            )


def _require_residual(anchor: fx.Node, result: fx.Node, between: set[fx.Node]) -> None:
    if is_add(result) and list(result.args).count(anchor) == 1 and all(a in between for a in result.args):
        return
    raise PassError(
        "find_stream",
        f"unsupported architecture: {result.name!r} ({op_name(result)}) is not the stream plus the output of one "
        f"sub-block, so there is nothing to leave out",
        where=f"in module {module_path(result) or 'the decoder layer itself'}, after {anchor.name!r}",
        hint="rewiring needs x + f(x) twice a layer: not a scaled or gated residual, not one add for attention and "
        "experts together, not several streams",
    )
