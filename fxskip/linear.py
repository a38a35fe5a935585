"""Operations that a sum may pass through: applied to each summand and added, they give what they give for the sum.

Whether an operation is linear in one operand depends on what else varies: a product with a parameter is, a
product of two values that both depend on the stream is not. So each question here names the values that vary.
"""

from __future__ import annotations

from collections.abc import Container

from torch import fx

from fxskip.ir import ADDS, is_add, is_tensor, op_name, value

VIEWS = frozenset(
    {"view", "reshape", "flatten", "unflatten", "unsqueeze", "squeeze", "view_as", "contiguous", "clone"}
)
CASTS = frozenset({"to", "type", "type_as", "float", "half", "bfloat16"})
PRODUCTS = frozenset({"mul", "multiply", "__mul__", "__rmul__"})
QUOTIENTS = frozenset({"truediv", "div", "__truediv__"})


def linear_operand(node: fx.Node, varying: Container[fx.Node]) -> fx.Node | None:
    """The tensor that a linear, element-preserving operation is applied to; None for any other operation.

    `varying` holds the nodes that vary; all others are constants. Applying the operation to each summand and
    adding gives the operation of the sum (a cast and a product: up to rounding).
    """
    operand = _only_varying(node, varying)
    if operand is None or not is_tensor(node):
        return None
    name, result = op_name(node), value(node)
    is_first = node.args[0] is operand
    if name in CASTS and is_first and result.dtype.is_floating_point:
        return operand
    if name == "dropout" and is_first and _drops_nothing(node):
        return operand
    if node.kwargs:
        return None
    if name in VIEWS and is_first and result.dtype == value(operand).dtype:
        return operand
    is_scale = name in PRODUCTS or (name in QUOTIENTS and is_first)
    is_whole = result.dim() == value(operand).dim() and result.shape[-1:] == value(operand).shape[-1:]
    return operand if is_scale and is_whole and len(node.args) == 2 else None


def carried_operand(node: fx.Node, varying: Container[fx.Node]) -> fx.Node | None:
    """The stream that `node` hands on, scaled, shifted, cast or viewed by constants; None for any other operation."""
    if (operand := linear_operand(node, varying)) is not None:
        return operand
    operand = _only_varying(node, varying)
    shifts = node.target in ADDS and len(node.args) == 2 and not node.kwargs
    return operand if operand is not None and shifts and is_tensor(node) else None


def identity_paths(start: fx.Node, varying: Container[fx.Node]) -> set[fx.Node]:
    """The nodes that lead back to `start` by additions and linear operations alone."""
    found = {start}
    for node in start.graph.nodes:
        if is_add(node) and len(set(node.args)) == 2 and all(a in varying for a in node.args):
            if any(a in found for a in node.args):
                found.add(node)
        elif carried_operand(node, varying) in found:
            found.add(node)
    return found


def _only_varying(node: fx.Node, varying: Container[fx.Node]) -> fx.Node | None:
    """The one operand that varies, if it is a tensor and an argument by position."""
    found = [a for a in node.all_input_nodes if a in varying and is_tensor(a)]
    return found[0] if len(found) == 1 and list(node.args).count(found[0]) == 1 else None


def _drops_nothing(node: fx.Node) -> bool:
    """Whether a dropout's rate is 0. Being off in eval mode is not enough: training must find the same addends."""
    rate = node.args[1] if len(node.args) > 1 else node.kwargs.get("p", 0.5)
    return bool(rate == 0)
