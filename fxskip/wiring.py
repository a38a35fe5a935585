"""What a spec means for a given model: which value of the stream each sub-block reads.

Writes to the stream are numbered through the whole model: 1 is the first layer's first sub-block. A
variant of the stream is named by what it lacks, a set of (write, addend). The full stream lacks nothing.
Inside one region the numbers count from its own first write, so that layers wired alike compare equal
and share one captured graph; earlier writes then are 0, -1, ...
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fxskip.errors import PassError
from fxskip.rule import Rule
from fxskip.spec import Spec

KINDS = ("attention", "moe", "dense", "mixer")

Variant = frozenset[tuple[int, str]]
FULL: Variant = frozenset()


@dataclass(frozen=True)
class SubBlock:
    """One sub-block of the model: it reads the stream, computes, and adds its addends to the stream."""

    layer: int
    kind: str
    path: str
    """Module path in the model, `model.layers.3.mlp`."""
    addends: tuple[str, ...]
    """Names of what it adds, in the order of the original code: ("routed", "shared"), ("attention",)."""
    inseparable: str = ""
    """Why a sum of routed and shared experts could not be taken apart; empty where it could or need not."""
    behind: int = 0
    """How many writes just before its own the original code does not see (parallel blocks, shortcuts); mostly 0."""


@dataclass(frozen=True)
class BlockWiring:
    """What one sub-block of a region is expected to be and which variant of the stream it reads."""

    kind: str
    addends: tuple[str, ...]
    reads: Variant
    behind: int = 0


@dataclass(frozen=True)
class RegionWiring:
    """The wiring of one decoder layer. Streams cross its borders as a tuple, the full one first."""

    blocks: tuple[BlockWiring, ...]
    inputs: tuple[Variant, ...]
    outputs: tuple[Variant, ...]
    split_sum: bool = False
    """Add the shared before the routed experts: ((r + shared) + routed)."""

    def is_moved(self, number: int) -> bool:
        """Whether sub-block `number`, counted from 1, reads another variant than its original code does."""
        behind = self.blocks[number - 1].behind
        unseen = {
            (write, name)
            for write in range(number - behind, number)
            for name in self.blocks[write - 1].addends
        }
        return self.blocks[number - 1].reads != unseen

    def digest(self) -> str:
        """A short hash that is the same for equal wirings in every process."""
        return hashlib.sha256(json.dumps(_plain(self), sort_keys=True).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Connection:
    """What became of the rules at one sub-block."""

    block: SubBlock
    write: int
    lacks: tuple[tuple[int, str], ...]
    """(write, addend) that the block no longer sees, sorted."""
    unseen: Variant
    """(write, addend) that its original code does not see either."""
    rule: int | None
    """Index of the rule in the spec's `connect`; None where no rule selects the block."""
    is_met: bool = False
    """Whether the rule names something that the original code does not let the block see either."""
    note: str = ""
    """Why the rule, or a part of it, changes nothing here."""

    @property
    def reads(self) -> Variant:
        """The variant of the stream that the block reads, by what it lacks."""
        return frozenset(self.lacks) | self.unseen


@dataclass(frozen=True)
class ModelWiring:
    """The whole model: a connection a sub-block and a region wiring a layer."""

    connections: tuple[Connection, ...]
    regions: tuple[RegionWiring, ...]

    def digest(self) -> str:
        """Hash over all regions: two students with the same hash are wired the same way."""
        return hashlib.sha256("".join(r.digest() for r in self.regions).encode()).hexdigest()


def connect(spec: Spec, blocks: Sequence[SubBlock]) -> ModelWiring:
    """Apply the rules of `spec` to the sub-blocks of a model, given in the order in which they write.

    Raises SpecError for a layer out of range and PassError for a rule that selects no block, drops
    nothing anywhere, or needs addends that this architecture does not keep apart, and for two rules
    that claim one block.
    """
    n_layers = blocks[-1].layer + 1
    claims = _claims(spec.connect, blocks, n_layers)
    connections = tuple(
        _connection(blocks, i, rule, spec.connect[rule] if rule is not None else None)
        for i, rule in enumerate(claims)
    )
    for number, rule in enumerate(spec.connect):
        _require_an_effect(number, rule, [c for c in connections if c.rule == number], blocks)
    split_sum = spec.sum == "split"
    if split_sum:
        _require_sums(blocks)
    return ModelWiring(
        connections, tuple(_region(connections, layer, split_sum) for layer in range(n_layers))
    )


def _claims(rules: Sequence[Rule], blocks: Sequence[SubBlock], n_layers: int) -> list[int | None]:
    """The rule that selects each block, by its index."""
    claims: list[int | None] = [None] * len(blocks)
    for number, rule in enumerate(rules):
        layers = set(rule.layers.resolve(n_layers, where=f"connect.{number}.layers"))
        for i, block in enumerate(blocks):
            if block.layer not in layers or not rule.claims(block.kind, block.path):
                continue
            if claims[i] is not None:
                raise PassError(
                    "connect",
                    f"connect.{claims[i]} and connect.{number} both claim {block.kind} in layer {block.layer}",
                    where=block.path,
                    hint="give each block one rule: narrow `layers` or `blocks` of one of the two",
                )
            claims[i] = number
        if number not in claims:
            raise PassError(
                "connect",
                f"connect.{number} selects no block of this model",
                where=f"blocks: {', '.join(rule.blocks)}; layers: {span(sorted(layers))}",
                hint=f"the model has {_census(blocks)}; module paths look like {blocks[0].path!r}",
            )
    return claims


