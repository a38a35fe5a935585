"""What a rewired model computes, from the formula: a list of writes to a stream, each a sum of named addends.

A block reads the stream as it would be had the addends that it is to miss never been added:

    S(0, lacks) = the embedding
    S(k, lacks) = c S(k - 1, lacks) + (the k-th write's sum, in the original order, without what lacks names)
    S(k, nothing) = X(k), the stream itself

c is 1, or the constant by which the original code scales the stream at each write. A block reads S(k, lacks) for the
last k that it reads in the original code.

The modules of the original model compute the addends; its layers' own forward is not used. Nothing here comes
from fxskip.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tests.property.designs import MLP, WIDTH, Design, Layer, MoE, adds_to_the_stream_twice, decoder, head

Lacks = frozenset[tuple[int, str]]  # (number of the write in the model from 1, name of the addend)


@dataclass(frozen=True)
class Addend:
    name: str
    value: Tensor


@dataclass(frozen=True)
class Sum:
    left: Expression
    right: Expression


@dataclass(frozen=True)
class Scaled:
    inner: Expression
    factor: float | Tensor


Expression = Addend | Sum | Scaled


def without(expression: Expression, names: frozenset[str]) -> Tensor | None:
    """The expression's value when the addends of these names are left out; None if nothing is left."""
    if isinstance(expression, Addend):
        return None if expression.name in names else expression.value
    if isinstance(expression, Scaled):
        inner = without(expression.inner, names)
        return None if inner is None else inner * expression.factor
    left, right = without(expression.left, names), without(expression.right, names)
    if left is None or right is None:
        return right if left is None else left
    return left + right


def names_of(expression: Expression) -> frozenset[str]:
    if isinstance(expression, Addend):
        return frozenset({expression.name})
    if isinstance(expression, Scaled):
        return names_of(expression.inner)
    return names_of(expression.left) | names_of(expression.right)


class Stream:
    """The residual stream and every version of it that some block reads."""

    def __init__(self, embedding: Tensor, *, scale: float | None, split: bool) -> None:
        self.values = [embedding]
        self.writes: list[Expression] = []
        self.scale, self.split = scale, split
        self._versions: dict[tuple[int, Lacks], Tensor] = {}

    def write(self, expression: Expression) -> None:
        self.writes.append(expression)
        self.values.append(self._added(self.values[-1], expression, frozenset()))

    def read(self, lacks: Lacks, after: int) -> Tensor:
        """S(after, lacks)."""
        lacks = frozenset(pair for pair in lacks if pair[0] <= after)
        if not lacks:
            return self.values[after]
        if (after, lacks) not in self._versions:
            names = frozenset(name for write, name in lacks if write == after)
            before = self.read(lacks, after - 1)
            self._versions[after, lacks] = self._added(before, self.writes[after - 1], names)
        return self._versions[after, lacks]

    def _added(self, before: Tensor, write: Expression, names: frozenset[str]) -> Tensor:
        """`sum: split` adds the shared before the routed addends, one addition each."""
        before = before if self.scale is None else before * self.scale
        if self.split and names_of(write) - names == {"routed", "shared"}:
            for lost in ("routed", "shared"):
                part = without(write, names | {lost})
                assert part is not None
                before = before + part
            return before
        left = without(write, names)
        return before if left is None else before + left


# --- blocks --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Block:
    """One sub-block of a design: who it is for the rules, and what it writes."""

    layer: int
    kind: str
    child: str
    """Its module in the layer."""
    addends: frozenset[str]
    inseparable: bool
    """Its routed and shared addends cannot be told apart in the original code."""
    behind: int = 0
    """How many writes before it the original code has it not see: 1 for the second of two parallel blocks."""


def blocks(design: Design) -> list[Block]:
    """The sub-blocks in the order of their writes; only for designs that can be rewired."""
    found = []
    behind = 1 if design.form == "parallel_two" else 0
    for number, kind in enumerate(design.layers):
        found.append(Block(number, "attention", "attn", frozenset({"attention"}), False))
        if kind == "dense":
            found.append(Block(number, "dense", "mlp", frozenset({"dense"}), False, behind))
        elif adds_to_the_stream_twice(design, kind):
            found.append(Block(number, "dense", "mlp", frozenset({"dense"}), False))
            found.append(Block(number, "moe", "mlp", frozenset({"routed"}), False, behind=1))
        else:
            mixed = is_inseparable(design)
            names = {"routed", "shared"} if design.shared and not mixed else {"routed"}
            found.append(Block(number, "moe", "mlp", frozenset(names), mixed, behind))
    return found


