"""The plan: what a spec does to a model, sub-block by sub-block."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from os import PathLike
from pathlib import Path

from fxskip.schedule.costs import CONTEXT, Costs
from fxskip.wiring import Connection, ModelWiring, SubBlock


@dataclass(frozen=True)
class Window:
    """Which sub-blocks can run while a block's communication is under way, by module path.

    Under expert parallelism a MoE block sends tokens before its experts (dispatch) and gets them back after
    (combine); under tensor parallelism every block ends in an all-reduce, which is its combine.
    """

    dispatch_under: tuple[str, ...]
    """Blocks between the last write that this block waits for and the block itself."""
    combine_under: tuple[str, ...]
    """Blocks between this block and the first one that needs what it leaves to a collective."""
    dispatch_flops_per_token: float | None
    combine_flops_per_token: float | None
    """Of the blocks above; None where those of one are not known."""


@dataclass(frozen=True)
class PlannedBlock:
    """One sub-block of the model under a spec."""

    layer: int
    kind: str
    path: str
    adds: tuple[str, ...]
    """Names of the addends that it writes to the stream."""
    reads: str
    """The stream it reads, in words."""
    without: tuple[str, ...]
    """What it no longer sees, as in the spec: routed@1."""
    rule: int | None
    """Index in `connect` of the rule that selects it."""
    refused: str | None
    """Why the rule that selects it, or a part of that rule, changes nothing here; None where all of it applies."""
    costs: Costs
    window: Window


@dataclass(frozen=True)
class Plan:
    """The result of `fxskip.plan` and `fxskip.explain`."""

    model: str
    spec: str
    streams: int
    """Most streams that cross the border of two layers; 1 is the original."""
    wiring_hash: str
    blocks: tuple[PlannedBlock, ...]

    @property
    def rewired(self) -> int:
        """Number of sub-blocks that no longer see something."""
        return sum(bool(block.without) for block in self.blocks)

    def __str__(self) -> str:
        from fxskip.planning.text import text  # it imports Plan

        return text(self)

    def to_json(self) -> str:
        """All of it as JSON text."""
        return json.dumps(
            asdict(self) | {"rewired": self.rewired, "attention_context_tokens": CONTEXT}, indent=2
        )

    def to_html(self, path: str | PathLike[str]) -> Path:
        """Write a self-contained page with the table and pictures of the wiring before and after."""
        from fxskip.planning.page import page  # it imports Plan

        target = Path(path)
        target.write_text(page(self), encoding="utf-8")
        return target


def make_plan(
    model: str, spec: str, wiring: ModelWiring, blocks: Sequence[SubBlock], costs: Sequence[Costs]
) -> Plan:
    """Put wiring and costs of each sub-block together."""
    rows = tuple(
        PlannedBlock(
            layer=c.block.layer,
            kind=c.block.kind,
            path=c.block.path,
            adds=c.block.addends,
            reads=_reads(c, blocks),
            without=tuple(f"{addend}@{c.write - write}" for write, addend in c.lacks),
            rule=c.rule,
            refused=c.note or None if c.rule is not None else None,
            costs=costs[i],
            window=_window(wiring.connections, i, costs),
        )
        for i, c in enumerate(wiring.connections)
    )
    streams = max(len(region.inputs) for region in wiring.regions)
    return Plan(model, spec, streams, wiring.digest(), rows)


def _reads(connection: Connection, blocks: Sequence[SubBlock]) -> str:
    if not connection.reads:
        return "full stream"
    parts = []
    for write, addend in sorted(connection.reads):
        parts.append(f"{addend} of layer {blocks[write - 1].layer}")
    return "stream without " + ", ".join(parts)


def _window(connections: Sequence[Connection], index: int, costs: Sequence[Costs]) -> Window:
    own = connections[index]
    unseen = {write for write in range(1, own.write) if not _sees(own, write, connections)}
    last_seen = max((w for w in range(1, own.write) if w not in unseen), default=0)
    readers = (c.write for c in connections if c.write > own.write and _sees_travelling(c, own))
    first_reader = next(readers, len(connections) + 1)
    before = range(last_seen, own.write - 1)
    after = range(own.write, first_reader - 1)
    return Window(
        tuple(connections[i].block.path for i in before),
        tuple(connections[i].block.path for i in after),
        total(costs[i].flops_per_token for i in before),
        total(costs[i].flops_per_token for i in after),
    )


def total(numbers: Iterable[float | None]) -> float | None:
    """The sum; None where one of the numbers is not known."""
    known = list(numbers)
    return None if None in known else sum(number for number in known if number is not None)


def _sees(reader: Connection, write: int, connections: Sequence[Connection]) -> bool:
    """Whether the block sees any addend of an earlier write."""
    addends = connections[write - 1].block.addends
    return any((write, addend) not in reader.reads for addend in addends)


def _sees_travelling(reader: Connection, writer: Connection) -> bool:
    """Whether a later block needs what the writer's collective delivers: the routed addend, or all of it."""
    addends = writer.block.addends
    travelling = ("routed",) if "routed" in addends else addends
    return any((writer.write, addend) not in reader.reads for addend in travelling)
