"""Find the residual stream of a region by dataflow: no module or attribute name is looked at.

Walking back from the region's output, each step is an addition one of whose operands leads on to the input by
additions and linear operations alone, or such a linear operation (a scale, a cast):

    x -> norm -> attention -> + -> norm -> mlp -> +      stream: x, the first add, the second add
    |                         |                   |
    +-------------------------+-------------------+

Each addition is a write; the sub-block that makes it is all that its other operand is computed from, back to
the stream. A sub-block may read an earlier value than the one it is added to (parallel blocks, shortcuts).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import fx

from fxskip.errors import PassError
from fxskip.ir import (
    NodeInfo,
    Role,
    annotate,
    copy_graph,
    dataflow,
    info,
    is_add,
    is_matrix_product,
    module_path,
    op_name,
    reachable,
    reverse,
    storage,
    stream_inputs,
    stream_outputs,
    writers,
)
from fxskip.linear import identity_paths


def find_stream(graph: fx.Graph) -> fx.Graph:
    """Return a copy of `graph` with the stream and the nodes of every sub-block annotated.

    Needs    one `stream_in` marker with index 0 and one `stream_out` marker with index 0
    Changes  metadata only: role and write of the stream's values and of what the writes are computed from
    Leaves   `graph` itself; all nodes, their order and their arguments
    Raises   PassError where the stream is not a chain of additions, or a sub-block reads more than the stream
    """
    new = copy_graph(graph)
    start, end = stream_inputs(new)[0], stream_outputs(new)[0]
    edges = dataflow(new)
    varying = reachable([start], edges)
    if end not in varying:
        raise PassError(
            "find_stream",
            "the layer's output does not depend on its input",
            hint="only residual decoder layers can be rewired",
        )
    for marker in stream_inputs(new).values():
        annotate(marker, NodeInfo("input", 0))
    for marker in stream_outputs(new).values():
        annotate(marker, NodeInfo("output", 0))
    steps = _walk_back(start, end.all_input_nodes[0], varying)
    if not any(step.contribution for step in steps):
        raise PassError(
            "find_stream", "the layer adds nothing to the stream", hint="this architecture is not supported"
        )
    _annotate_blocks(_annotate_stream(steps), start, steps, reverse(edges), varying)
    _require_unwritten(new)
    return new


@dataclass(frozen=True)
class _Step:
    """One step of the stream: a write, or a carry, which has no contribution."""

    result: fx.Node
    before: fx.Node
    contribution: fx.Node | None


def _walk_back(start: fx.Node, last: fx.Node, varying: set[fx.Node]) -> list[_Step]:
    """The steps from `start` to `last`, in that order."""
    on_the_stream = identity_paths(start, varying)
    steps: list[_Step] = []
    node = last
    while node is not start:
        operands = [a for a in node.all_input_nodes if a in on_the_stream]
        if node not in on_the_stream or len(operands) != 1:
            raise _not_residual(node)
        (before,) = operands
        contribution = None
        if is_add(node) and all(a in varying for a in node.args):
            contribution = next(a for a in node.all_input_nodes if a is not before)
        steps.append(_Step(node, before, contribution))
        node = before
    return steps[::-1]


def _annotate_stream(steps: Sequence[_Step]) -> dict[int, fx.Node]:
    """Annotate the stream's values; the contribution of each write by its number."""
    contributions: dict[int, fx.Node] = {}
    for step in steps:
        if step.contribution is not None:
            contributions[len(contributions) + 1] = step.contribution
        role: Role = "residual" if step.contribution is not None else "carry"
        annotate(step.result, NodeInfo(role, len(contributions)))
    return contributions


def _annotate_blocks(
    contributions: dict[int, fx.Node],
    start: fx.Node,
    steps: Sequence[_Step],
    back: dict[fx.Node, set[fx.Node]],
    varying: set[fx.Node],
) -> None:
    """Annotate what each contribution is computed from."""
    stream = {start, *(step.result for step in steps)}
    inner = {node: (nodes & varying) - stream for node, nodes in back.items()}
    owners: dict[fx.Node, list[int]] = {}
    for number, contribution in contributions.items():
        nodes = reachable([contribution], inner)
        for other, theirs in contributions.items():
            if other != number and theirs in nodes:
                raise PassError(
                    "find_stream",
                    f"unsupported architecture: the block that makes {contribution.name!r} reads {theirs.name!r}, "
                    "what another block adds, beside the stream",
                    where=f"in module {module_path(contribution) or 'the decoder layer itself'}",
                    hint="it could not stop waiting for that block",
                )
        _require_one_source(contribution, {a for n in nodes for a in back[n] if a in stream})
        for node in nodes:
            owners.setdefault(node, []).append(number)
    for node, (first, *others) in owners.items():
        if others:
            _require_cheap(node)
        annotate(node, NodeInfo("compute", first, also=tuple(others)))


def _require_one_source(contribution: fx.Node, sources: set[fx.Node]) -> None:
    if len(sources) == 1:
        return
    names = ", ".join(sorted(repr(node.name) for node in sources))
    raise PassError(
        "find_stream",
        f"unsupported architecture: the block that makes {contribution.name!r} reads "
        + (f"several values of the stream: {names}" if sources else "no value of the stream"),
        where=f"in module {module_path(contribution) or 'the decoder layer itself'}",
        hint="a sub-block is f(norm(x)) of one value x of the stream",
    )


def _require_cheap(node: fx.Node) -> None:
    """Blocks that read different variants get copies of what they share; no weights and nothing random."""
    if is_matrix_product(node) or "dropout" in op_name(node) or "attention" in op_name(node):
        raise PassError(
            "find_stream",
            f"unsupported architecture: two sub-blocks share more than a norm: {node.name!r} ({op_name(node)})",
            where=f"in module {module_path(node) or 'the decoder layer itself'}",
            hint="attention and experts must be computed apart from each other",
        )


def _require_unwritten(graph: fx.Graph) -> None:
    """Refuse a stream that is overwritten in place: a block that reads an earlier value would read a later one."""
    written = writers(graph)
    for node in graph.nodes:
        about = info(node)
        if about is None or about.role not in ("input", "carry", "residual"):
            continue
        for writer in written.get(storage(node) or 0, ()):
            raise PassError(
                "find_stream",
                f"unsupported architecture: {op_name(writer)} ({writer.name!r}) writes into the stream in place",
                where=f"in module {module_path(writer) or 'the decoder layer itself'}",
                hint="write x = x + f(x): x += f(x) is understood, a write through a view of x is not",
            )


def _not_residual(node: fx.Node) -> PassError:
    return PassError(
        "find_stream",
        f"unsupported architecture: {node.name!r} ({op_name(node)}) is not the stream plus the output of one "
        f"sub-block, so there is nothing to leave out",
        where=f"in module {module_path(node) or 'the decoder layer itself'}",
        hint="rewiring needs x + f(x), where x may be scaled by constants: not a residual that is gated or taken "
        "after a norm, not several streams",
    )
