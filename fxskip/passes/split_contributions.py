"""Take a MoE write apart into its addends: what the routed experts add, and the rest (shared experts).

Walking back from the write's add, additions of something routed and something not routed are opened,
and linear operations on the way (reshape, cast, a constant factor) are remembered as part of the sum:

    residual add <- view <- add <- routed         sum:     view, add
                              ^--- shared         addends: routed, shared
"""

from __future__ import annotations

import operator

import torch
from torch import fx

from fxskip.ir import (
    Write,
    block_nodes,
    copy_graph,
    info,
    is_add,
    is_tensor,
    mutated_base,
    op_name,
    reachable,
    update,
    value,
    writes,
)
from fxskip.passes.classify import is_routing

_VIEWS = frozenset({"view", "reshape", "flatten", "unflatten", "unsqueeze", "squeeze", "view_as", "contiguous", "clone"})
_CASTS = frozenset({"to", "type", "type_as", "float", "half", "bfloat16"})
_SCALES = frozenset({"mul", "truediv", "div", "multiply", "imul", "itruediv"})


def split_contributions(graph: fx.Graph) -> fx.Graph:
    """Return a copy of `graph` in which the summands of every write are annotated.

    Needs    the annotations of `classify`
    Changes  roles: `addend` (with its name) for the summands, `sum` for the nodes between them and the
             write. An in-place addition into the shared experts' output becomes an ordinary one with the
             same bits, because the summand must keep its own value.
    Leaves   `graph` itself; all values
    """
    new = copy_graph(graph)
    for write in writes(new):
        kind = _kind(write)
        if kind != "moe":
            update(write.contribution, role="addend", addend=kind)
            continue
        nodes = set(block_nodes(new, write.number))
        _functionalise_adds(new, nodes)
        write = next(w for w in writes(new) if w.number == write.number)
        edges = {n: set(n.users) for n in new.nodes}
        routed = reachable([n for n in nodes if is_routing(n)], edges) & nodes
        _open_sum(write.contribution, routed, nodes)
    new.lint()
    return new


def addends(graph: fx.Graph, write: int) -> tuple[str, ...]:
    """The names of a write's addends, in the order of the original code; each name once."""
    names = [a.addend for n in block_nodes(graph, write) if (a := info(n)) is not None and a.role == "addend"]
    return tuple(dict.fromkeys(names))


def inseparable_reason(graph: fx.Graph, write: Write) -> str:
    """Why a MoE write has no shared addend although something unrouted is added to the experts' output; or ""."""
    nodes = set(block_nodes(graph, write.number))
    edges = {n: set(n.users) for n in graph.nodes}
    routed = reachable([n for n in nodes if is_routing(n)], edges)
    leaf = next(n for n in nodes if (a := info(n)) is not None and a.addend == "routed")
    width = value(write.result).shape[-1]
    for node in sorted(nodes & _ancestors(leaf, nodes), key=lambda n: n.name):
        if not is_add(node) or value(node).shape[-1] != width:
            continue
        left, right = (a in routed for a in node.args)
        if left == right:
            continue
        other = node.args[0] if right else node.args[1]
        if isinstance(other, fx.Node) and any(op_name(n) in ("linear", "matmul") for n in _ancestors(other, nodes)):
            return f"their sum {node.name!r} goes through {op_name(leaf)} before it reaches the stream"
    return ""


def _kind(write: Write) -> str:
    about = info(write.result)
    return about.kind if about is not None else ""


def _ancestors(node: fx.Node, within: set[fx.Node]) -> set[fx.Node]:
    edges = {n: {a for a in n.all_input_nodes if a in within} for n in within}
    return reachable([node], edges)


def _open_sum(node: fx.Node, routed: set[fx.Node], nodes: set[fx.Node]) -> None:
    """Annotate the tree of additions and linear operations that ends in `node`."""
    if node not in routed:
        update(node, role="addend", addend="shared")
        return
    if is_add(node) and sum(a in routed for a in node.args) == 1 and all(a in nodes for a in node.args):
        update(node, role="sum")
        for operand in node.args:
            _open_sum(operand, routed, nodes)  # type: ignore[arg-type]
        return
    source = linear_operand(node)
    if source is not None and source in nodes and _reaches_a_sum(source, routed, nodes):
        update(node, role="sum")
        _open_sum(source, routed, nodes)
        return
    update(node, role="addend", addend="routed")


def _reaches_a_sum(node: fx.Node, routed: set[fx.Node], nodes: set[fx.Node]) -> bool:
    """Whether linear operations lead back from `node` to an addition of something routed and something not."""
    while True:
        if is_add(node):
            return sum(a in routed for a in node.args) == 1 and all(a in nodes for a in node.args)
        source = linear_operand(node)
        if source is None or source not in nodes:
            return False
        node = source


def linear_operand(node: fx.Node) -> fx.Node | None:
    """The tensor that a linear, element-preserving operation is applied to; None for any other operation.

    Applying the operation to each summand and adding gives the operation of the sum (a cast: up to rounding).
    """
    name = op_name(node)
    tensors = [a for a in node.args if is_tensor(a)]
    if not tensors or not is_tensor(node):
        return None
    first = node.args[0]
    if name in _VIEWS | _CASTS and isinstance(first, fx.Node) and is_tensor(first):
        return first
    if name in _SCALES and len(tensors) == 1 and isinstance(tensors[0], fx.Node):
        return tensors[0] if tensors[0] is first or name in ("mul", "multiply") else None
    return None


def _functionalise_adds(graph: fx.Graph, nodes: set[fx.Node]) -> None:
    """Turn `shared.add_(routed)` into `shared + routed` where the written tensor is nobody's view.

    Only for a base that a computing operation has freshly made: then no other node can observe the write,
    except later readers of the base itself, and these are given the sum.
    """
    order = {n: i for i, n in enumerate(graph.nodes)}
    for node in sorted(nodes, key=order.__getitem__):
        base = mutated_base(node)
        if base is None or not is_add(node) or op_name(node) not in ("add_", "iadd", "__iadd__"):
            continue
        fresh = base in nodes and op_name(base) not in _VIEWS | {"getitem", "expand", "transpose", "chunk", "split"}
        aliased = any(op_name(u) in _VIEWS | {"getitem", "transpose"} and order[u] < order[node] for u in base.users)
        if not fresh or aliased or not _same_type(base, node.args[1]):
            continue
        for user in [u for u in base.users if order[u] > order[node]]:
            user.replace_input_with(base, node)
        node.op, node.target = "call_function", torch.add if op_name(node) == "add_" else operator.add


def _same_type(left: object, right: object) -> bool:
    if not (isinstance(left, fx.Node) and isinstance(right, fx.Node)):
        return False
    a, b = value(left), value(right)
    return bool(a.dtype == b.dtype and a.dim() == b.dim())
