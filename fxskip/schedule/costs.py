"""FLOPs, parameters and data moved by the sub-blocks of a graph, counted from the captured shapes.

PyTorch's FlopCounterMode has no formula for grouped matrix products and counts causal attention in full,
so the few operations that matter are counted in `operations`. Nothing is estimated in time; `roofline` does that.
What a graph does not show is None, never 0.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from torch import fx

from fxskip.ir import Write, block_nodes, dataflow, info, op_name, reachable, value, writes
from fxskip.schedule.operations import UNKNOWN, Setting, Work, heads_of, work_of
from fxskip.schedule.parts import Held, has_scan, parts_of, routing_of
from fxskip.schedule.sizes import hint, total

CONTEXT = 4096
"""Tokens of a sequence unless the caller says otherwise."""


@dataclass(frozen=True)
class Part:
    """What one part of a sub-block costs, before it is spread over ranks."""

    name: str
    """As `parts` says: gate, routed or shared in a MoE; otherwise the kind of the sub-block."""
    parameters: int
    flops_per_token: float | None
    """Of matrix products, attention and convolutions, forward only. A multiplication and an addition are 2. None
    where it is not known: in a leaf, in the scan of a mixer, in attention that selects keys."""
    activations_per_token: float | None
    """Elements that those operations read and write for a token, weights left out. What is between them
    (norms, activation functions, the sorting of tokens) is taken as fused and not counted."""
    kernels: int
    """Number of those operations that are known."""


@dataclass(frozen=True)
class Costs:
    """Costs of one sub-block. Experts count for the tokens that are routed to them, however they are computed.

    A parameter or an operation that several sub-blocks of a layer share counts for the first of them.
    """

    parts: tuple[Part, ...]
    hidden_size: int
    experts: int | None = 0
    """Routed experts; 0 without routing, None where a leaf hides the router."""
    experts_per_token: int | None = 0
    """Copies of a token that expert parallelism sends away and gets back."""
    groups: int = 1
    """Groups of experts that the router chooses between first, as DeepSeek's node-limited routing does."""
    groups_per_token: int = 1
    heads: int = 0
    """Of attention; 0 where there is none or the graph does not show it."""

    @property
    def parameters(self) -> int:
        return sum(part.parameters for part in self.parts)

    @property
    def active_parameters(self) -> float | None:
        """Parameters that one token meets: all but the routed experts that it is not sent to."""
        return total(None if (use := self.use_of(p)) is None else p.parameters * use for p in self.parts)

    @property
    def flops_per_token(self) -> float | None:
        return total(part.flops_per_token for part in self.parts)

    def use_of(self, part: Part) -> float | None:
        """Share of the part's parameters that a token meets; None where a leaf hides it."""
        if part.name == "moe":
            return None
        if part.name != "routed" or not self.experts or self.experts_per_token is None:
            return 1.0
        return self.experts_per_token / self.experts


@dataclass(frozen=True)
class ModelCosts:
    """What is known of a model beside its wiring."""

    blocks: tuple[Costs, ...]
    dtype: str
    """Of its parameters, as torch names it."""
    parameters: int
    """All, each once."""
    outside: int | None
    """Of those, what no sub-block reads: embedding, head, final norm and whatever else. None where layers share
    parameters, which count in each of their sub-blocks."""
    head: int | None
    """Of the matrix that makes the logits, also where it is the embedding table. None where it is not known."""


def graph_costs(graph: fx.Graph, *, keys: float, held: Held) -> tuple[Costs, ...]:
    """The costs of each sub-block of a graph, in order; needs the annotations of `classify`.

    `keys`: how many keys a query meets on average, see `attention_span`.
    """
    counted: set[Hashable] = set()
    return tuple(_block_costs(graph, w, keys, held, counted) for w in writes(graph))


def _block_costs(graph: fx.Graph, write: Write, keys: float, held: Held, counted: set[Hashable]) -> Costs:
    about = info(write.result)
    assert about is not None
    size = [hint(s) for s in value(write.anchor).shape]
    nodes = list(block_nodes(graph, write.number))
    # A stream of two dimensions is one sequence; more than three are several streams side by side.
    tokens, length = (size[0] * size[1], size[1]) if len(size) > 2 else (size[0], size[0])
    routing = routing_of(nodes, about.kind, tokens, held)
    parts = parts_of(nodes, about.kind, routing, held)
    selects = about.kind == "attention" and any(op_name(n) == "topk" for n in nodes)
    setting = Setting(tokens, length, None if selects else keys, routing, held)
    own = [n for n in nodes if (mine := info(n)) is not None and mine.write == write.number]
    work: dict[str, list[Work]] = {name: [] for name in dict.fromkeys(parts.values())}
    if has_scan(nodes):  # its products alone would tell too little, and padded to a chunk they are too many
        work["scan"] = [UNKNOWN]
    for node in own:
        if parts[node] != "scan" and (one := work_of(node, parts[node], setting)) is not None:
            work[parts[node]].append(one)
    parameters = _parameters(graph, own, parts, held, counted)
    return Costs(
        tuple(_part(name, parameters.get(name, 0), found) for name, found in work.items()),
        size[-1],
        routing.experts,
        routing.chosen,
        routing.groups,
        routing.chosen_groups,
        heads_of(nodes, length, held) if about.kind == "attention" else 0,
    )


def _part(name: str, parameters: int, work: list[Work]) -> Part:
    kernels = round(sum(one.kernels for one in work if one.flops is not None))
    return Part(name, parameters, total(w.flops for w in work), total(w.moved for w in work), kernels)


def _parameters(
    graph: fx.Graph, nodes: list[fx.Node], parts: dict[fx.Node, str], held: Held, counted: set[Hashable]
) -> dict[str, int]:
    """Elements of the parameters that each part reads, also through casts and transposes that precede the block.

    A parameter that several parts or blocks read counts for the first of them: `counted` has those before.
    """
    given = [n for n in graph.nodes if n.op == "placeholder" and not held(n)]
    varying = reachable(given, dataflow(graph))
    edges = {n: set(n.all_input_nodes) for n in graph.nodes if info(n) is None and n not in varying}
    found: dict[str, int] = {}
    for node in nodes:
        sources = reachable({o for o in node.all_input_nodes if o in edges}, edges)
        for source in (node, *sources):
            for key, parameter in held(source).items():
                if key not in counted:
                    counted.add(key)
                    found[parts[node]] = found.get(parts[node], 0) + parameter.numel()
    return found
