"""What a spec means for a model: expected variants are written by hand, from the semantics in prose.

Writes are numbered from 1 inside a layer; the layer before ends in write 0, its other writes are -1, -2, ...
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from fxskip.errors import PassError, SpecError
from fxskip.spec import load_spec
from fxskip.wiring import FULL, BlockWiring, ModelWiring, RegionWiring, SubBlock, Variant, connect

Part = tuple[str, tuple[str, ...]]
ATTENTION: Part = ("attention", ("attention",))
DENSE: Part = ("dense", ("dense",))
MOE: Part = ("moe", ("routed", "shared"))
BARE_MOE: Part = ("moe", ("routed",))  # no shared expert


def model(*layers: Sequence[Part]) -> list[SubBlock]:
    return [
        SubBlock(number, kind, f"layers.{number}.{kind}", addends)
        for number, parts in enumerate(layers)
        for kind, addends in parts
    ]


def wire(blocks: list[SubBlock], *rules: dict[str, Any], **fields: Any) -> ModelWiring:
    return connect(load_spec({"fxskip": 1, "connect": list(rules), **fields}), blocks)


def lacks(*addends: tuple[int, str]) -> Variant:
    return frozenset(addends)


def reads(region: RegionWiring) -> list[Variant]:
    return [block.reads for block in region.blocks]


ATTENTION_RULE = {"blocks": "attention", "without": ["routed@1"]}
MLP_RULE = {"blocks": ["moe", "dense"], "without": ["all@1"]}
DENSE_THEN_MOE = model([ATTENTION, DENSE], [ATTENTION, MOE], [ATTENTION, MOE], [ATTENTION, MOE])


def test_farskip() -> None:
    first, second, third, last = wire(DENSE_THEN_MOE, ATTENTION_RULE, MLP_RULE).regions
    no_attention, no_routed = lacks((1, "attention")), lacks((0, "routed"))

    assert first == RegionWiring(
        blocks=(BlockWiring(*ATTENTION, FULL), BlockWiring(*DENSE, no_attention)),
        inputs=(FULL,),
        outputs=(FULL,),  # nothing routed was written, so one stream is enough
    )
    assert second == RegionWiring(
        blocks=(BlockWiring(*ATTENTION, FULL), BlockWiring(*MOE, no_attention)),
        inputs=(FULL,),
        outputs=(FULL, lacks((2, "routed"))),
    )
    assert third == RegionWiring(
        blocks=(BlockWiring(*ATTENTION, no_routed), BlockWiring(*MOE, no_attention)),
        inputs=(FULL, no_routed),
        outputs=(FULL, lacks((2, "routed"))),
    )
    assert last == replace(third, outputs=(FULL,))  # the final norm reads the full stream only


def test_ladder_lacks_the_write_just_before_each_block() -> None:
    first, second = wire(
        model([ATTENTION, MOE], [ATTENTION, DENSE]), {"blocks": "all", "without": ["all@1"]}
    ).regions

    assert reads(first) == [FULL, lacks((1, "attention"))]
    assert reads(second) == [lacks((0, "routed"), (0, "shared")), lacks((1, "attention"))]
    assert first.outputs == (FULL, lacks((2, "routed"), (2, "shared")))
    assert second.inputs == (FULL, lacks((0, "routed"), (0, "shared")))
    assert second.outputs == (FULL,)


def test_all_two_writes_back() -> None:
    """A stream can lack a write in the middle: here each block sees the write just before it, not the one before."""
    first, second, third = wire(
        model(*[[ATTENTION, MOE]] * 3), {"blocks": "all", "without": ["all@2"]}
    ).regions
    last_attention, last_moe = lacks((-1, "attention")), lacks((0, "routed"), (0, "shared"))

    assert reads(first) == [FULL, FULL]
    assert reads(second) == reads(third) == [last_attention, last_moe]
    assert second.inputs == third.inputs == (FULL, last_attention, last_moe)
    assert first.outputs == (FULL, lacks((1, "attention")), lacks((2, "routed"), (2, "shared")))


def test_a_drop_from_several_layers_back_crosses_all_of_them() -> None:
    """Attention of layer 2 lacks the attention of layer 0, four writes before it."""
    blocks = model(*[[ATTENTION, MOE]] * 3)
    first, second, third = wire(blocks, {"blocks": "attention", "without": ["all@4"]}).regions

    assert first.outputs == (FULL, lacks((1, "attention")))
    assert second.inputs == (FULL, lacks((-1, "attention")))
    assert second.outputs == (FULL, lacks((-1, "attention")))
    assert third.inputs == (FULL, lacks((-3, "attention")))
    assert reads(third) == [lacks((-3, "attention")), FULL]


def test_shared_alone_and_a_moe_without_it() -> None:
    blocks = model([ATTENTION, MOE], [ATTENTION, BARE_MOE], [ATTENTION, MOE])
    wiring = wire(blocks, {"blocks": "attention", "without": ["shared@1"]})

    assert [reads(region)[0] for region in wiring.regions] == [FULL, lacks((0, "shared")), FULL]
    attention_of_layer_2 = wiring.connections[4]
    assert attention_of_layer_2.lacks == ()
    assert attention_of_layer_2.note == "shared@1: that write is moe in layer 1 and has no such addend"


def test_a_rule_speaks_of_what_the_selected_block_reads() -> None:
    """Under "1-2" the attention of layer 1 no longer sees layer 0's routed output, and layer 3 sees everything."""
    blocks = model(*[[ATTENTION, MOE]] * 4)
    wiring = wire(blocks, ATTENTION_RULE | {"layers": "1-2"}, MLP_RULE | {"layers": "1-2"})

    no_routed, no_attention = lacks((0, "routed")), lacks((1, "attention"))
    assert [reads(region) for region in wiring.regions] == [
        [FULL, FULL],
        [no_routed, no_attention],
        [no_routed, no_attention],
        [FULL, FULL],
    ]
    assert [len(region.outputs) for region in wiring.regions] == [2, 2, 1, 1]


