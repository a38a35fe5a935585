"""Every wiring against its hand-written model: logits, loss and, except as noted in wirings.py, gradients too are
equal to the last bit.
"""

import pytest

import fxskip
from tests.reference import Rules, Without, rewired
from tests.transform.compare import assert_same_logits, assert_same_training
from tests.transform.wirings import ATTENTION_RULE, FARSKIP, MLP_RULE, WIRINGS, Wiring, spec
from tests.zoo import MODEL_TYPES, batch, tiny


def check(model_type: str, wiring: Wiring, *, layers: int = 3) -> None:
    model = tiny(model_type, layers=layers)
    student = fxskip.transform(model, wiring.spec)
    reference = wiring.reference(model)

    for shape in ((3, 17), (5, 31)):
        given = batch(*shape, padded=True)
        assert_same_training(student, reference, given, gradient_tolerance=wiring.gradient_tolerance)


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_farskip(model_type: str) -> None:
    check(model_type, FARSKIP)


@pytest.mark.parametrize("wiring", [name for name in WIRINGS if name != "farskip"])
def test_other_wirings(wiring: str) -> None:
    check("deepseek_v3", WIRINGS[wiring], layers=4 if wiring == "far_back" else 3)


@pytest.mark.slow
@pytest.mark.parametrize("wiring", [name for name in WIRINGS if name != "farskip"])
@pytest.mark.parametrize("model_type", [name for name in MODEL_TYPES if name != "deepseek_v3"])
def test_other_wirings_of_all_types(model_type: str, wiring: str) -> None:
    check(model_type, WIRINGS[wiring])


def test_the_shared_addend_can_be_dropped_alone() -> None:
    model = tiny("qwen2_moe")
    student = fxskip.transform(model, spec({"blocks": "attention", "without": ["shared@1"]}))
    rules: Rules = {layer: Without(attention=(("shared", 1),)) for layer in range(3)}

    assert_same_logits(student, rewired(model, rules), batch())


def test_a_dense_layer_between_moe_layers_has_nothing_routed_to_drop() -> None:
    model = tiny("qwen3_moe", layers=4, mlp_only_layers=[1])
    student = fxskip.transform(model, FARSKIP.spec)

    assert_same_logits(student, FARSKIP.reference(model), batch())


def test_moe_blocks_alone_leave_dense_blocks_on_the_full_stream() -> None:
    model = tiny("deepseek_v3")  # layer 0 is dense
    student = fxskip.transform(model, spec({"blocks": "moe", "without": ["all@1"]}))
    rules: Rules = {layer: Without(mlp=(("all", 1),)) for layer in (1, 2)}

    assert_same_logits(student, rewired(model, rules), batch())


@pytest.mark.parametrize("model_type", ["qwen2_moe", "llama4_text"])
def test_a_split_sum_adds_shared_before_routed(model_type: str) -> None:
    model = tiny(model_type, layers=2)
    student = fxskip.transform(model, spec(ATTENTION_RULE, MLP_RULE, sum="split"))
    rules: Rules = dict.fromkeys(range(2), FARSKIP.without)

    assert_same_logits(student, rewired(model, rules, split_sum=True), batch())
    with pytest.raises(AssertionError, match="logits differ"):
        assert_same_logits(student, rewired(model, rules), batch())


@pytest.mark.parametrize(
    ("preset", "without", "layers"),
    [
        ("farskip", FARSKIP.without, range(4)),
        ("farskip-attention", WIRINGS["attention_only"].without, range(4)),
        ("farskip-moe", WIRINGS["mlp_only"].without, range(4)),
        ("parallel", WIRINGS["mlp_only"].without, range(4)),
        ("ladder", WIRINGS["ladder"].without, range(4)),
        ("farskip-last-75", FARSKIP.without, range(1, 4)),
        ("identity", Without(), range(4)),
    ],
)
def test_presets(preset: str, without: Without, layers: range) -> None:
    model = tiny("mixtral", layers=4)
    student = fxskip.transform(model, preset)
    rules: Rules = dict.fromkeys(layers, without)

    assert_same_logits(student, rewired(model, rules), batch())
