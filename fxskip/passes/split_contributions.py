"""Take a MoE write apart into its addends: what the routed experts add, and the rest (shared experts).

Walking back from the write's add, additions of something routed and something not routed are opened,
and linear operations on the way (reshape, cast, a constant factor) are remembered as part of the sum:

    residual add <- view <- add <- routed         sum:     view, add
                              ^--- shared         addends: routed, shared
"""

from __future__ import annotations

from typing import Any

from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fxskip.errors import PassError
from fxskip.ir import (
    Write,
    block_nodes,
    copy_graph,
    dataflow,
    info,
    is_add,
    is_blank,
    is_leaf,
    is_matrix_product,
    is_tensor,
    leaf_contents,
    leaf_path,
    op_name,
    reachable,
    reverse,
    storage,
    update,
    value,
    writers,
    writes,
)
from fxskip.linear import CASTS, PRODUCTS, QUOTIENTS, linear_operand
from fxskip.passes.classify import routing_nodes

_ADDS = ("add", "index_add", "index_put", "scatter_add", "scatter_reduce")
_WRITES_INTO = frozenset({*_ADDS, "copy", "index_copy", "masked_scatter", "scatter", "setitem"})


def split_contributions(graph: fx.Graph) -> fx.Graph:
    """Return a copy of `graph` in which the summands of every write are annotated.

    Needs    the annotations of `classify`
    Changes  metadata only: role `addend` (with its name) for the summands, `sum` for the nodes between
             them and the write
    Leaves   `graph` itself; all nodes, their order and their arguments
    Raises   PassError where a summand is overwritten after it was added
    """
    new = copy_graph(graph)
    for write in writes(new):
        about = info(write.result)
        assert about is not None
        if about.kind == "moe":
            nodes = set(block_nodes(new, write.number))
            _open_sum(write.contribution, _routed(new, nodes, _width(write)), nodes)
        else:
            update(write.contribution, role="addend", addend=about.kind)
        _require_settled(new, write)
    return new


def addends(graph: fx.Graph, write: int) -> tuple[str, ...]:
    """The names of a write's addends, in the order of the original code; each name once."""
    names = [a.addend for n in block_nodes(graph, write) if (a := info(n)) is not None and a.role == "addend"]
    return tuple(dict.fromkeys(names))


def inseparable_reason(graph: fx.Graph, write: Write) -> str:
    """Why something unrouted hides inside a MoE write's routed addend; "" where nothing does."""
    inside = list(block_nodes(graph, write.number))
    nodes = set(inside)
    added = [n for n in inside if (a := info(n)) is not None and a.addend == "routed"]
    if not added:
        return ""
    width = _width(write)
    routed = _routed(graph, nodes, width)
    if (alone := _routes_itself(inside)) is not None:
        return (
            f"the module {leaf_path(alone)} runs as it is and routes tokens itself; if it has no shared expert inside, "
            'declare its class with fxskip.leaf(..., adds="routed"), else put the loop over experts, or the shared '
            "expert, into a module of its own"
        )
    before = reachable(added, reverse(dataflow(graph))) & nodes
    chosen = reachable(routing_nodes(inside), {n: set(n.users) for n in graph.nodes})
    for node in (n for n in graph.nodes if n in before):
        base = node.args[0] if op_name(node).rstrip("_") in _WRITES_INTO else None
        if isinstance(base, fx.Node) and base not in chosen and _is_wide(base, width) and not is_add(node):
            into_something = not is_blank(base) and any(
                a in routed for a in node.all_input_nodes if a is not base
            )
            if into_something:
                return f"{op_name(node)} ({node.name!r}) adds the routed experts into {base.name!r}"
        if not _is_wide(node, width):
            continue
        wide = [a for a in node.all_input_nodes if a in nodes and _is_wide(a, width)]
        plain = [a for a in wide if a not in routed and _is_projected(a, nodes)]
        if (
            plain
            and len(plain) < len(wide)
            and not is_matrix_product(node)
            and op_name(node) not in PRODUCTS | QUOTIENTS | CASTS
        ):
            return f"{op_name(node)} ({node.name!r}) joins {plain[0].name!r} with the routed experts' output"
    return ""


def _width(write: Write) -> Any:
    """Of the stream."""
    return value(write.result).shape[-1]


