"""FLOPs, parameters and data moved by a sub-block, counted from the captured graph's shapes.

PyTorch's FlopCounterMode has no formula for grouped matrix products and counts causal attention in full,
so the few operations that matter are counted here. Nothing is estimated in time; `roofline` does that.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fxskip.ir import (
    block_nodes,
    dataflow,
    info,
    is_matrix_product,
    is_tensor,
    op_name,
    reachable,
    reverse,
    value,
    writes,
)
from fxskip.passes.classify import routing_nodes

CONTEXT = 4096
"""Tokens of a sequence unless the caller says otherwise."""


@dataclass(frozen=True)
class Part:
    """What one part of a sub-block costs, before it is spread over ranks."""

    name: str
    """gate, routed or shared in a MoE; otherwise the kind of the sub-block. The norm before a MoE is in its gate."""
    parameters: int
    flops_per_token: float
    """Of matrix products, attention and convolutions, forward only. A multiplication and an addition are 2."""
    activations_per_token: float
    """Elements that those operations read and write for a token, weights left out. What is between them
    (norms, activation functions, the sorting of tokens) is taken as fused and not counted."""
    kernels: int
    """Number of those operations."""


@dataclass(frozen=True)
class Costs:
    """Costs of one sub-block. Experts count for the tokens that are routed to them, however they are computed."""

    parts: tuple[Part, ...]
    hidden_size: int
    experts: int = 0
    """Routed experts; 0 without routing."""
    experts_per_token: int = 0
    """Copies of a token that expert parallelism sends away and gets back."""
    groups: int = 1
    """Groups of experts that the router chooses between first, as DeepSeek's node-limited routing does."""
    groups_per_token: int = 1

    @property
    def parameters(self) -> int:
        return sum(part.parameters for part in self.parts)

    @property
    def active_parameters(self) -> float:
        """Parameters that one token meets: all but the routed experts that it is not sent to."""
        return sum(p.parameters * self.use_of(p) for p in self.parts)

    @property
    def flops_per_token(self) -> float:
        return sum(part.flops_per_token for part in self.parts)

    def use_of(self, part: Part) -> float:
        """Share of the part's parameters that a token meets."""
        return self.experts_per_token / self.experts if part.name == "routed" else 1.0


def block_costs(graph: fx.Graph, write: int, *, keys: float = CONTEXT / 2) -> Costs:
    """The costs of the sub-block that makes write number `write`; needs the annotations of `classify`.

    `keys`: how many keys a query meets on average, see `attention_span`.
    """
    anchor = writes(graph)[write - 1].anchor
    batch, length, width = (_hint(s) for s in value(anchor).shape[-3:])
    nodes, tokens = list(block_nodes(graph, write)), batch * length
    experts, chosen = _routing(nodes)
    groups, chosen_groups = _group_choice(nodes, experts)
    parts = _parts(nodes)
    parameters = _parameters(nodes, parts)
    counted: dict[str, list[tuple[float, float]]] = {name: [] for name in dict.fromkeys(parts.values())}
    for node in nodes:
        if (work := _work(node, parts[node], tokens, length, keys, chosen)) is not None:
            counted[parts[node]].append(work)
    return Costs(
        tuple(
            Part(name, parameters[name], sum(f for f, _ in work), sum(a for _, a in work), len(work))
            for name, work in counted.items()
        ),
        width,
        experts,
        chosen,
        groups,
        chosen_groups,
    )


def _choices(nodes: list[fx.Node]) -> list[tuple[int, int, int]]:
    """Each top-k of a router: dimensions of what it chooses from, how many there are, how many it takes."""
    found = []
    for node in routing_nodes(nodes):
        if op_name(node) == "topk":
            scores, chosen = value(node.all_input_nodes[0]), value(node)
            found.append((scores.dim(), _hint(scores.shape[-1]), _hint(chosen[0].shape[-1])))
    return found


def _routing(nodes: list[fx.Node]) -> tuple[int, int]:
    """Experts there are and experts a token is sent to: what the last top-k chooses from, and how many."""
    choices = _choices(nodes)
    return choices[-1][1:] if choices else (0, 0)


def _group_choice(nodes: list[fx.Node], experts: int) -> tuple[int, int]:
    """Groups there are and groups a token is sent to: an earlier top-k over [tokens, groups]. One of one otherwise."""
    for dimensions, there, taken in _choices(nodes)[:-1]:
        if dimensions == 2 and 1 < there < experts and experts % there == 0:
            return there, taken
    return 1, 1


