"""LoRA by PEFT, put on before or after the transform, trains as on the original."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import fxskip
from tests.training_loop.loops import assert_same_weights, sgd_steps
from tests.transform.compare import assert_same_logits, assert_same_training
from tests.transform.wirings import FARSKIP
from tests.zoo import batch, tiny

peft = pytest.importorskip("peft")


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny("qwen2_moe", layers=2)


def with_adapters(model: PreTrainedModel, **fields: Any) -> Any:
    """A copy with adapters that already do something: LoRA's own start leaves the model as it is."""
    torch.manual_seed(11)
    config = peft.LoraConfig(
        r=4,
        **{"target_modules": ["q_proj", "v_proj", "gate_proj"], "init_lora_weights": False, **fields},
        task_type="CAUSAL_LM",
    )
    return peft.get_peft_model(copy.deepcopy(model), config)


@pytest.mark.parametrize("spec", [pytest.param("identity", marks=pytest.mark.slow), "farskip"])
def test_adapters_after_the_transform(model: PreTrainedModel, spec: str) -> None:
    original = model if spec == "identity" else FARSKIP.reference(model)
    student, expected = with_adapters(fxskip.transform(model, spec)), with_adapters(original)

    assert_same_training(student, expected, batch(padded=True))
    for one in (student, expected):
        sgd_steps(one, [[batch(seed=step)] for step in range(2)])
    assert_same_weights(student, expected)
    assert fxskip.is_transformed(student)
    # Adapters are parameters and products of the sub-blocks that they are in.
    assert str(fxskip.explain(student)) == str(fxskip.plan(with_adapters(model), spec))


@pytest.mark.parametrize("inplace", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_peft_model_is_transformed(model: PreTrainedModel, inplace: bool) -> None:
    adapted = with_adapters(model)
    expected = FARSKIP.reference(copy.deepcopy(adapted).get_base_model())
    stock = copy.deepcopy(adapted)
    student = fxskip.transform(adapted, FARSKIP.spec, inplace=inplace)

    assert isinstance(student, peft.PeftModel) and (student is adapted) == inplace
    assert_same_training(student.get_base_model(), expected, batch(padded=True))
    assert student.config.model_type == "fxskip_qwen2_moe"
    if not inplace:
        assert_same_logits(adapted, stock, batch())
        assert not fxskip.is_transformed(adapted)


@pytest.mark.slow
def test_the_model_inside_is_transformed(model: PreTrainedModel) -> None:
    adapted = with_adapters(model)
    expected = FARSKIP.reference(copy.deepcopy(adapted).get_base_model())
    assert_same_training(fxskip.transform(adapted.base_model.model, FARSKIP.spec), expected, batch())


@pytest.mark.slow
def test_merged_adapters(model: PreTrainedModel) -> None:
    student, expected = with_adapters(fxskip.transform(model, "identity")), with_adapters(model)
    merged, want = student.merge_and_unload(), expected.merge_and_unload()

    assert fxskip.is_transformed(merged) and not isinstance(merged, peft.PeftModel)
    assert_same_weights(merged, want)
    assert_same_logits(merged, want, batch())


@pytest.mark.slow
def test_adapters_are_saved_and_loaded(model: PreTrainedModel, tmp_path: Path) -> None:
    student = with_adapters(fxskip.transform(model, FARSKIP.spec))
    student.save_pretrained(tmp_path)
    loaded = peft.PeftModel.from_pretrained(fxskip.transform(model, FARSKIP.spec), tmp_path)

    assert_same_logits(loaded, student, batch(padded=True))


@pytest.mark.slow
def test_switched_off_adapters(model: PreTrainedModel) -> None:
    plain = fxskip.transform(model, FARSKIP.spec)
    student = with_adapters(plain)
    assert not torch.equal(*(m(**batch()).logits for m in (student, plain)))
    with student.disable_adapter():
        assert_same_logits(student, plain, batch())


@pytest.mark.slow
def test_adapters_and_checkpointing(model: PreTrainedModel) -> None:
    """Frozen embeddings: without `enable_input_require_grads` no layer's input would need a gradient."""
    runtime = {"runtime": {"recompute": "layer"}}
    student = with_adapters(fxskip.transform(model, {**FARSKIP.spec, **runtime}), lora_dropout=0.4).train()
    expected = with_adapters(FARSKIP.reference(model), lora_dropout=0.4).train()
    for one in (student, expected):
        torch.manual_seed(3)
        sgd_steps(one, [[{**batch(seed=step), "use_cache": False}] for step in range(2)])
    assert_same_weights(student, expected)


# --- what trains ---------------------------------------------------------------------------------


def test_which_parameters_train_is_reported(model: PreTrainedModel) -> None:
    student = with_adapters(fxskip.transform(model, "farskip"), target_modules=["q_proj"])
    report = fxskip.trainable(student)

    counts = {name: p.numel() for name, p in student.named_parameters() if p.requires_grad}
    assert report.parameters == sum(counts.values()) > 0
    assert [block.name for block in report.blocks] == [
        "0.self_attn (attention)", "0.mlp (moe)", "1.self_attn (attention)", "1.mlp (moe)", "elsewhere"
    ]  # fmt: skip
    assert report.blocks[0].parameters == ("q_proj.lora_A.default.weight", "q_proj.lora_B.default.weight")
    assert report.blocks[1].trainable == 0
    everything = sum(p.numel() for p in student.parameters())
    assert sum(block.trainable + block.frozen for block in report.blocks) == everything
    assert report.frozen_experts == tuple(
        f"model.layers.{layer}.mlp.experts.{name}"
        for layer in range(2)
        for name in ("gate_up_proj", "down_proj")
    )
    assert "4 fused expert parameters stay frozen" in str(report)


def test_a_report_without_adapters(model: PreTrainedModel) -> None:
    student = fxskip.transform(model, "farskip")
    assert fxskip.trainable(student).frozen_experts == ()
    assert fxskip.trainable(student).parameters == sum(p.numel() for p in student.parameters())
    with pytest.raises(fxskip.PassError, match="trainable: .* was not rewired by fxskip"):
        fxskip.trainable(model)


def test_adapters_on_fused_experts_are_refused(model: PreTrainedModel) -> None:
    """PEFT's way for bare parameters changes the weights by a parametrisation while the experts run."""
    fields: dict[str, Any] = {"target_modules": ["q_proj"], "target_parameters": ["experts.down_proj"]}
    student = with_adapters(fxskip.transform(model, FARSKIP.spec), **fields)
    with pytest.raises(fxskip.CaptureError, match=r"target_parameters[\s\S]*requires_grad_\(True\)"):
        student(**batch())
