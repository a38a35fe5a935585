"""The parts of a sub-block: a MoE's router, routed and shared experts; of a mixer, what is a scan.

gate     all that a token meets on its own rank because it is routed: norm, router, and products that it goes
         through before it is sent and after it is back
routed   the experts that tokens are sent to
shared   the rest of a MoE, which waits for no exchange
moe      a MoE that does not show what its router chooses from: it cannot be divided, nor its work told
scan     products of activations in a mixer: a recurrence over the sequence
and the sub-block's kind for all others
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Mapping
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import fx

from fxskip.ir import (
    dataflow,
    info,
    is_add,
    is_leaf,
    is_matrix_product,
    is_tensor,
    op_name,
    reachable,
    reverse,
    value,
)
from fxskip.passes.classify import mixes_the_sequence, routing_nodes
from fxskip.schedule.sizes import DependsOnValues, hint, product

Held = Callable[[fx.Node], Mapping[Hashable, torch.Tensor]]
"""The parameters that a node is, or that the module which it calls has, each under a key of its own."""


@dataclass(frozen=True)
class Routing:
    """What a router chooses from; all 0 in what is no MoE, None where a leaf hides it."""

    experts: int | None = 0
    chosen: int | None = 0
    """Experts that a token is sent to."""
    groups: int = 1
    """Groups of experts that are chosen between first, as DeepSeek's node-limited routing does."""
    chosen_groups: int = 1
    by: fx.Node | None = None
    """The operation that chooses the experts, or that is the first to run them."""


@dataclass(frozen=True)
class _Choice:
    node: fx.Node
    dimensions: int
    """Of the scores."""
    there: int
    taken: int


def routing_of(nodes: list[fx.Node], kind: str, tokens: int, held: Held) -> Routing:
    """The routing of a sub-block of that kind, captured on `tokens`: the last choice is the one of experts."""
    if kind != "moe":
        return Routing()
    candidates = routing_nodes(nodes)
    choices = [c for n in candidates if (c := _choice(n)) is not None]
    if not choices:
        grouped = next(filter(_is_grouped, candidates), None)
        return Routing(None, None) if grouped is None else _routing_by_rows(grouped, tokens, held)
    if any(map(_looks_up_weights, nodes)):  # experts that are rows of a table, chosen by products of keys
        return Routing(None, None)
    *earlier, last = choices
    for one in earlier:
        if one.dimensions == 2 and 1 < one.there < last.there and last.there % one.there == 0:
            return Routing(last.there, last.taken, one.there, one.taken, last.node)
    return Routing(last.there, last.taken, by=last.node)


def _looks_up_weights(node: fx.Node) -> bool:
    return op_name(node) == "embedding"


def _is_grouped(node: fx.Node) -> bool:
    return "grouped_mm" in op_name(node)