def _parts(nodes: list[fx.Node]) -> dict[fx.Node, str]:
    """The part of the sub-block that each node belongs to."""
    about = info(nodes[0])
    assert about is not None
    routing = routing_nodes(nodes)
    if not routing:
        return dict.fromkeys(nodes, about.kind)
    inside = set(nodes)
    edges = {n: s & inside for n, s in dataflow(nodes[0].graph).items()}
    choice = [[n for n in routing if op_name(n) == "topk"][-1]] if _routing(nodes)[0] else routing
    after, before = reachable(choice, edges), reachable(choice, reverse(edges))
    # What the router and the shared experts both read, the norm, goes to the router.
    return {n: "gate" if n in before else "routed" if n in after else "shared" for n in nodes}


def _parameters(nodes: list[fx.Node], parts: dict[fx.Node, str]) -> dict[str, int]:
    """Elements of the parameters that each part reads, also through casts and transposes that precede the block.

    A parameter that several parts read counts for the first of them.
    """
    edges = {n: set(n.all_input_nodes) for n in nodes[0].graph.nodes if info(n) is None}
    found = dict.fromkeys(parts.values(), 0)
    counted: set[fx.Node] = set()
    for node in nodes:
        operands = {o for o in node.all_input_nodes if o not in parts and info(o) is None}
        for source in reachable(operands, edges) - counted:
            if source.op == "placeholder" and isinstance(value(source), torch.nn.Parameter):
                counted.add(source)
                found[parts[node]] += _numel(source)
    return found


def _work(
    node: fx.Node, part: str, tokens: int, length: int, keys: float, chosen: int
) -> tuple[float, float] | None:
    """FLOPs and elements moved for each token by one operation; None where it is none that counts.

    `chosen`: experts that a token is sent to, the rows for each token of a product in the part `routed`.
    """
    operands = [a for a in (*node.args, *node.kwargs.values()) if isinstance(a, fx.Node) and is_tensor(a)]
    tensors = [value(o) for o in operands]
    name = op_name(node)
    if "attention" in name or "flash_attn" in name:
        query, key, values = tensors[:3]
        heads = _product(query.shape[:-1]) / tokens
        flops = 2 * heads * keys * (_hint(key.shape[-1]) + _hint(values.shape[-1]))
        moved = sum(map(_stored, operands[:3])) / tokens + heads * _hint(values.shape[-1])
        return flops, moved
    if "conv1d" in name:
        return 2.0 * _numel(operands[1]), (_numel(operands[0]) + _numel(node)) / tokens
    if not is_matrix_product(node) or len(tensors) < 2:
        return None
    left = tensors[1] if name in ("addmm", "baddbmm") else tensors[0]
    inner, outer = _hint(left.shape[-1]), _hint(value(node).shape[-1])
    if part == "routed":
        return 2.0 * chosen * inner * outer, float(chosen * (inner + outer))
    flops = 2.0 * _numel(node) * inner / tokens
    # Attention that is written out multiplies two tensors [batch, heads, ...]; a projection has its matrix in two.
    if part == "attention" and all(t.dim() == 4 for t in tensors[:2]):
        flops *= keys / length
    activations = [n for n in (*operands, node) if info(n) is not None and not _is_scores(value(n))]
    return flops, sum(map(_numel, activations)) / tokens


def _is_scores(tensor: torch.Tensor) -> bool:
    """[batch, heads, queries, keys]: a fused attention does not store it."""
    return tensor.dim() == 4 and all(isinstance(size, torch.SymInt) for size in tensor.shape[-2:])


_REPEATS = frozenset({"expand", "reshape", "getitem", "contiguous", "repeat_interleave"})


def _stored(node: fx.Node) -> int:
    """Elements that exist of a tensor which repeats each group's keys or values for all heads of the group."""
    fewest = _numel(node)
    while op_name(node) in _REPEATS and is_tensor(node.all_input_nodes[0]):
        node = node.all_input_nodes[0]
        fewest = min(fewest, _numel(node))
    return fewest


def _numel(node: fx.Node) -> int:
    return _product(value(node).shape)


def _product(shape: Any) -> int:
    return math.prod(_hint(s) for s in shape)


def _hint(size: Any) -> int:
    """The number behind a size, which is symbolic where it depends on batch or length."""
    return int(size.node.hint) if isinstance(size, torch.SymInt) else int(size)