def test_the_last_75_percent() -> None:
    wiring = wire(model(*[[ATTENTION, BARE_MOE]] * 4), ATTENTION_RULE | {"layers": {"last": "75%"}})

    assert [reads(region)[0] for region in wiring.regions] == [FULL] + [lacks((0, "routed"))] * 3


def test_no_rules_leave_everything_on_the_full_stream() -> None:
    for region in wire(DENSE_THEN_MOE).regions:
        assert reads(region) == [FULL, FULL]
        assert region.inputs == region.outputs == (FULL,)


def test_layers_that_are_wired_alike_have_equal_regions() -> None:
    regions = wire(model(*[[ATTENTION, MOE]] * 6), ATTENTION_RULE, MLP_RULE).regions

    assert len(set(regions)) == 3  # the first, those in the middle, the last
    assert len({region.digest() for region in regions}) == 3


# --- digests -------------------------------------------------------------------------------------


def test_the_digest_of_a_region_does_not_change() -> None:
    """Saved models carry it: a value that changes makes every one of them unloadable."""
    region = RegionWiring(
        blocks=(BlockWiring(*ATTENTION, lacks((0, "routed"))), BlockWiring(*MOE, lacks((1, "attention")))),
        inputs=(FULL, lacks((0, "routed"))),
        outputs=(FULL, lacks((2, "routed"))),
    )
    assert region.digest() == "35655a3680895456"
    # The order in which a set was filled is not part of it.
    one, other = lacks((0, "routed"), (0, "shared")), lacks((0, "shared"), (0, "routed"))
    assert replace(region, inputs=(FULL, one)).digest() == replace(region, inputs=(FULL, other)).digest()


