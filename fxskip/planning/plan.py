"""The plan: what a spec does to a model, sub-block by sub-block."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from os import PathLike
from pathlib import Path

from fxskip.planning.deployment import Wishes, deployment
from fxskip.planning.gradients import GradientCosts, gradient_costs
from fxskip.planning.window import LayerWindow, Window, exposed, layer_windows, window
from fxskip.schedule.costs import Costs, ModelCosts
from fxskip.schedule.roofline import Deployment, Transfer, Work, transfers, work
from fxskip.schedule.sizes import total
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
    def est_us(self) -> float | None:
        """Estimated microseconds of compute on one rank."""
        return total(part.est_us for part in self.work)

    @property
    def weight_bytes(self) -> float | None:
        """Bytes of weights that one rank reads."""
        return total(part.weight_bytes for part in self.work)

    @property
    def activation_bytes(self) -> float | None:
        """Bytes of activations that one rank reads and writes."""
        return total(part.activation_bytes for part in self.work)


@dataclass(frozen=True)
class Forward:
    """One forward pass through the decoder layers on one rank, in estimated microseconds; None: unknown."""

    compute_us: float | None
    communication_us: float | None
    """Of all collectives, one after the other."""
    exposed_before_us: float | None
    """Part of them that no compute can hide in the original wiring."""
    exposed_after_us: float | None
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
    gradients: GradientCosts | None
    """Averages of gradients in the backward pass, if the spec asks for them and ranks have tokens of their own."""
    parameters: int
    """All parameters of the model, each once."""
    outside_parameters: int | None
    """Of those, what belongs to no sub-block; None where layers share parameters."""
    head_parameters: int | None
    """Of the matrix that makes the logits; None where fxskip does not know which one that is."""

    @property
    def active_parameters(self) -> float | None:
        """Parameters that one token meets. The head counts; the embedding table, of which it reads a row, does not.

        None where some are not known.
        """
        if self.outside_parameters is None:
            return None
        return total([*(block.costs.active_parameters for block in self.blocks), self.head_parameters])

    @property
    def block_flops_per_token(self) -> float | None:
        """Forward only, of all sub-blocks."""
        return total(block.costs.flops_per_token for block in self.blocks)

    @property
    def flops_per_token(self) -> float | None:
        """Forward only, the head included; None where some are not known."""
        head = None if self.head_parameters is None else 2 * self.head_parameters
        return total((self.block_flops_per_token, head))

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
        totals = {name: getattr(self, name) for name in ("rewired", "active_parameters", "flops_per_token")}
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
    spec: Spec,
    wiring: ModelWiring,
    blocks: Sequence[SubBlock],
    costs: ModelCosts,
    wishes: Wishes,
) -> Plan:
    """Put wiring, costs and estimates of each sub-block together.

    Raises SpecError for wishes that the model or the hardware cannot meet.
    """
    chosen = deployment(wishes, spec, costs.blocks, dtype=costs.dtype)
    original = connect(Spec(fxskip=1), blocks).connections
    works = [work(c, chosen) for c in costs.blocks]
    moves = [transfers(b.kind, c, chosen) for b, c in zip(blocks, costs.blocks, strict=True)]
    compute_us = total(part.est_us for parts in works for part in parts)
    before, after = (exposed(c, works, moves) for c in (original, wiring.connections))
    return Plan(
        model=model,
        spec=spec.name or "an unnamed spec",
        streams=max(len(region.inputs) for region in wiring.regions),
        wiring_hash=wiring.digest(),
        blocks=_rows(wiring.connections, blocks, costs.blocks, works, moves),
        deployment=chosen,
        layers=layer_windows(wiring.connections, works, moves, before, after),
        forward=Forward(
            compute_us,
            total(move.est_us for block in moves for move in block),
            total(before.values()),
            total(after.values()),
        ),
        gradients=gradient_costs(spec.schedule, blocks, costs, chosen, compute_us),
        parameters=costs.parameters,
        outside_parameters=costs.outside,
        head_parameters=costs.head,
    )


def _rows(
    connections: Sequence[Connection],
    blocks: Sequence[SubBlock],
    costs: Sequence[Costs],
    works: Sequence[tuple[Work, ...]],
    moves: Sequence[tuple[Transfer, ...]],
) -> tuple[PlannedBlock, ...]:
    return tuple(
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
            window=window(connections, i, costs),
        )
        for i, c in enumerate(connections)
    )


def _reads(connection: Connection, blocks: Sequence[SubBlock]) -> str:
    if not connection.reads:
        return "full stream"
    parts = []
    for write, addend in sorted(connection.reads):
        parts.append(f"{addend} of layer {blocks[write - 1].layer}")
    return "stream without " + ", ".join(parts)