def is_inseparable(design: Design) -> bool:
    """Whether something that is not linear stands between the parts of a MoE and the stream, or hides the parts."""
    is_normed = design.place in ("post", "both") and design.norm != "none"
    return design.experts == "whole" or (design.shared > 0 and is_normed)


def expression(layer: Layer, block: Block, x: Tensor) -> Expression:
    """What the block adds to the stream when it reads `x`."""
    design = layer.design
    number = 1 if block.child == "attn" else 2
    h = (layer.norm1 if number == 1 or design.form == "parallel_two" else layer.norm2)(x)
    post = layer.post1 if number == 1 else layer.post2

    def finished(y: Tensor) -> Tensor:
        return layer.scaled(layer.drop(post(y)), number)

    if block.kind == "attention":
        return Addend("attention", finished(layer.attn(h)))
    if isinstance(layer.mlp, MLP):
        return Addend("dense", finished(layer.mlp(h)))
    assert isinstance(layer.mlp, MoE)
    if adds_to_the_stream_twice(design, layer.kind):
        rows = h.reshape(-1, WIDTH)
        part = layer.mlp.shared(rows) if block.kind == "dense" else layer.mlp.drop(layer.mlp.routed(rows))
        return Addend(*block.addends, finished(part.view(h.shape)))
    if block.addends == {"routed"}:
        return Addend("routed", finished(layer.mlp(h)))
    added = moe_sum(layer.mlp, h)
    if design.residual == "learned":
        return Scaled(added, layer.scale2)
    return Scaled(added, 0.5) if design.residual == "constant" else added


def moe_sum(moe: MoE, h: Tensor) -> Expression:
    """The parts of a MoE in the order in which its code adds them up."""
    rows, order = h.reshape(-1, WIDTH), moe.design.order

    def routed() -> Addend:
        return Addend("routed", moe.drop(moe.routed(rows)).view(h.shape))

    def shared(expert: nn.Module) -> Addend:
        return Addend("shared", moe.drop(expert(rows)).view(h.shape))

    if order in ("shared_first", "add_", "into_shared"):
        total: Expression = Addend("shared", moe.shared(rows).view(h.shape))
        if order == "into_shared" and moe.design.experts == "index_add":
            return ScatteredSum(moe, rows, h.shape).expression(total)
        return Sum(total, routed())
    if order == "nested":
        first = routed()
        return Sum(first, Addend("shared", moe.shared(rows).view(h.shape)))
    total = routed()
    for expert in moe.shared_experts:
        total = Sum(total, shared(expert))
    return total


@dataclass(frozen=True)
class ScatteredSum:
    """Experts' outputs that are added into the shared experts' output, one expert after the other."""

    moe: MoE
    rows: Tensor
    shape: torch.Size

    def expression(self, shared: Expression) -> Expression:
        """((shared + expert 0) + expert 1) + ..., each expert's output zero at the rows of other tokens."""
        weights, chosen = self.moe.route(self.rows)
        assert isinstance(self.moe.experts, nn.ModuleList)
        total = shared
        for number, expert in enumerate(self.moe.experts):
            token, slot = torch.where(chosen == number)
            source = expert(self.rows[token]) * weights[token, slot, None]
            alone = torch.zeros_like(self.rows).index_add(0, token, source).view(self.shape)
            total = Sum(total, Addend("routed", alone))
        return total


Reads = Mapping[int, Lacks]  # by the block's position in the model from 0


def evaluate(model: nn.Module, design: Design, reads: Reads, ids: Tensor, *, split: bool = False) -> Tensor:
    """The logits of the model when its blocks read as `reads` says; a block that is absent reads the full stream."""
    body = decoder(model)
    stream = Stream(body.embed(ids), scale=0.5 if design.residual == "identity" else None, split=split)
    for position, block in enumerate(blocks(design)):
        layer = body.layers[block.layer]
        assert isinstance(layer, Layer)
        x = stream.read(reads.get(position, frozenset()), after=position - block.behind)
        stream.write(expression(layer, block, x))
    out: Tensor = head(model)(body.norm(stream.values[-1]))
    return out
