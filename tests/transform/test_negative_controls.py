"""The comparison itself: a student judged against a slightly wrong reference must fail it.

Each control names the mistake in the product that it stands for.
"""

from typing import NamedTuple

import pytest
from transformers import PreTrainedModel

import fxskip
from tests.reference import Rules, Without, rewired
from tests.transform.compare import assert_same_logits, assert_same_training, outcome
from tests.transform.wirings import FARSKIP, WIRINGS
from tests.zoo import batch, tiny

LAYERS = range(3)
FULL_RANGE: Rules = dict.fromkeys(LAYERS, FARSKIP.without)

CONTROLS: dict[str, Rules] = {
    "streams swapped": {
        layer: Without(attention=FARSKIP.without.mlp, mlp=FARSKIP.without.attention) for layer in LAYERS
    },
    "attention not rewired": {layer: Without(mlp=FARSKIP.without.mlp) for layer in LAYERS},
    "MoE not rewired": {layer: Without(attention=FARSKIP.without.attention) for layer in LAYERS},
    "shared dropped with routed": dict.fromkeys(LAYERS, WIRINGS["ladder"].without),
    "shared dropped for routed": {
        layer: Without(attention=(("shared", 1),), mlp=FARSKIP.without.mlp) for layer in LAYERS
    },
    "one write too far back": {
        layer: Without(attention=(("routed", 3),), mlp=FARSKIP.without.mlp) for layer in LAYERS
    },
    "first layer left out": dict.fromkeys((1, 2), FARSKIP.without),
    "last layer left out": dict.fromkeys((0, 1), FARSKIP.without),
    "not rewired at all": {},
}


class Pair(NamedTuple):
    model: PreTrainedModel
    student: PreTrainedModel


@pytest.fixture(scope="module")
def pair() -> Pair:
    model = tiny("qwen2_moe")
    student = fxskip.transform(model, FARSKIP.spec)
    assert_same_logits(student, rewired(model, FULL_RANGE), batch())
    return Pair(model, student)


@pytest.mark.parametrize("mistake", list(CONTROLS))
def test_a_wrong_wiring_fails_the_comparison(pair: Pair, mistake: str) -> None:
    model, student = pair
    with pytest.raises(AssertionError, match="logits differ: by up to"):
        assert_same_logits(student, rewired(model, CONTROLS[mistake]), batch())


def test_a_lost_gradient_fails_the_comparison(pair: Pair) -> None:
    model, student = pair
    reference = rewired(model, FULL_RANGE)
    reference.model.layers[1].self_attn.q_proj.weight.requires_grad_(False)
    with pytest.raises(AssertionError, match=r"gradients differ in names: .*layers\.1\.self_attn\.q_proj"):
        assert_same_training(student, reference, batch())


def test_a_wrong_gradient_fails_the_comparison(pair: Pair) -> None:
    model, student = pair
    reference = rewired(model, FULL_RANGE)
    weight = reference.model.layers[0].mlp.shared_expert.down_proj.weight
    weight.register_hook(lambda gradient: gradient * 1.00001)
    with pytest.raises(AssertionError, match=r"gradients of model\.layers\.0\.mlp\.shared_expert\.down_proj"):
        assert_same_training(student, reference, batch(), gradient_tolerance=1e-6)


def test_the_mistakes_differ_from_the_right_wiring_by_more_than_rounding(pair: Pair) -> None:
    model, _ = pair
    right = outcome(rewired(model, FULL_RANGE), batch()).logits
    for mistake, rules in CONTROLS.items():
        gap = (outcome(rewired(model, rules), batch()).logits - right).abs().mean()
        assert gap > 1e-2, f"{mistake}: {float(gap):.1e}"