def _routed(graph: fx.Graph, nodes: set[fx.Node], width: Any) -> set[fx.Node]:
    """The nodes of a sub-block that depend on the routed experts, also through memory that is written in place."""
    edges = dataflow(graph)
    written = writers(graph)
    routing = routing_nodes([n for n in graph.nodes if n in nodes])
    # Where the experts' products are seen, what only the choice of experts weighs waits for no exchange: a shared
    # expert whose weight is normalised together with theirs. Biases of experts, added behind a product, are theirs.
    experts = [n for n in routing if "grouped_mm" in op_name(n) or is_leaf(n)]
    if experts:
        chosen = reachable(routing, edges) & nodes
        experts += [n for n in chosen if _is_wide(n, width) and _is_picked(n, nodes)]
    found = reachable(experts or routing, edges)
    while True:
        memories = {memory for memory, by in written.items() if any(n in found for n in by)}
        more = {n for n in nodes if storage(n) in memories} - found
        if not more:
            return found & nodes
        found |= reachable(more, edges)


def _routes_itself(nodes: list[fx.Node]) -> fx.Node | None:
    """A leaf that may hold a shared expert beside routed ones: no choice of experts is made outside it."""
    chosen = routing_nodes([n for n in nodes if not is_leaf(n)])
    after = reachable(chosen, dataflow(nodes[0].graph))
    return next((n for n in nodes if is_leaf(n) and leaf_contents(n) != "routed" and n not in after), None)


def _is_wide(node: fx.Node, width: Any) -> bool:
    """Whether the value can be a part of the stream. A size that depends on values is no width."""
    if not (is_tensor(node) and value(node).is_floating_point() and value(node).dim() > 0):
        return False
    return statically_known_true(value(node).shape[-1] == width)


def _is_picked(node: fx.Node, nodes: set[fx.Node]) -> bool:
    """Whether the value is made of parameters, by indices or masks: rows of a bias, for one."""
    inside = [a for a in node.all_input_nodes if a in nodes]
    by_index = all(is_tensor(a) and not value(a).is_floating_point() for a in inside)
    return by_index and len(inside) < len(node.all_input_nodes)


def _is_projected(node: fx.Node, nodes: set[fx.Node]) -> bool:
    """Whether a matrix product made the value: an expert's output, not the block's normalised input."""
    edges = {n: set(n.all_input_nodes) & nodes for n in nodes}
    return any(is_matrix_product(n) for n in reachable([node], edges))


def _require_settled(graph: fx.Graph, write: Write) -> None:
    """Refuse addends that change after they were added: a variant made later would get the changed value."""
    order = {n: i for i, n in enumerate(graph.nodes)}
    written = writers(graph)
    for node in block_nodes(graph, write.number):
        about = info(node)
        assert about is not None
        for writer in written.get(storage(node) or 0, ()):
            if about.role == "addend" and order[writer] > order[write.result]:
                raise PassError(
                    "split_contributions",
                    f"{node.name!r} is overwritten by {op_name(writer)} after it was added to the stream",
                    where=f"write {write.number} of the region",
                    hint="this architecture reuses memory in a way that rewiring cannot follow",
                )


def _open_sum(node: fx.Node, routed: set[fx.Node], nodes: set[fx.Node]) -> None:
    """Annotate the tree of additions and linear operations that ends in `node`."""
    about = info(node)
    if about is not None and (about.role != "compute" or about.also):
        raise PassError(
            "split_contributions",
            f"{node.name!r} is "
            + (
                "part of another block too"
                if about.also
                else "added to the stream more than once in one write"
            ),
            where=f"write {about.write} of the region",
            hint="this architecture is not supported",
        )
    if node not in routed:
        update(node, role="addend", addend="shared")
        return
    if storage(node) in writers(node.graph):
        update(node, role="addend", addend="routed")  # its value is more than its operation says
        return
    if is_add(node) and _is_mixed(node, routed, nodes):
        update(node, role="sum")
        for operand in node.args:
            _open_sum(operand, routed, nodes)  # type: ignore[arg-type]
        return
    source = linear_operand(node, routed)
    if source is not None and _is_mixed(source, routed, nodes):
        update(node, role="sum")
        _open_sum(source, routed, nodes)
        return
    update(node, role="addend", addend="routed")


def _is_mixed(node: fx.Node, routed: set[fx.Node], nodes: set[fx.Node]) -> bool:
    """Whether `node` is a sum, through linear operations, of something routed and something not."""
    if node not in routed or storage(node) in writers(node.graph):
        return False
    if not is_add(node):
        source = linear_operand(node, routed)
        return source is not None and _is_mixed(source, routed, nodes)
    operands = [a for a in node.args if isinstance(a, fx.Node)]
    if not all(a in nodes for a in operands):
        return False
    others = [a for a in operands if a not in routed]
    return not all(map(is_blank, others)) or any(_is_mixed(a, routed, nodes) for a in operands)
