"""Find the matrices that can be cut over ranks, by what their outputs are computed into.

The last product of a sub-block that leads to its write is cut by input, so that its parts add up. The products just
before it are cut by output, so that it gets its own inputs on each rank:

    attention   q, k, v --(heads)--> scores, values --> o          columns q, k, v; row o
    MLP         gate, up --(silu, mul)--> down                     columns gate, up; row down

Routers, low-rank matrices further back, routed experts and what runs as it is stay whole. Whether the operations in
between can run on a part is left to `shard_tensors`.
"""

from __future__ import annotations

from torch import fx, nn

from fxskip.collectives.cut_linear import Cut
from fxskip.ir import (
    block_nodes,
    dataflow,
    info,
    is_matrix_product,
    module_path,
    op_name,
    reachable,
    reverse,
    value,
    writes,
)

_CUT_KINDS = ("attention", "dense", "moe")


def tensor_plan(graph: fx.Graph) -> dict[str, Cut]:
    """How each matrix that can be cut is cut, by the path of its module in the layer.

    Needs    the annotations of `split_contributions`
    """
    plan: dict[str, Cut] = {}
    edges = dataflow(graph)
    for write in writes(graph):
        about = info(write.result)
        assert about is not None
        if about.kind not in _CUT_KINDS:
            continue
        block = set(block_nodes(graph, write.number))
        after = {n: edges[n] & block for n in block}
        before = reverse(after)
        products = {n for n in block if is_matrix_product(n)}
        for last in (n for n in graph.nodes if n in block and _is_linear(n)):
            if (reachable([last], after) & products) - {last}:
                continue
            columns = _first_products_before(last, before, products)
            # One that leads to another of them is no neighbour of the last: the low-rank keys of latent attention.
            columns = {c for c in columns if not (reachable([c], after) & columns) - {c}}
            if columns and all(map(_is_linear, columns)):
                plan[module_path(last)] = "row"
                for path in sorted(map(module_path, columns)):
                    plan[path] = "column"
    return plan


def _first_products_before(
    last: fx.Node, before: dict[fx.Node, set[fx.Node]], products: set[fx.Node]
) -> set[fx.Node]:
    """The linears that `last` depends on with no linear in between; products of two activations are passed."""
    linears = {n for n in products if not _is_activation_product(n)}
    edges = {n: (set() if n in linears and n is not last else before[n]) for n in before}
    return (reachable([last], edges) & linears) - {last}


def _is_linear(node: fx.Node) -> bool:
    """Whether the node is a whole nn.Linear: a product with a matrix that is a parameter."""
    weight = node.args[1] if op_name(node) == "linear" and len(node.args) > 1 else None
    return isinstance(weight, fx.Node) and weight.op == "placeholder" and value(weight).dim() == 2


def _is_activation_product(node: fx.Node) -> bool:
    """Whether both operands are computed in the layer: scores and values of attention."""
    return op_name(node) in ("matmul", "__matmul__", "bmm", "einsum", "baddbmm") and not any(
        isinstance(value(a), nn.Parameter) for a in node.all_input_nodes
    )
