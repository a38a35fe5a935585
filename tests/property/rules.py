"""Random specs for a design, and what must become of them: which block misses what, or which refusal.

Written from the description of the spec language, without fxskip.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import ROUND_HALF_UP, Decimal
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import yaml

from tests.property.designs import Design
from tests.property.formula import Block, Lacks, Reads, blocks

SPECS = Path(__file__).parents[2] / "specs"
PRESETS = ["farskip", "farskip-attention", "farskip-moe", "farskip-last-75", "ladder", "parallel", "identity"]


@dataclass(frozen=True)
class Refusal:
    """The class of the exception, and words of its message."""

    kind: str
    words: str


@dataclass(frozen=True)
class Rewired:
    """What each block misses, and whether sums are split."""

    reads: Reads
    split: bool


Outcome = Refusal | Rewired


# --- prediction ----------------------------------------------------------------------------------


def predict(design: Design, spec: Mapping[str, Any]) -> Outcome:
    """What `transform` makes of a model of this design."""
    return architecture_refusal(design) or rules_outcome(design, spec)


def architecture_refusal(design: Design) -> Refusal | None:
    """Why a design cannot be rewired, whatever the spec; None where it can."""
    is_outer = design.place == "outer" and design.norm != "none"
    if is_outer:
        return Refusal("PassError", "is not the stream plus the output of one sub-block")
    if "moe" not in design.layers:
        return Refusal("PassError", "has no routed experts in any layer")
    if design.form == "parallel_one":
        return Refusal("PassError", "attention and routed experts are added to the stream as one sub-block")
    return None


def rules_outcome(design: Design, spec: Mapping[str, Any]) -> Outcome:
    """Rules are applied one after the other; the first fault is the one that is told."""
    rules = spec_rules(spec)
    found = blocks(design)
    claims: dict[int, int] = {}
    for number, rule in enumerate(rules):
        layers = resolve(rule.get("layers", "all"), len(design.layers))
        if layers is None:
            return Refusal("SpecError", f"decoder layers (0-{len(design.layers) - 1})")
        mine = [i for i, b in enumerate(found) if b.layer in layers and names(rule, path(design, b), b.kind)]
        if any(i in claims for i in mine):
            return Refusal("PassError", "both claim")
        if not mine:
            return Refusal("PassError", f"connect.{number} selects no block")
        claims |= dict.fromkeys(mine, number)

    reads: dict[int, Lacks] = {}
    for position, number in sorted(claims.items()):
        lacks = missed(found, position, rules[number]["without"])
        if lacks is None:
            return Refusal(
                "PassError", f"of layer {found[position].layer}: routed and shared experts of layer"
            )
        reads[position] = lacks
    for number in range(len(rules)):
        if not any(reads[i] for i, n in claims.items() if n == number):
            return Refusal("PassError", f"connect.{number} drops nothing")
    split = spec.get("sum") == "split"
    if split and any(block.inseparable for block in found):
        return Refusal("PassError", "sum: split: routed and shared experts of layer")
    if split and not any(block.addends == {"routed", "shared"} for block in found):
        return Refusal("PassError", "sum: split changes nothing")
    return Rewired({i: changed for i, lacks in reads.items() if (changed := seen(found, i) & lacks)}, split)


def seen(found: Sequence[Block], position: int) -> Lacks:
    """What the block at `position` reads in the original code."""
    last = position - found[position].behind
    return frozenset((write, name) for write in range(1, last + 1) for name in found[write - 1].addends)


def missed(found: Sequence[Block], position: int, without: Sequence[str]) -> Lacks | None:
    """What the block at `position` no longer sees; None where that cannot be told apart."""
    lacks = set()
    for addend in without:
        name, _, back = addend.partition("@")
        write = position + 1 - int(back)  # the block's own is position + 1
        if write < 1:
            continue
        other = found[write - 1]
        if other.inseparable and name != "all":
            return None
        lacks |= {(write, own) for own in other.addends if name in ("all", own)}
    return frozenset(lacks)


def spec_rules(spec: Mapping[str, Any]) -> list[dict[str, Any]]:
    own = list(spec.get("connect", []))
    if "preset" in spec:
        own += yaml.safe_load((SPECS / f"{spec['preset']}.yaml").read_text())["connect"]
    return own


def path(design: Design, block: Block) -> str:
    prefix = "model." if design.wrapper == "hf" else ""
    return f"{prefix}layers.{block.layer}.{block.child}"


def names(rule: Mapping[str, Any], place: str, kind: str) -> bool:
    """Whether the rule's `blocks` name a block. The word mixer takes attention in."""
    written = rule["blocks"]
    for word in [written] if isinstance(written, str) else written:
        if word in ("all", kind) or (word, kind) == ("mixer", "attention") or fnmatchcase(place, word):
            return True
    return False


