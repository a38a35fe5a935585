"""The plan: what a spec does to a model, sub-block by sub-block."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from os import PathLike
from pathlib import Path

from fxskip.planning.window import LayerWindow, Window, exposed, layer_windows, window
from fxskip.schedule.costs import Costs
from fxskip.schedule.roofline import Deployment, Transfer, Work, transfers, work
from fxskip.spec import Spec
from fxskip.wiring import Connection, ModelWiring, SubBlock, connect


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
    work: tuple[Work, ...]
    """Its parts on one rank, estimated."""
    transfers: tuple[Transfer, ...]
    """Its collectives as one rank sees them, estimated."""
    window: Window

    @property
    def est_us(self) -> float:
        """Estimated microseconds of compute on one rank."""
        return sum(part.est_us for part in self.work)


@dataclass(frozen=True)
class Rest:
    """Parameters outside of the sub-blocks."""

    total: int
    """Embedding, head, final norm and whatever else there is."""
    head: int
    """Of the matrix that makes the logits, also where it is the embedding table."""


@dataclass(frozen=True)
class Forward:
    """One forward pass through the decoder layers on one rank, in estimated microseconds."""

    compute_us: float
    communication_us: float
    """Of all collectives, one after the other."""
    exposed_before_us: float
    """Part of them that no compute can hide in the original wiring."""
    exposed_after_us: float
    """The same in the planned wiring."""


@dataclass(frozen=True)
class Plan:
    """The result of `fxskip.plan` and `fxskip.explain`."""

    model: str
    spec: str
    streams: int
    """Most streams that cross the border of two layers; 1 is the original."""
    wiring_hash: str
    blocks: tuple[PlannedBlock, ...]
    deployment: Deployment
    """What the estimates are for."""
    layers: tuple[LayerWindow, ...]
    """Equation (9) of each layer that exchanges tokens, estimated."""
    forward: Forward
    rest: Rest

    @property
    def parameters(self) -> int:
        """All parameters of the model."""
        return sum(block.costs.parameters for block in self.blocks) + self.rest.total

    @property
    def active_parameters(self) -> float:
        """Parameters that one token meets. The head counts; the embedding table, of which it reads a row, does not."""
        return sum(block.costs.active_parameters for block in self.blocks) + self.rest.head

    @property
    def flops_per_token(self) -> float:
        """Forward only, the head included."""
        return sum(block.costs.flops_per_token for block in self.blocks) + 2 * self.rest.head

    @property
    def rewired(self) -> int:
        """Number of sub-blocks that no longer see something."""
        return sum(bool(block.without) for block in self.blocks)

    def __str__(self) -> str:
        from fxskip.planning.text import text  # it imports Plan

        return text(self)

    def to_json(self) -> str:
        """All of it as JSON text."""
        deployment = asdict(self.deployment) | {"hardware": self.deployment.hardware.model_dump()}
        blocks = [
            asdict(b)
            | {"est_us": b.est_us}
            | {
                "costs": asdict(b.costs)
                | {"parameters": b.costs.parameters, "flops_per_token": b.costs.flops_per_token}
            }
            for b in self.blocks
        ]
        layers = [
            asdict(w) | {"exchange_us": w.exchange_us, "room_us": w.room_us, "margin_us": w.margin_us}
            for w in self.layers
        ]
        totals = {
            name: getattr(self, name)
            for name in ("rewired", "parameters", "active_parameters", "flops_per_token")
        }
        return json.dumps(
            asdict(self) | totals | {"deployment": deployment, "blocks": blocks, "layers": layers}, indent=2
        )

    def to_html(self, path: str | PathLike[str]) -> Path:
        """Write a self-contained page with the table and pictures of the wiring before and after."""
        from fxskip.planning.page import page  # it imports Plan

        target = Path(path)
        target.write_text(page(self), encoding="utf-8")
        return target


def make_plan(
    model: str,
    spec: str,
    wiring: ModelWiring,
    blocks: Sequence[SubBlock],
    costs: Sequence[Costs],
    deployment: Deployment,
    rest: Rest,
) -> Plan:
    """Put wiring, costs and estimates of each sub-block together."""
    original = connect(Spec(fxskip=1), blocks).connections
    works = [work(c, deployment) for c in costs]
    moves = [transfers(b.kind, c, deployment) for b, c in zip(blocks, costs, strict=True)]
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
            work=works[i],
            transfers=moves[i],
            window=window(wiring.connections, i, costs),
        )
        for i, c in enumerate(wiring.connections)
    )
    before, after = (exposed(c, works, moves) for c in (original, wiring.connections))
    layers = layer_windows(wiring.connections, works, moves, before, after)
    forward = Forward(
        sum(part.est_us for parts in works for part in parts),
        sum(move.est_us for block in moves for move in block),
        sum(before.values()),
        sum(after.values()),
    )
    streams = max(len(region.inputs) for region in wiring.regions)
    return Plan(model, spec, streams, wiring.digest(), rows, deployment, layers, forward, rest)


def _reads(connection: Connection, blocks: Sequence[SubBlock]) -> str:
    if not connection.lacks:
        return "full stream"
    parts = []
    for write, addend in connection.lacks:
        parts.append(f"{addend} of layer {blocks[write - 1].layer}")
    return "stream without " + ", ".join(parts)
