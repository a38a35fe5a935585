"""Make each sub-block read the variant of the stream that the wiring gives it.

A variant lacks some addends of earlier writes. It is built like the stream itself, one addition a write
in the original order, with these addends left out (farskip in a MoE layer, y = x without routed):

    before   x -> attention -> r -> moe -> x'            r = x + a,   x' = r + (routed + shared)
    after    y -> attention -> r                         a from y
             x -> moe ------------> x', y'               x' as before, y' = r + shared
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from fxskip.ir import (
    NodeInfo,
    Write,
    annotate,
    block_nodes,
    copy_graph,
    info,
    stream_inputs,
    stream_outputs,
    stream_values,
    value,
    writes,
)
from fxskip.wiring import FULL, RegionWiring, Variant


def reroute(graph: fx.Graph, wiring: RegionWiring) -> fx.Graph:
    """Return a copy of `graph` wired as `wiring` says, with as many streams in and out.

    Needs    the annotations of `split_contributions`; no moved block shares a node with another (`unshare`); as
             many markers as the wiring has streams
    Changes  the stream argument of each sub-block's compute nodes; adds the additions that make the
             variants; replaces the values of the `stream_out` markers
    Leaves   `graph` itself; every write to the full stream (unless the wiring splits sums)
    """
    new = copy_graph(graph)
    builder = _Variants(new, wiring)
    for write, block in zip(builder.writes, wiring.blocks, strict=True):
        if wiring.is_moved(write.number):
            _move_readers(new, write, builder.at(write.source, block.reads))
    if wiring.split_sum:
        for write in builder.writes:
            _split_sum(new, write, builder)
    for index, marker in stream_outputs(new).items():
        if index > 0 or wiring.split_sum:
            marker.replace_input_with(
                marker.all_input_nodes[0], builder.at(builder.values[-1], wiring.outputs[index])
            )
    new.lint()
    return new


def _move_readers(graph: fx.Graph, write: Write, source: fx.Node) -> None:
    for node in list(block_nodes(graph, write.number)):
        # Only what the block computes from moves. The add that writes its result keeps the newest value,
        # or the stream would lose what was written in between.
        node.replace_input_with(write.source, source)


def _split_sum(graph: fx.Graph, write: Write, builder: _Variants) -> None:
    """Write `(r + shared) + routed` instead of `r + (routed + shared)`."""
    if not builder.splits(write):
        return
    shared = builder.contribution(write, frozenset({"routed"}))
    routed = builder.contribution(write, frozenset({"shared"}))
    assert shared is not None and routed is not None
    with graph.inserting_before(write.result):
        partial = graph.call_function(torch.add, (write.anchor, shared))
        partial.meta.update(write.result.meta)
        annotate(partial, NodeInfo("variant", write.number, kind="moe"))
    write.result.args = (partial, routed)


class _Variants:
    """Builds the variants of the stream in a graph, each once."""

    def __init__(self, graph: fx.Graph, wiring: RegionWiring) -> None:
        self.graph = graph
        self._split_sum = wiring.split_sum
        self.writes = writes(graph)
        self.values = stream_values(graph)
        self._by_result = {write.result: write for write in self.writes}
        incoming = stream_inputs(graph)
        self._made: dict[tuple[fx.Node, Variant], fx.Node] = {
            (self.values[0], variant): incoming[i] for i, variant in enumerate(wiring.inputs)
        }

    def at(self, stream: fx.Node, variant: Variant) -> fx.Node:
        """What `stream`, a value of the full stream, is without `variant`, as far as written by then."""
        about = info(stream)
        assert about is not None
        variant = frozenset(pair for pair in variant if pair[0] <= about.write)
        if variant == FULL:
            return stream
        if (stream, variant) not in self._made:
            self._made[stream, variant] = self._build(stream, variant)
        return self._made[stream, variant]

    def _build(self, stream: fx.Node, variant: Variant) -> fx.Node:
        before = self.values[self.values.index(stream) - 1]
        base = self.at(before, variant)
        write = self._by_result.get(stream)
        if write is None:  # a carry: the same operation once more
            with self.graph.inserting_after(stream):
                node = self.graph.node_copy(stream, lambda n: base if n is before else n)
            annotate(node, NodeInfo("variant", self._number(stream)))
            return node
        dropped = frozenset(addend for at, addend in variant if at == write.number)
        for part in self._parts(write, dropped):
            with self.graph.inserting_after(stream):
                node = self.graph.call_function(torch.add, (base, part))
            node.meta.update(stream.meta)
            annotate(node, NodeInfo("variant", write.number))
            base = stream = node
        return base

    def _parts(self, write: Write, dropped: frozenset[str]) -> list[fx.Node]:
        """What is added for `write`, one addition each: the contribution as it is, or shared and then routed."""
        ways = [dropped]
        if self._split_sum and not dropped and self.splits(write):
            ways = [frozenset({"routed"}), frozenset({"shared"})]
        return [part for way in ways if (part := self.contribution(write, way)) is not None]

    def splits(self, write: Write) -> bool:
        """Whether the write adds both routed and shared experts."""
        return {
            a.addend
            for n in block_nodes(self.graph, write.number)
            if (a := info(n)) is not None and a.role == "addend"
        } == {"routed", "shared"}

    def _number(self, stream: fx.Node) -> int:
        about = info(stream)
        assert about is not None
        return about.write

    def contribution(self, write: Write, lacks: frozenset[str]) -> fx.Node | None:
        """What the write adds without the addends named in `lacks`; None if nothing is left."""
        return self._without(write.contribution, lacks, write)

    def _without(self, node: fx.Node, lacks: frozenset[str], write: Write) -> fx.Node | None:
        about = info(node)
        assert about is not None
        if about.role == "addend":
            return None if about.addend in lacks else node
        parts: dict[fx.Node, fx.Node | None] = {}
        for operand in node.all_input_nodes:
            inside = info(operand)
            if inside is not None and inside.write == write.number and inside.role in ("sum", "addend"):
                parts[operand] = self._without(operand, lacks, write)
        if all(part is operand for operand, part in parts.items()):
            return node
        kept = [part for part in parts.values() if part is not None]
        if len(kept) < len(parts):
            # An addition that lost an operand is the operand that is left; a lost operand leaves nothing.
            return kept[0] if kept else None
        return self._again(node, parts, write)

    def _again(self, node: fx.Node, parts: dict[fx.Node, fx.Node | None], write: Write) -> fx.Node:
        """The operation `node` once more, on what is left of its operands."""

        def replace(operand: fx.Node) -> Any:
            return parts.get(operand, operand)

        with self.graph.inserting_before(write.result):
            copy = self.graph.node_copy(node, replace)
        # A view's arguments can come from the original operand (its size); values agree, so they stay. The type
        # can differ: under autocast an addend may be narrower than the sum that it is part of.
        operand = next(part for part in parts.values() if part is not None)
        before = next(iter(parts))
        if value(node).dtype == value(before).dtype != value(operand).dtype:
            copy.meta["example_value"] = value(node).to(value(operand).dtype)
        return copy
