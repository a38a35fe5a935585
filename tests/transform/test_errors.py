"""What cannot be rewired is refused when transform() is called, with place and remedy, and is left alone."""

from typing import Any

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

import fxskip
from tests.transform.compare import logits
from tests.transform.wirings import ATTENTION_RULE, FARSKIP, MLP_RULE, Spec, spec
from tests.zoo import batch, tiny


def refusal(model: nn.Module, wanted: Spec, kind: type[fxskip.FxskipError]) -> str:
    """The message of the refusal; every one has a line that says what to do."""
    with pytest.raises(kind) as caught:
        fxskip.transform(model, wanted)
    message = str(caught.value)
    assert type(caught.value) is kind
    assert "\n  hint   " in message, message
    return message


def test_a_rule_that_selects_no_block() -> None:
    wanted = spec(ATTENTION_RULE, {"blocks": "dense", "without": ["all@1"]})
    message = refusal(tiny("mixtral"), wanted, fxskip.PassError)

    assert "connect.1 selects no block" in message
    assert "moe in layers 0-2" in message  # what there is instead


def test_a_rule_that_drops_nothing() -> None:
    """Layers 0 and 1 of this model follow no MoE layer: layer 0 is the first and dense."""
    message = refusal(tiny("deepseek_v3"), spec(ATTENTION_RULE | {"layers": "0-1"}), fxskip.PassError)

    assert "connect.0 drops nothing" in message
    assert "routed@1" in message
    assert "layers 0-1" in message


@pytest.mark.parametrize("layers", ["1-3", [7], {"last": 9}])
def test_a_layer_out_of_range(layers: Any) -> None:
    message = refusal(tiny("mixtral"), spec(ATTENTION_RULE | {"layers": layers}), fxskip.SpecError)

    assert "0-2" in message  # the layers there are


def test_two_rules_for_one_block() -> None:
    """Only a model of three layers makes these two meet: layer 1 is among the first two and the last two."""
    twice = spec(ATTENTION_RULE | {"layers": {"first": 2}}, ATTENTION_RULE | {"layers": {"last": 2}})
    message = refusal(tiny("mixtral"), twice, fxskip.PassError)

    assert "connect.0 and connect.1" in message
    assert "model.layers.1.self_attn" in message


def test_a_model_without_moe() -> None:
    dense = tiny("llama", num_key_value_heads=2, head_dim=16)
    message = refusal(dense, FARSKIP.spec, fxskip.PassError)

    assert "LlamaForCausalLM has no routed experts" in message
    assert "dense (model.layers.0.mlp)" in message


def test_a_module_that_is_no_decoder() -> None:
    message = refusal(nn.Linear(4, 4), FARSKIP.spec, fxskip.CaptureError)

    assert "Linear" in message


@pytest.mark.parametrize(
    ("model_type", "overrides"),
    [
        ("gpt2", {}),  # learned positions, layers at transformer.h
        (
            "minimax",
            {"num_key_value_heads": 2, "head_dim": 16, "num_local_experts": 4},
        ),  # residual after the norm
    ],
)
def test_an_architecture_that_is_not_supported(model_type: str, overrides: dict[str, Any]) -> None:
    model = tiny(model_type, **overrides)
    with pytest.raises(fxskip.FxskipError) as caught:
        fxskip.transform(model, FARSKIP.spec)

    message = str(caught.value)
    assert "\n  hint   " in message
    assert any(name in message for name in ("transformer.h", type(model).__name__)), message


def test_a_model_that_is_already_transformed() -> None:
    student = fxskip.transform(tiny("mixtral"), FARSKIP.spec)
    message = refusal(student, spec(), fxskip.PassError)

    assert "rewired already, by the spec 'test'" in message
    assert "transform the original model" in message


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"schedule": {"overlap": "full"}}, "schedule"),
        ({"runtime": {"mode": "eager_wait"}}, "runtime.mode: eager_wait"),
        ({"runtime": {"transport": "nccl"}}, "runtime.transport: nccl"),
        ({"runtime": {"transport": "measured"}}, "runtime.transport: measured"),
    ],
)
def test_a_setting_that_one_process_has_no_use_for_is_not_ignored(fields: Spec, named: str) -> None:
    message = refusal(tiny("mixtral"), spec(ATTENTION_RULE, MLP_RULE, **fields), fxskip.PassError)

    assert f"nothing to do for {named}" in message


# --- the model that was given --------------------------------------------------------------------


def classes(model: nn.Module) -> dict[str, type]:
    return {name: type(module) for name, module in model.named_modules()}


Description = tuple[dict[str, type], dict[str, torch.Tensor], torch.Tensor]


def describe(model: PreTrainedModel) -> Description:
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    return classes(model), weights, logits(model, batch())


def assert_unchanged(model: PreTrainedModel, before: Description) -> None:
    assert classes(model) == before[0]
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[1][name]), name
    assert torch.equal(logits(model, batch()), before[2])


def test_the_original_is_left_alone() -> None:
    model = tiny("qwen2_moe", layers=2)
    before, config = describe(model), model.config.to_dict()
    student = fxskip.transform(model, FARSKIP.spec)
    with torch.no_grad():
        for parameter in student.parameters():
            parameter.zero_()
    logits(student, batch())

    assert_unchanged(model, before)
    assert model.config.to_dict() == config


@pytest.mark.parametrize("inplace", [False, True])
def test_a_refused_model_is_left_alone(inplace: bool) -> None:
    model = tiny("mixtral")
    before = describe(model)
    with pytest.raises(fxskip.PassError):
        fxskip.transform(model, spec({"blocks": "dense", "without": ["all@1"]}), inplace=inplace)

    assert_unchanged(model, before)
    assert not fxskip.is_transformed(model)


def test_a_spec_goes_from_a_student_to_another_model() -> None:
    """Defaults that were not written must not come back as wishes."""
    wanted = {**FARSKIP.spec, "runtime": {"recompute": "none"}, "parallel": {"expert": {"size": 1}}}
    student = fxskip.transform(tiny("mixtral"), wanted)

    again = fxskip.transform(tiny("mixtral", seed=1), fxskip.spec_of(student))

    assert fxskip.spec_of(again) == fxskip.spec_of(student)


@pytest.mark.parametrize(
    "section",
    [
        {"parallel": {"expert": {"size": 1, "exchange": "all_reduce"}}},
        {"schedule": {"overlap": "none", "solver": "cp_sat"}},
        {"schedule": {}},
    ],
    ids=str,
)
def test_an_option_that_would_do_nothing_is_refused(section: Any) -> None:
    assert "nothing to do for" in refusal(tiny("mixtral"), {**FARSKIP.spec, **section}, fxskip.PassError)


def test_several_processes_without_a_group() -> None:
    section = {"parallel": {"expert": {"size": 2}}}
    assert "no process group" in refusal(tiny("mixtral"), {**FARSKIP.spec, **section}, fxskip.PassError)


def test_what_no_stage_does_yet_is_refused() -> None:
    section = {"parallel": {"expert": {"size": 2}}, "runtime": {"lower": "inductor"}}
    assert "has no stage for" in refusal(tiny("mixtral"), {**FARSKIP.spec, **section}, fxskip.PassError)


def test_a_config_that_two_models_share() -> None:
    first = tiny("mixtral")
    second = type(first)(first.config)

    fxskip.transform(first, FARSKIP.spec, inplace=True)

    assert second.config.model_type == "mixtral"
    assert not hasattr(second.config, "fxskip")
