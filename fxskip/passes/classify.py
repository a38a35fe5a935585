"""Say what each sub-block of a region is, by the operations in it: attention, moe, mixer or dense."""

from __future__ import annotations

from torch import fx

from fxskip.ir import block_nodes, copy_graph, info, is_tensor, op_name, update, value, writes

_MATRIX_PRODUCTS = frozenset({"matmul", "bmm", "einsum", "baddbmm", "__matmul__"})
_SEQUENCE_MIXING = ("conv1d", "selective_scan", "delta_rule", "linear_attn", "chunk_scan")


def classify(graph: fx.Graph) -> fx.Graph:
    """Return a copy of `graph` in which every sub-block carries its kind.

    Needs    the annotations of `find_stream`
    Changes  metadata only: the kind of each annotated node
    Leaves   `graph` itself; all nodes, their order and their arguments
    """
    new = copy_graph(graph)
    for write in writes(new):
        nodes = list(block_nodes(new, write.number))
        kind = kind_of(nodes)
        for node in (*nodes, write.result):
            update(node, kind=kind)
    return new


def kind_of(nodes: list[fx.Node]) -> str:
    """The kind of the sub-block that consists of `nodes`.

    Attention is asked first: sparse attention selects keys by a top-k that must not pass for a router.
    """
    names = {op_name(n) for n in nodes}
    if any("attention" in name for name in names) or _has_eager_attention(nodes):
        return "attention"
    if any(is_routing(n) for n in nodes):
        return "moe"
    if any(part in name for name in names for part in _SEQUENCE_MIXING):
        return "mixer"
    return "dense"


def is_routing(node: fx.Node) -> bool:
    """Whether the node chooses experts or runs the chosen ones: everything routed depends on such a node."""
    return op_name(node) == "topk" or "grouped_mm" in op_name(node)


def _has_eager_attention(nodes: list[fx.Node]) -> bool:
    """softmax over a [batch, heads, queries, keys] score that comes from one matrix product and feeds another.

    A router's softmax is over [tokens, experts] and feeds no matrix product.
    """
    products = [n for n in nodes if op_name(n) in _MATRIX_PRODUCTS]
    return len(products) >= 2 and any(
        op_name(n) == "softmax" and is_tensor(n) and value(n).dim() >= 3 and info(n) is not None for n in nodes
    )
