"""Random models under random rules: what each block sees when the layers run one after the other, each knowing its
own wiring only, must be what the rules say of the whole model.

A stream is simulated as the set of the addends that were added to it.
"""

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from fxskip.errors import PassError
from fxskip.spec import load_spec
from fxskip.wiring import FULL, ModelWiring, RegionWiring, SubBlock, Variant, connect

Stream = frozenset[tuple[int, str]]  # (number of the write in the model, name of the addend)
KINDS = {
    "attention": [("attention",)],
    "dense": [("dense",)],
    "mixer": [("mixer",)],
    "moe": [("routed", "shared"), ("shared", "routed"), ("routed",)],
}
parts = st.sampled_from([(kind, addends) for kind, choices in KINDS.items() for addends in choices])
models = st.lists(st.lists(parts, min_size=1, max_size=3), min_size=2, max_size=5)
names = st.sampled_from([["all"], ["routed"], ["shared"], ["routed", "shared"]])
withouts = st.dictionaries(st.integers(1, 7), names, min_size=1, max_size=3).map(
    lambda drops: [f"{name}@{back}" for back, names in drops.items() for name in names]
)


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[SubBlock], list[dict[str, Any]]]:
    """A model, and rules of which no two claim one block: each layer and kind belongs to at most one."""
    layers = draw(models)
    blocks = [
        SubBlock(number, kind, f"layers.{number}.{i}", addends)
        for number, layer in enumerate(layers)
        for i, (kind, addends) in enumerate(layer)
    ]
    numbers = st.lists(st.sampled_from(range(len(layers))), min_size=1, unique=True)
    rules: list[dict[str, Any]] = []
    # The word mixer covers attention as well, so a rule for mixers is left out here.
    for kind in draw(st.lists(st.sampled_from(["attention", "dense", "moe"]), min_size=1, unique=True)):
        chosen = sorted(draw(numbers))
        rules.append({"blocks": kind, "layers": chosen, "without": draw(withouts)})
        if (rest := sorted(set(range(len(layers))) - set(chosen))) and draw(st.booleans()):
            rules.append({"blocks": kind, "layers": rest, "without": draw(withouts)})
    return blocks, rules


def dropped(blocks: Sequence[SubBlock], index: int, rule: dict[str, Any]) -> Stream:
    """The addends that a rule takes from the block at `index`; its own write is number index + 1."""
    found = set()
    for addend in rule["without"]:
        name, _, back = addend.partition("@")
        write = index + 1 - int(back)
        if write >= 1:
            found |= {(write, own) for own in blocks[write - 1].addends if name in ("all", own)}
    return frozenset(found)


def claims(rule: dict[str, Any], block: SubBlock) -> bool:
    return block.kind == rule["blocks"] and block.layer in rule["layers"]


def seen_by_rules(blocks: Sequence[SubBlock], rules: Sequence[dict[str, Any]]) -> list[Stream]:
    """What each block sees: all that was written before it, without what the rule that claims it drops."""
    written: set[tuple[int, str]] = set()
    seen = []
    for index, block in enumerate(blocks):
        lost = [dropped(blocks, index, rule) for rule in rules if claims(rule, block)]
        seen.append(frozenset(written.difference(*lost)))
        written |= {(index + 1, name) for name in block.addends}
    return [*seen, frozenset(written)]


def seen_region_by_region(wiring: ModelWiring) -> list[Stream]:
    """What each block sees when every layer has only the streams that the layer before hands over."""
    seen: list[Stream] = []
    streams: list[Stream] = [frozenset()]
    for region in wiring.regions:
        assert len(streams) == len(region.inputs)
        before = len(seen)
        seen += [variant(region, streams, before, block.reads, n) for n, block in enumerate(region.blocks)]
        streams = [variant(region, streams, before, lacks, len(region.blocks)) for lacks in region.outputs]
    (full,) = streams  # the last layer hands over one stream
    return [*seen, full]


def variant(region: RegionWiring, streams: list[Stream], before: int, lacks: Variant, after: int) -> Stream:
    """The stream after so many of the region's writes that lacks `lacks`, `before` writes into the model."""
    incoming = streams[region.inputs.index(frozenset(pair for pair in lacks if pair[0] <= 0))]
    own = {
        (before + number, name)
        for number, block in enumerate(region.blocks[:after], start=1)
        for name in block.addends
        if (number, name) not in lacks
    }
    return incoming | own


def has_an_effect(blocks: Sequence[SubBlock], rule: dict[str, Any]) -> bool:
    return any(dropped(blocks, i, rule) for i, block in enumerate(blocks) if claims(rule, block))


@settings(max_examples=300, deadline=None, derandomize=True)
@given(cases())
def test_each_block_sees_what_the_rules_say(case: tuple[list[SubBlock], list[dict[str, Any]]]) -> None:
    blocks, rules = case
    rules = [rule for rule in rules if has_an_effect(blocks, rule)]

    wiring = connect(load_spec({"fxskip": 1, "connect": rules}), blocks)

    assert seen_region_by_region(wiring) == seen_by_rules(blocks, rules)
    assert_borders_fit(wiring)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(cases())
def test_a_rule_without_effect_is_refused(case: tuple[list[SubBlock], list[dict[str, Any]]]) -> None:
    blocks, rules = case
    assume(not all(has_an_effect(blocks, rule) for rule in rules))

    with pytest.raises(PassError, match=r"selects no block|drops nothing"):
        connect(load_spec({"fxskip": 1, "connect": rules}), blocks)


def assert_borders_fit(wiring: ModelWiring) -> None:
    """A layer takes what the one before hands over, the full stream first, and nothing that nobody reads."""
    for one, following in zip(wiring.regions, wiring.regions[1:], strict=False):
        shift = len(one.blocks)
        assert following.inputs == tuple(frozenset((w - shift, a) for w, a in v) for v in one.outputs)
    for region in wiring.regions:
        assert region.inputs[0] == region.outputs[0] == FULL
        wanted = [block.reads for block in region.blocks] + list(region.outputs)
        used = {frozenset(pair for pair in lacks if pair[0] <= 0) for lacks in wanted}
        assert set(region.inputs) == used | {FULL}