def _routing_by_rows(node: fx.Node, tokens: int, held: Held) -> Routing:
    """What the experts' first product says of a router that chooses in other ways: matrices, and rows for a token."""
    matrices = weight(node, held)
    with suppress(DependsOnValues):
        rows = hint(value(node).shape[0])
        if matrices is not None and rows % tokens == 0:
            return Routing(hint(matrices.shape[0]), rows // tokens, by=node)
    return Routing(None, None)


def _choice(node: fx.Node) -> _Choice | None:
    """A top-k or argmax over a last dimension of known size; None for any other operation."""
    name = op_name(node)
    position = {"topk": 2, "argmax": 1}.get(name)
    if position is None or not is_tensor(scores := node.all_input_nodes[0]):
        return None
    shape = value(scores).shape
    dimension = node.kwargs.get("dim", node.args[position] if len(node.args) > position else -1)
    if dimension not in (-1, len(shape) - 1):
        return None
    with suppress(DependsOnValues):
        taken = hint(value(node)[0].shape[-1]) if name == "topk" else 1
        return _Choice(node, len(shape), hint(shape[-1]), taken)
    return None


def parts_of(nodes: list[fx.Node], kind: str, routing: Routing, held: Held) -> dict[fx.Node, str]:
    """The part of the sub-block that each node belongs to."""
    if kind != "moe":
        scans = has_scan(nodes)
        return {n: "scan" if scans and multiplies_activations(n, held) else kind for n in nodes}
    if routing.by is None:
        return dict.fromkeys(nodes, "moe")
    inside = set(nodes)
    edges = {n: s & inside for n, s in dataflow(nodes[0].graph).items()}
    after, before = reachable([routing.by], edges), reachable([routing.by], reverse(edges))

    # Beside the routing: experts of a loop over all tokens are weighted by it, a shared expert is added to them.
    beside = {n: set() if n in after else s for n, s in edges.items()}

    def part(node: fx.Node) -> str:
        # What the router and the shared experts both read, the norm, goes to the router.
        if node in before and not _is_grouped(node):
            return "gate"
        met = reachable([node], beside) & after
        return "shared" if node not in after and (not met or any(map(is_add, met))) else "routed"

    parts = {n: part(n) for n in nodes}
    return parts | dict.fromkeys(_local(parts, routing, held), "gate")


def _local(parts: dict[fx.Node, str], routing: Routing, held: Held) -> list[fx.Node]:
    """Products beside the experts that every token goes through once: with one matrix, not with one for each expert."""
    routed = [n for n, part in parts.items() if part == "routed"]
    found = {n: w for n in routed if (w := weight(n, held)) is not None and w.dim() == 2}
    often = Counter(tuple(map(hint, w.shape)) for w in found.values())
    # A router may also choose from experts that do nothing and have no matrix.
    few = (routing.experts or 0) / 2
    return [n for n, w in found.items() if often[tuple(map(hint, w.shape))] < few]


_WITHOUT_MEMORY = frozenset({
    "add", "chunk", "contiguous", "conv1d", "dropout", "float", "getitem", "linear", "mean", "mul", "permute", "pow",
    "reshape", "rms_norm", "rsqrt", "sigmoid", "silu", "split", "to", "transpose", "unsqueeze", "view",
})  # fmt: skip
"""Operations of gated convolutions. No recurrence over the sequence can be built of these alone: it multiplies,
accumulates, or puts its steps together."""


def has_scan(nodes: list[fx.Node]) -> bool:
    """Whether a recurrence over the sequence may be in the sub-block, as in all mixers but gated convolutions."""
    return any(map(mixes_the_sequence, nodes)) and not {op_name(n) for n in nodes} <= _WITHOUT_MEMORY


def is_activation(node: fx.Node) -> bool:
    """Whether the node is a tensor that depends on the stream."""
    return is_tensor(node) and info(node) is not None


def multiplies_activations(node: fx.Node, held: Held) -> bool:
    """Whether the node is a product in which no matrix is a parameter: of attention, of a scan, of dispatch."""
    if not is_matrix_product(node) or is_leaf(node) or node.op == "call_module":
        return False
    return weight(node, held) is None


def weight(node: fx.Node, held: Held) -> torch.Tensor | None:
    """The matrix, or stack of matrices, that a product has beside its activations; no mask, no bias."""
    if not is_matrix_product(node) or is_leaf(node):
        return None
    operands = [n for n in node.all_input_nodes if is_tensor(n) and info(n) is None]
    if op_name(node) in ("addmm", "baddbmm"):
        operands = [n for n in operands if n is not node.args[0]]
    constant = [value(n) for n in operands if _is_constant(n, held)]
    matrices = [t for t in (*constant, *held(node).values()) if t.dim() >= 2 and t.is_floating_point()]
    return max(matrices, key=lambda t: product(t.shape), default=None)


def gathers_weights(node: fx.Node, held: Held) -> bool:
    """Whether a product of activations is one with rows of a parameter, which indices chose."""
    seen, stack = {node}, [node]
    while stack:
        for operand in stack.pop().all_input_nodes:
            if not is_tensor(operand) or operand in seen or is_matrix_product(operand):
                continue
            if info(operand) is not None:
                seen.add(operand)
                stack.append(operand)
            elif (
                value(operand).dim() >= 2
                and value(operand).is_floating_point()
                and _is_constant(operand, held)
            ):
                return True
    return False


def _is_constant(node: fx.Node, held: Held) -> bool:
    """Whether nothing that the layer is called with goes into the value: keys of another layer are no weights."""
    seen, stack = {node}, [node]
    while stack:
        one = stack.pop()
        if one.op == "placeholder" and not held(one):
            return False
        new = [n for n in one.all_input_nodes if n not in seen]
        seen.update(new)
        stack += new
    return True
