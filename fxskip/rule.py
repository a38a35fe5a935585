"""One rule of a spec: some blocks, in some layers, no longer see some addends of earlier writes.

blocks: attention            # attention, moe, dense, mixer, all, a glob of module paths, or a list
layers: {last: 75%}          # see layer_selection.py
without: [routed@1]          # addend @ how many writes before the block
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Annotated, cast

from pydantic import AfterValidator, BeforeValidator, Field, PlainSerializer, PlainValidator

from fxskip.layer_selection import Layers, parse_layers
from fxskip.strict_model import Strict, as_tuple, did_you_mean, problem, problems
from fxskip.strict_yaml import Place, shown

BLOCK_WORDS = ("attention", "moe", "dense", "mixer", "all")
ADDEND_NAMES = ("routed", "shared", "all")
MAX_GLOB = 200  # characters; a module path has some 40


@dataclass(frozen=True, slots=True)
class Addend:
    """`routed@2`: the routed addend of the second write before the block. `all`: the whole write."""

    name: str
    back: int

    def __str__(self) -> str:
        return f"{self.name}@{self.back}"


def _parse_addend(written: object) -> Addend:
    if isinstance(written, Addend):
        return written
    match = re.fullmatch(r"(\w+)@(-?\d+)", written, re.ASCII) if isinstance(written, str) else None
    if match is None:
        raise problem(f"expected an addend such as routed@1, found {shown(written)}")
    name, back = match[1], match[2]
    if name not in ADDEND_NAMES:
        raise problem(
            f"{shown(written)}: no addend is called {shown(name)}; {did_you_mean(name, ADDEND_NAMES)}"
        )
    if not re.fullmatch(r"[1-9]\d{0,3}", back):
        raise problem(
            f"{shown(written)}: the number must be 1 to 9999 (1 is the write just before the block)"
        )
    return Addend(name, int(back))


def _drops_each_once(addends: tuple[Addend, ...]) -> tuple[Addend, ...]:
    if not addends:
        raise problem("an empty list drops nothing; name an addend such as routed@1, or delete the rule")
    faults = []
    seen: set[Addend] = set()
    whole = {addend.back for addend in addends if addend.name == "all"}
    for i, addend in enumerate(addends):
        if addend in seen:
            faults.append(((i,), f"{addend} is here twice"))
        elif addend.name != "all" and addend.back in whole:
            faults.append(((i,), f"{addend} is already part of all@{addend.back}; delete one"))
        seen.add(addend)
    if faults:
        raise problems(faults)
    return addends


def _parse_blocks(written: object) -> tuple[str, ...]:
    blocks = [written] if isinstance(written, str) else written
    if not isinstance(blocks, list | tuple):
        raise problem(
            f"expected {', '.join(BLOCK_WORDS)}, a glob of module paths, or a list; found {shown(written)}"
        )
    if not blocks:
        raise problem("an empty list selects no block; name one, or delete the rule")
    faults: list[tuple[Place, str]] = []
    wide_words = [word for word in ("all", "mixer") if word in blocks]
    for i, block in enumerate(blocks):
        if fault := _block_fault(block, wide_words):
            faults.append(((i,) if blocks is written else (), fault))
    if not faults and len(set(blocks)) < len(blocks):
        faults.append(((), "a block is here twice"))
    if faults:
        raise problems(faults)
    return tuple(cast(list[str], blocks))


def _block_fault(block: object, wide_words: Sequence[str]) -> str | None:
    """What is wrong with one entry of `blocks`; `wide_words` are the entries that cover others."""
    if not isinstance(block, str):
        return f"expected {', '.join(BLOCK_WORDS)} or a glob of module paths, found {shown(block)}"
    if block not in BLOCK_WORDS:
        if "," in block:
            return f"{shown(block)}: write a list, [{block}]"
        if len(block) > MAX_GLOB or not block.isprintable():
            return f"{shown(block)}: a glob is at most {MAX_GLOB} characters that can be printed"
        # A dot or a wildcard makes a path; without this a misspelt word would be a glob that matches nothing.
        if not re.search(r"[.*?\[]", block) or re.search(r"\s", block):
            hint = did_you_mean(block, BLOCK_WORDS)
            return (
                f"{shown(block)} is neither a kind of block nor a glob such as 'model.layers.*.mlp'; {hint}"
            )
    wider = [word for word in wide_words if word != block and _covers(word, block)]
    return f"{block!r} is already part of {wider[0]!r}; delete one" if wider else None


def _covers(wider: object, narrower: str) -> bool:
    """True if every block that `narrower` names, in any model, is also named by `wider`."""
    return wider in (narrower, "all") or (wider, narrower) == ("mixer", "attention")


class Rule(Strict):
    """One entry of `connect`: what some blocks no longer see of the residual stream."""

    blocks: Annotated[
        tuple[str, ...],
        PlainValidator(_parse_blocks),
        PlainSerializer(lambda blocks: blocks[0] if len(blocks) == 1 else list(blocks)),
    ] = Field(
        description="attention, moe, dense, mixer (attention, linear attention, SSM, convolution), all, "
        "or a glob of module paths in which * also crosses dots"
    )
    layers: Annotated[Layers, PlainValidator(parse_layers), PlainSerializer(Layers.to_plain)] = Field(
        default=Layers(), description="which decoder layers, counted from 0; ranges include both ends"
    )
    without: Annotated[
        tuple[Annotated[Addend, PlainValidator(_parse_addend), PlainSerializer(str)], ...],
        BeforeValidator(as_tuple),
        AfterValidator(_drops_each_once),
    ] = Field(
        description="addends the block no longer sees: routed@n, shared@n or all@n, where n counts the "
        "writes to the stream before the block and 1 is the one just before it; a write that lacks the "
        "addend has nothing to drop"
    )

    def claims(self, kind: str, path: str) -> bool:
        """True if the rule names this block. `kind`: attention, mixer (any other mixer), moe or dense."""
        return any(_covers(block, kind) or fnmatchcase(path, block) for block in self.blocks)

    def overlap_with(self, other: "Rule") -> str | None:
        """What both rules claim in any model that both fit; None if nothing, or if only a model can tell."""
        both = self._covered_of(other) or other._covered_of(self)
        return both if both and self.layers.shares_a_layer_with(other.layers) else None

    def _covered_of(self, other: "Rule") -> str | None:
        """A block of `other` that is sure to be a block of this rule too, layers aside."""
        own = set(self.blocks)
        if common := next((block for block in other.blocks if block in own), None):
            return common
        for wide in ("all", "mixer"):
            # A glob names its layers itself, so only the word `all` on all layers is sure to meet it.
            for narrow in other.blocks if wide in self.blocks else ():
                if _covers(wide, narrow) and (narrow in BLOCK_WORDS or self.layers.is_all):
                    return narrow
        return None