def resolve(written: Any, count: int) -> set[int] | None:
    """The layers of a selection in a model of so many; None where it does not fit."""
    if written == "all":
        return set(range(count))
    if isinstance(written, str):
        first, last = map(int, written.split("-"))
        written = list(range(first, last + 1))
    if isinstance(written, list):
        return set(written) if max(written) < count else None
    ((end, amount),) = written.items()
    if isinstance(amount, str):
        share = Decimal(amount.rstrip("%")) * count / 100
        amount = max(1, int(share.to_integral_value(ROUND_HALF_UP)))
    if amount > count or (end == "skip_first" and amount == count):
        return None
    return set({"first": range(amount), "last": range(count - amount, count)}.get(end, range(amount, count)))


# --- random specs --------------------------------------------------------------------------------


def random_spec(design: Design, draw: random.Random, *, refused: bool) -> dict[str, Any]:
    """A spec that the design's model takes or, with `refused`, one that it does not, as far as that can be found."""
    for _ in range(60):
        spec = _any_spec(design, draw)
        if isinstance(rules_outcome(design, spec), Refusal) == refused:
            break
    return spec


def _any_spec(design: Design, draw: random.Random) -> dict[str, Any]:
    spec: dict[str, Any] = {"fxskip": 1, "name": "random"}
    if draw.random() < 0.15:
        spec["preset"] = draw.choice(PRESETS)
    elif draw.random() < 0.95:
        words = draw.sample(["attention", "moe", "dense"], 3)
        count = draw.choice([1, 1, 2, 2, 3])
        # One word a rule: two rules that always claim one block are refused before the model is looked at.
        spec["connect"] = [_rule(design, draw, words[i]) for i in range(count)]
    if draw.random() < 0.3:
        spec["sum"] = draw.choice(["split", "split", "as_written"])
    return spec


def _rule(design: Design, draw: random.Random, word: str) -> dict[str, Any]:
    layer = draw.randrange(len(design.layers))
    child = "attn" if word == "attention" else "mlp"
    prefix = "model." if design.wrapper == "hf" else ""
    selected = draw.choice([
        word, word, word, [word], f"*.{child}", f"*layers.[{layer}{layer + 1}].{child}",
        f"{prefix}layers.{layer}.{child}", [word, f"{prefix}layers.9.{child}"],
    ])  # fmt: skip
    rule: dict[str, Any] = {"blocks": selected}
    if draw.random() < 0.7:
        rule["layers"] = _layers(len(design.layers), draw)
    rule["without"] = _without(draw)
    return rule


def _layers(count: int, draw: random.Random) -> Any:
    first, last = sorted(draw.choices(range(count + (draw.random() < 0.1)), k=2))
    amount = draw.choice([draw.randint(1, count), f"{draw.choice([1, 10, 25, 33.4, 50, 62.5, 75, 99])}%"])
    return draw.choice([
        "all", f"{first}-{last}", sorted({first, last}), {"first": amount}, {"last": amount}, {"skip_first": amount},
    ])  # fmt: skip


def _without(draw: random.Random) -> list[str]:
    chosen: dict[int, list[str]] = {}
    for back in draw.sample(range(1, 7), draw.choice([1, 1, 2, 3])):
        chosen[back] = draw.choice([["all"], ["routed"], ["shared"], ["shared", "routed"]])
    return [f"{name}@{back}" for back, names in chosen.items() for name in names]
