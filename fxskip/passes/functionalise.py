"""Turn in-place arithmetic into ordinary arithmetic, so that every value of the stream keeps existing.

`x += f(x)` overwrites a stream that another block is to read later, and `shared.add_(routed)` overwrites
an addend that a variant of the stream needs alone. The results have the same bits either way.
"""

from __future__ import annotations

import operator

from torch import fx

from fxskip.ir import copy_graph, is_blank, is_scattered_add, mutated_base, op_name, storage, value

_FUNCTIONAL = {
    "add_": operator.add,
    "iadd": operator.add,
    "sub_": operator.sub,
    "isub": operator.sub,
    "mul_": operator.mul,
    "imul": operator.mul,
    "div_": operator.truediv,
    "itruediv": operator.truediv,
}


def functionalise(graph: fx.Graph) -> fx.Graph:
    """Return a copy of `graph` without the in-place arithmetic that has an ordinary equivalent.

    Changes  `a.add_(b)`, `a += b` and their like into `a + b`, `a.index_add_(...)` into `a.index_add(...)` where
             `a` is not blank; later readers of `a` read the sum
    Leaves   `graph` itself; writes to the graph's inputs (buffers), writes that change shape or type, and
             writes whose memory is read later through another view; `find_stream` refuses those that matter
    """
    new = copy_graph(graph)
    order = {n: i for i, n in enumerate(new.nodes)}
    outside = {storage(n) for n in new.nodes if n.op in ("placeholder", "get_attr")}
    for node in list(new.nodes):
        base = mutated_base(node)
        if base is None or not (_is_arithmetic(node) or _adds_into_a_value(node, base)):
            continue
        if storage(base) in outside or _seen_otherwise(node, base, order) or not _same_type(node, base):
            continue
        for user in [u for u in base.users if order[u] > order[node]]:
            user.replace_input_with(base, node)
        if _is_arithmetic(node):
            node.target, node.op = _FUNCTIONAL[op_name(node)], "call_function"
        else:
            node.target, node.op = op_name(node).removesuffix("_"), "call_method"
    new.lint()
    return new


def _is_arithmetic(node: fx.Node) -> bool:
    return op_name(node) in _FUNCTIONAL and len(node.args) == 2 and not node.kwargs


def _adds_into_a_value(node: fx.Node, base: fx.Node) -> bool:
    """Whether routed outputs may be added to something that is there already, as to a shared expert's output."""
    return is_scattered_add(node) and node.op == "call_method" and not is_blank(base)


def _seen_otherwise(node: fx.Node, base: fx.Node, order: dict[fx.Node, int]) -> bool:
    """Whether a later operation reads the written memory through a value made before, other than `base`."""
    memory = storage(base)
    return any(
        order[user] > order[node]
        for alias in node.graph.nodes
        if alias is not base and order[alias] < order[node] and storage(alias) == memory
        for user in alias.users
    )


def _same_type(node: fx.Node, base: fx.Node) -> bool:
    """Whether the ordinary operation gives the type and shape that the in-place one keeps."""
    if not _is_arithmetic(node):
        return True
    before, other = value(base), node.args[1]
    if not isinstance(other, fx.Node):
        return bool(before.dtype.is_floating_point)
    after = value(other)
    if not hasattr(after, "dtype"):
        return bool(before.dtype.is_floating_point)
    return bool(after.dtype == before.dtype and after.dim() <= before.dim())