def _connection(blocks: Sequence[SubBlock], index: int, number: int | None, rule: Rule | None) -> Connection:
    """Which earlier addends the block at `index` no longer sees. Its own write is number index + 1."""
    block, write = blocks[index], index + 1
    unseen = frozenset(
        (w, name) for w in range(write - block.behind, write) for name in blocks[w - 1].addends
    )
    if rule is None:
        return Connection(block, write, (), unseen, None, note="no rule selects it")
    lacks: set[tuple[int, str]] = set()
    notes: list[str] = []
    for addend in rule.without:
        source = index - addend.back
        if source < 0:
            notes.append(f"{addend}: no write that early; the embedding is not a write")
            continue
        other = blocks[source]
        if addend.name != "all" and other.inseparable:
            raise PassError(
                "connect",
                f"{addend} for the {block.kind} block of layer {block.layer}: routed and shared experts of layer "
                f"{other.layer} cannot be told apart",
                where=f"{other.path}: {other.inseparable}",
                hint=f"drop the whole write with all@{addend.back}",
            )
        names = other.addends if addend.name == "all" else tuple(a for a in other.addends if a == addend.name)
        if not names:
            notes.append(
                f"{addend}: that write is {other.kind} in layer {other.layer} and has no such addend"
            )
        elif source + 1 >= write - block.behind:
            notes.append(f"{addend}: the original code does not see that write either")
        lacks |= {(source + 1, name) for name in names}
    return Connection(
        block, write, tuple(sorted(lacks - unseen)), unseen, number, bool(lacks & unseen), "; ".join(notes)
    )


def _require_sums(blocks: Sequence[SubBlock]) -> None:
    """Refuse `sum: split` where a sum cannot be split, or where there is none."""
    for block in blocks:
        if block.inseparable:
            raise PassError(
                "connect",
                f"sum: split: routed and shared experts of layer {block.layer} cannot be told apart",
                where=f"{block.path}: {block.inseparable}",
                hint="delete sum: split",
            )
    if not any({"routed", "shared"} <= set(block.addends) for block in blocks):
        raise PassError(
            "connect",
            "sum: split changes nothing: no MoE block adds both routed and shared experts",
            where=f"the model has {_census(blocks)}",
            hint="delete sum: split",
        )


def _require_an_effect(
    number: int, rule: Rule, hit: Sequence[Connection], blocks: Sequence[SubBlock]
) -> None:
    if any(c.lacks or c.is_met for c in hit):
        return
    layers = span(sorted({c.block.layer for c in hit}))
    ends = (hit[0], hit[-1]) if len(hit) > 1 else hit  # the first may lack a write that the others have
    raise PassError(
        "connect",
        f"connect.{number} drops nothing: {', '.join(map(str, rule.without))} is nothing that its blocks would see",
        where="\n".join([f"layers {layers}", *(f"{c.block.path}: {c.note}" for c in ends)]),
        hint=f"the model has {_census(blocks)}; @1 is the write just before the block",
    )


def _region(connections: Sequence[Connection], layer: int, split_sum: bool) -> RegionWiring:
    inside = [c for c in connections if c.block.layer == layer]
    before = inside[0].write - 1
    return RegionWiring(
        blocks=tuple(
            BlockWiring(c.block.kind, c.block.addends, _relative(c.reads, before), c.block.behind)
            for c in inside
        ),
        inputs=_crossing(connections, before, before),
        outputs=_crossing(connections, inside[-1].write, before),
        split_sum=split_sum,
    )


def as_one_region(wiring: ModelWiring) -> RegionWiring:
    """The wiring of a whole model as one region, for a program that has no layers."""
    return RegionWiring(
        blocks=tuple(
            BlockWiring(c.block.kind, c.block.addends, c.reads, c.block.behind) for c in wiring.connections
        ),
        inputs=(FULL,),
        outputs=(FULL,),
        split_sum=any(region.split_sum for region in wiring.regions),
    )


def _crossing(connections: Sequence[Connection], border: int, zero: int) -> tuple[Variant, ...]:
    """The variants that some block after write `border` still needs, the full stream first."""
    needed = {
        frozenset(pair for pair in c.reads if pair[0] <= border) for c in connections if c.write > border
    }
    others = sorted((_relative(v, zero) for v in needed if v), key=sorted)
    return (FULL, *others)


def _relative(variant: Variant, zero: int) -> Variant:
    return frozenset((write - zero, addend) for write, addend in variant)


def _census(blocks: Sequence[SubBlock]) -> str:
    parts = []
    for kind in KINDS:
        if layers := sorted({b.layer for b in blocks if b.kind == kind}):
            parts.append(f"{kind} in layers {span(layers)}")
    names = sorted({addend for block in blocks if block.kind == "moe" for addend in block.addends})
    return ", ".join(parts) + (f"; its MoE blocks add {' and '.join(names)}" if names else "")


def span(layers: Sequence[int], dash: str = "-") -> str:
    """[0, 1, 2, 5] as "0-2, 5"."""
    runs: list[list[int]] = []
    for layer in layers:
        if runs and layer == runs[-1][1] + 1:
            runs[-1][1] = layer
        else:
            runs.append([layer, layer])
    return ", ".join(str(a) if a == b else f"{a}{dash}{b}" for a, b in runs) or "none"


def _plain(region: RegionWiring) -> dict[str, Any]:
    return {
        "blocks": [[b.kind, list(b.addends), sorted(b.reads)] for b in region.blocks],
        "inputs": [sorted(v) for v in region.inputs],
        "outputs": [sorted(v) for v in region.outputs],
        "split_sum": region.split_sum,
    }
