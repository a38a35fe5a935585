"""Marks of what ranks hold in common and what each holds for itself, and a check of them.

    enter     full -> own         a value that all ranks have goes where each uses it for its own part
    partial   own -> partial      from here on the sum over the ranks is meant
    reduce    partial -> full     the sum is taken

`split_collectives` turns enter and reduce into starts and waits and takes partial out. What lies between is found by
dataflow: what an own value is computed into is own, and a partial one may be viewed, scaled and added to its like.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from fxskip.collectives.cut_linear import own_part, run_cut_linear
from fxskip.errors import PassError
from fxskip.ir import copy_graph, is_add, is_leaf, mutated_base, op_name, storage, stream_inputs, value
from fxskip.linear import linear_operand
from fxskip.parallel import TENSOR


def enter(value: Tensor, axis: str) -> Tensor:
    """Marks where a replicated value enters what each rank of `axis` computes for itself."""
    raise _not_split("enter")


def partial(value: Tensor, axis: str) -> Tensor:
    """Marks a value whose sum over the ranks of `axis` is meant."""
    raise _not_split("partial")


def reduce(value: Tensor, axis: str) -> Tensor:
    """Marks the sum of a partial value over the ranks of `axis`."""
    raise _not_split("reduce")


def _not_split(which: str) -> PassError:
    return PassError(
        which, f"the mark {which!r} was run", hint="this is a defect in fxskip: please report it"
    )


def marked(graph: fx.Graph, mark: Any, node: fx.Node, axis: str) -> fx.Node:
    """`mark` of a node's value, behind the node; for `enter` the one that is there already, if any."""
    if mark is enter:
        for user in node.users:
            if user.target is enter and user.args == (node, axis):
                return user
    placeholders = [n for n in graph.nodes if n.op == "placeholder"]
    with graph.inserting_after(node if node.op != "placeholder" else placeholders[-1]):
        new = graph.call_function(mark, (node, axis))
    new.meta.update({key: held for key, held in node.meta.items() if key in ("example_value", "fxskip")})
    return new


# --- what depends on what has a gradient ---------------------------------------------------------


def differentiable(graph: fx.Graph) -> set[fx.Node]:
    """The nodes whose values may have a gradient: those that depend on the stream or on a parameter."""
    found = set(stream_inputs(graph).values())
    for node in graph.nodes:
        is_parameter = node.op == "placeholder" and isinstance(value(node), nn.Parameter)
        if is_parameter or (_has_floats(node) and any(a in found for a in node.all_input_nodes)):
            found.add(node)
    return found


def _has_floats(node: fx.Node) -> bool:
    return any(
        isinstance(part, Tensor) and (part.is_floating_point() or part.is_complex())
        for part in pytree.tree_leaves(value(node))
    )


# --- the check -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tag:
    """How the ranks of `axis` hold a value: each its own, or as parts of a sum. What all have alike has no tag."""

    held: Literal["own", "partial"]
    axis: str

    def __str__(self) -> str:
        return {"own": "each rank's own", "partial": "partial"}[self.held] + f" on the axis {self.axis!r}"


def tags(graph: fx.Graph) -> dict[fx.Node, Tag]:
    """How ranks hold each value that they do not hold alike.

    Raises PassError where a value is read as something that it is not: a partial or an own one as full, or a full one
    whose gradient would stay a part because it did not enter.
    """
    found: dict[fx.Node, Tag] = {}
    written: dict[int, Tag] = {}
    with_gradient = differentiable(graph)
    for node in graph.nodes:
        held = {a: tag for a in node.all_input_nodes if (tag := found.get(a) or written.get(storage(a) or 0))}
        tag = _tag(node, held, with_gradient)
        if tag is not None:
            found[node] = tag
            base = mutated_base(node)
            if base is not None and (memory := storage(base)) is not None:
                written[memory] = tag
    return found


def require_reduced(graph: fx.Graph) -> fx.Graph:
    """Return a copy of `graph`, unchanged, if ranks read each value as what it is.

    Raises   PassError, as `tags` does
    """
    tags(graph)
    return copy_graph(graph)


def _tag(node: fx.Node, tagged: dict[fx.Node, Tag], with_gradient: set[fx.Node]) -> Tag | None:
    operands = node.all_input_nodes
    if node.target is enter:
        _require(node, not tagged, tagged, "takes a value that all ranks have alike")
        return Tag("own", str(node.args[1]))
    if node.target is own_part:
        return Tag("own", str(node.args[2]))
    if node.target is run_cut_linear:
        _require(node, list(tagged.values()) == [Tag("own", TENSOR)], tagged, "takes what entered, or is cut")
    if node.target is partial or node.target is reduce:
        held: Literal["own", "partial"] = "own" if node.target is partial else "partial"
        wanted = Tag(held, str(node.args[1]))
        _require(node, list(tagged.values()) == [wanted], tagged, f"takes a value that is {wanted}")
        return Tag("partial", wanted.axis) if node.target is partial else None
    if not tagged or _is_number(node):
        return None
    if any(tag.held == "partial" for tag in tagged.values()) and not is_add(node):
        # A factor that entered is the same on all ranks.
        tagged = {a: tag for a, tag in tagged.items() if a.target is not enter}
    (tag, *others) = dict.fromkeys(tagged.values())
    _require(node, not others, tagged, "mixes values that ranks hold in different ways")
    is_border = node.op == "output" or op_name(node) == "stream_out"
    _require(node, not is_border, tagged, "leaves the layer and must be the same on all ranks")
    _require(node, not is_leaf(node), tagged, "runs as it is, with parameters that all ranks have alike")
    full = [a for a in operands if a in with_gradient and a not in tagged and a.target is not enter]
    if tag.held == "partial":
        _require(node, _keeps_sums(node, set(tagged)) and not full, tagged, "needs the whole sum")
        return tag
    _require(node, not full, tagged, f"reads {full}, which did not enter")
    return tag


def _keeps_sums(node: fx.Node, partials: set[fx.Node]) -> bool:
    """Whether the operation on the parts gives the parts of the operation on their sum."""
    if is_add(node):
        return all(a in partials for a in node.args)
    return linear_operand(node, partials) is not None


def _is_number(node: fx.Node) -> bool:
    """Whether the value is no tensor and holds none: a size."""
    parts = pytree.tree_leaves(value(node))
    return value(node) is not None and not any(isinstance(part, Tensor) for part in parts)


def _require(node: fx.Node, holds: bool, tagged: dict[fx.Node, Tag], needs: str) -> None:
    if not holds:
        operands = ", ".join(f"{a.name!r} is {tag}" for a, tag in tagged.items()) or "its operand has no tag"
        raise PassError(
            "require_reduced",
            f"{op_name(node) or node.op} ({node.name!r}) {needs}; {operands}",
            hint="this is a defect in fxskip: please report it with the model type and the spec",
        )