def test_the_digest_differs_when_anything_differs() -> None:
    attention, moe = BlockWiring(*ATTENTION, FULL), BlockWiring(*MOE, lacks((1, "attention")))
    region = RegionWiring((attention, moe), (FULL,), (FULL,))
    others = [
        replace(region, blocks=(moe, attention)),
        replace(region, blocks=(attention,)),
        replace(region, blocks=(attention, replace(moe, kind="dense"))),
        replace(region, blocks=(attention, replace(moe, addends=("shared", "routed")))),
        replace(region, blocks=(attention, replace(moe, addends=("routed",)))),
        replace(region, blocks=(attention, replace(moe, reads=FULL))),
        replace(region, blocks=(attention, replace(moe, reads=lacks((0, "attention"))))),
        replace(region, inputs=(FULL, lacks((0, "routed")))),
        replace(region, outputs=(FULL, lacks((2, "routed")))),
        replace(region, split_sum=True),
    ]
    digests = {other.digest() for other in others}
    assert len(digests) == len(others)
    assert region.digest() not in digests


def test_the_digest_of_a_model_depends_on_the_order_of_its_layers() -> None:
    one = wire(model([ATTENTION, MOE], [ATTENTION, BARE_MOE]))
    other = wire(model([ATTENTION, BARE_MOE], [ATTENTION, MOE]))
    assert one.digest() != other.digest()
    assert one.digest() == wire(model([ATTENTION, MOE], [ATTENTION, BARE_MOE])).digest()


# --- errors --------------------------------------------------------------------------------------


def refusal(blocks: list[SubBlock], *rules: dict[str, Any], **fields: Any) -> str:
    with pytest.raises(PassError) as caught:
        wire(blocks, *rules, **fields)
    return str(caught.value)


def test_a_rule_that_selects_no_block() -> None:
    message = refusal(DENSE_THEN_MOE, MLP_RULE, {"blocks": "layers.*.mlp", "without": ["all@1"]})

    assert "connect.1 selects no block of this model" in message
    assert "attention in layers 0-3, moe in layers 1-3, dense in layers 0" in message
    assert "'layers.0.attention'" in message  # what a path looks like here


def test_a_rule_that_drops_nothing() -> None:
    message = refusal(DENSE_THEN_MOE, ATTENTION_RULE | {"layers": [0, 1]})

    assert "connect.0 drops nothing" in message
    assert "layers 0-1" in message
    assert "no write that early" in message  # the reason at the first of them


def test_two_rules_that_claim_one_block() -> None:
    glob = {"blocks": "layers.2.*", "without": ["all@2"]}
    message = refusal(DENSE_THEN_MOE, MLP_RULE, glob)

    assert "connect.0 and connect.1 both claim" in message
    assert "layers.2.moe" in message


@pytest.mark.parametrize("layers", ["2-4", [9], {"last": 5}])
def test_a_layer_out_of_range(layers: Any) -> None:
    with pytest.raises(SpecError, match=r"connect\.0\.layers[\s\S]*0-3|0-3[\s\S]*connect\.0\.layers"):
        wire(DENSE_THEN_MOE, MLP_RULE | {"layers": layers})


def test_addends_that_cannot_be_told_apart_can_be_dropped_together() -> None:
    blocks = model([ATTENTION, BARE_MOE], [ATTENTION, BARE_MOE])
    blocks[1] = replace(
        blocks[1], inseparable="their sum 'add_3' goes through rms_norm before it reaches the stream"
    )
    message = refusal(blocks, ATTENTION_RULE)

    assert "routed@1 for the attention block of layer 1" in message
    assert "layers.0.moe: their sum 'add_3' goes through rms_norm" in message
    assert "all@1" in message
    wiring = wire(blocks, {"blocks": "attention", "without": ["all@1"]})
    assert reads(wiring.regions[1]) == [lacks((0, "routed")), FULL]


def test_a_sum_that_cannot_be_split() -> None:
    without_shared = model([ATTENTION, DENSE], [ATTENTION, BARE_MOE])
    message = refusal(without_shared, MLP_RULE, sum="split")
    assert "sum: split changes nothing: no MoE block adds both routed and shared experts" in message
    assert "delete sum: split" in message

    one_sum = model([ATTENTION, MOE], [ATTENTION, MOE])
    one_sum[3] = replace(one_sum[3], inseparable="their sum goes through rms_norm")
    message = refusal(one_sum, MLP_RULE, sum="split")
    assert "routed and shared experts of layer 1 cannot be told apart" in message
    assert "layers.1.moe: their sum goes through rms_norm" in message
