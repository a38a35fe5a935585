"""Say what each sub-block of a region is, by the operations in it: attention, moe, mixer or dense."""

from __future__ import annotations

from typing import Any

from torch import fx

from fxskip.errors import PassError
from fxskip.ir import (
    block_nodes,
    copy_graph,
    dataflow,
    info,
    is_leaf,
    is_matrix_product,
    is_tensor,
    leaf_contents,
    leaf_path,
    module_path,
    op_name,
    reachable,
    update,
    value,
    writes,
)

_CHOICES = ("topk", "argmax", "sort", "argsort", "kthvalue", "multinomial")
_SEQUENCE_MIXING = ("conv1d", "selective_scan", "delta_rule", "linear_attn", "chunk_scan")
_CUMULATIVE = (
    "cumsum",
    "cumprod",
    "cummax",
    "cummin",
    "logcumsumexp",
    "roll",
    "flip",
    "lstm",
    "gru",
    "associative_scan",
)
"""Operations along a sequence that a router also uses, to count tokens; in a block without one they mix tokens."""
_SELECTIONS = ("select", "narrow", "index_select")


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
            about = info(node)
            # What blocks share is named by the first of them.
            if about is not None and about.write == write.number:
                update(node, kind=kind)
    return new


def kind_of(nodes: list[fx.Node]) -> str:
    """The kind of the sub-block that consists of `nodes`.

    Raises PassError for attention and routed experts in one sub-block.
    """
    attention = [n for n in nodes if _is_attention(n, nodes)]
    routing = routing_nodes(nodes)
    if attention and routing:
        raise PassError(
            "classify",
            "unsupported architecture: attention and routed experts are added to the stream as one sub-block",
            where=f"{attention[0].name!r} in {module_path(attention[0]) or 'the decoder layer'}, "
            f"{routing[0].name!r} in {module_path(routing[0]) or 'the decoder layer'}",
            hint="there is no value of the stream between the two that one of them could stop waiting for",
        )
    if attention:
        return "attention"
    if routing:
        return "moe"
    inside = set(nodes)
    if any(_mixes_tokens(n, inside) for n in nodes):
        return "mixer"
    _require_no_leaf(nodes)
    _require_known(nodes)
    return "dense"


def mixes_the_sequence(node: fx.Node) -> bool:
    """Whether the operation is one that recurrences over the sequence have, and attention has not."""
    return any(part in op_name(node) for part in _SEQUENCE_MIXING)


def _mixes_tokens(node: fx.Node, inside: set[fx.Node]) -> bool:
    """Whether the operation joins values of different tokens: by its name, by taking single ones, or as a product.

    The last dimension is a token's own. A product of two values that both depend on the stream is a linear attention
    that is written out; a projection multiplies with a parameter.
    """
    if mixes_the_sequence(node) or op_name(node) in _CUMULATIVE:
        return True
    operands = [a for a in node.all_input_nodes if a in inside and is_tensor(a)]
    if is_matrix_product(node) and not is_leaf(node):
        return len(operands) > 1
    if op_name(node) == "getitem" and operands and operands[0] is node.args[0]:
        return _takes_tokens(node.args[1], value(operands[0]).dim())
    if op_name(node) in _SELECTIONS and operands and len(node.args) > 1 and isinstance(node.args[1], int):
        return node.args[1] not in (-1, value(operands[0]).dim() - 1)
    return False


def _takes_tokens(index: Any, dim: int) -> bool:
    """Whether indexing a tensor of `dim` dimensions takes a part of any but the last."""
    parts = [part for part in (index if isinstance(index, tuple) else (index,)) if part is not None]
    if Ellipsis in parts:
        after = parts[parts.index(Ellipsis) + 1 :]
        parts = parts[: parts.index(Ellipsis)] + after[:-1]
    elif len(parts) == dim:
        parts = parts[:-1]
    return any(part != slice(None) for part in parts)


def _require_no_leaf(nodes: list[fx.Node]) -> None:
    for node in nodes:
        if is_leaf(node):
            raise PassError(
                "classify",
                f"cannot tell what this sub-block is: {leaf_path(node)} runs as it is, no top-k routes tokens to it, "
                "and it holds no list or stack of experts",
                where=f"module {leaf_path(node)}",
                hint="if all that it adds is routed, say so before the transform:\nimport fxskip\n"
                'fxskip.leaf(ItsClass, adds="routed")\n'
                "otherwise rewrite it so that torch.compile(fullgraph=True) accepts it",
            )


def _require_known(nodes: list[fx.Node]) -> None:
    """Refuse to call dense what is none: an MLP reads the stream and parameters, no mask, position or cache."""
    inside = set(nodes)
    for node in nodes:
        for operand in node.all_input_nodes:
            if operand not in inside and _is_call_argument(operand):
                raise PassError(
                    "classify",
                    f"cannot tell what this sub-block is: no attention, experts or known sequence mixing, but "
                    f"{op_name(node)} reads the call's argument {operand.name!r}",
                    where=f"module {module_path(node) or 'the decoder layer itself'}",
                    hint="this architecture or attention implementation is not supported; sdpa and eager attention are",
                )


def _is_call_argument(node: fx.Node) -> bool:
    """Whether the node is a tensor that the model hands to each layer beside the stream."""
    return node.op == "placeholder" and is_tensor(node) and node.name.startswith(("l_args_", "l_kwargs_"))


def routing_nodes(nodes: list[fx.Node]) -> list[fx.Node]:
    """The nodes of a sub-block that choose experts or run the chosen ones: all that is routed depends on them.

    A top-k that selects the keys of a sparse attention is none: attention depends on it.
    """
    candidates = [n for n in nodes if _is_choice(n) or "grouped_mm" in op_name(n) or _is_moe(n)]
    if not candidates:
        return []
    inside = set(nodes)
    edges = {n: s & inside for n, s in dataflow(nodes[0].graph).items()}
    attention = {n for n in nodes if _is_attention(n, nodes)}
    return [n for n in candidates if not reachable([n], edges) & attention]


def _is_choice(node: fx.Node) -> bool:
    """Whether the operation chooses among values, for their indices: a maximum alone chooses none."""
    if op_name(node) == "max":
        return any(op_name(user) == "getitem" and user.args[1] == 1 for user in node.users)
    return op_name(node) in _CHOICES


def _is_moe(node: fx.Node) -> bool:
    return is_leaf(node) and leaf_contents(node) != "unknown"


def _is_attention(node: fx.Node, nodes: list[fx.Node]) -> bool:
    """A fused attention, or the softmax over [batch, heads, queries, keys] of one that is written out.

    Scores are products of two activations and feed another product; a router multiplies with a parameter.
    """
    if "attention" in op_name(node) or "flash_attn" in op_name(node):
        return True
    if op_name(node) != "softmax" or not is_tensor(node) or value(node).dim() < 3:
        return False
    inside = set(nodes)
    operands = {n: set(n.all_input_nodes) & inside for n in nodes}
    before = reachable(operands[node], {n: set() if is_matrix_product(n) else operands[n] for n in nodes})
    return any(is_matrix_product(n) and not is_leaf(n) and len(operands[n]) > 1 for n in before)
