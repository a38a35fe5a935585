"""Selections of layers. A rule speaks of what the selected block itself reads: under "1-2" the attention of
layer 1 no longer sees the routed output of layer 0, although layer 0 is not selected.
"""

from typing import Any

import pytest

import fxskip
from tests.reference import Rules, Without, rewired
from tests.transform.compare import assert_same_logits, assert_same_training
from tests.transform.wirings import ATTENTION_RULE, FARSKIP, MLP_RULE, spec
from tests.zoo import batch, tiny


@pytest.mark.parametrize(
    ("selection", "layers"),
    [
        ("1-2", (1, 2)),
        ([0, 3], (0, 3)),
        ({"first": "50%"}, (0, 1)),
        ({"last": 2}, (2, 3)),
        ({"skip_first": "25%"}, (1, 2, 3)),
    ],
    ids=str,
)
def test_only_the_selected_layers_are_rewired(selection: Any, layers: tuple[int, ...]) -> None:
    model = tiny("mixtral", layers=4)
    student = fxskip.transform(
        model, spec(ATTENTION_RULE | {"layers": selection}, MLP_RULE | {"layers": selection})
    )

    assert_same_logits(student, FARSKIP.reference(model, layers), batch(3, 17, padded=True))


def test_a_range_with_shared_experts_and_a_dense_layer_trains_like_the_reference() -> None:
    model = tiny("deepseek_v3", layers=4)
    student = fxskip.transform(model, spec(ATTENTION_RULE | {"layers": "2-3"}, MLP_RULE | {"layers": "0-2"}))
    rules: Rules = {
        0: Without(mlp=FARSKIP.without.mlp),
        1: Without(mlp=FARSKIP.without.mlp),
        2: FARSKIP.without,
        3: Without(attention=FARSKIP.without.attention),
    }

    assert_same_training(student, rewired(model, rules), batch(padded=True))


def test_the_first_converted_layer_may_start_from_the_full_stream() -> None:
    """The published FarSkip code converts layers so: attention from one layer later than the MoE."""
    model = tiny("qwen2_moe", layers=4)
    student = fxskip.transform(model, spec(ATTENTION_RULE | {"layers": "2-3"}, MLP_RULE | {"layers": "1-3"}))
    rules: Rules = {1: Without(mlp=FARSKIP.without.mlp), 2: FARSKIP.without, 3: FARSKIP.without}

    assert_same_logits(student, rewired(model, rules), batch())


def test_blocks_can_be_named_by_module_path() -> None:
    model = tiny("mixtral", layers=4)
    student = fxskip.transform(model, spec({"blocks": "model.layers.[12].mlp", "without": ["all@1"]}))
    rules: Rules = {layer: Without(mlp=(("all", 1),)) for layer in (1, 2)}

    assert_same_logits(student, rewired(model, rules), batch())
