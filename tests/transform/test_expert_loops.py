"""Experts that transformers runs in a loop whose course depends on values: the loop runs as it is."""

from pathlib import Path

import pytest
import torch

import fxskip
from fxskip.checkpoint.family import record_of
from tests.ecosystem.architectures import tiny as tiny_of_any_type
from tests.transform.compare import assert_same_logits, assert_same_training
from tests.transform.wirings import FARSKIP
from tests.zoo import batch, tiny


@pytest.mark.parametrize("model_type", ["qwen2_moe", pytest.param("deepseek_v3", marks=pytest.mark.slow)])
def test_a_loop_over_experts(model_type: str, tmp_path: Path) -> None:
    model = tiny(model_type)
    model.set_experts_implementation("eager")
    student = fxskip.transform(model, FARSKIP.spec)
    record = record_of(student)

    assert record is not None
    moe_layers = range(1 if model_type == "deepseek_v3" else 0, 3)
    assert record.leaves == tuple(f"model.layers.{i}.mlp.experts" for i in moe_layers)
    for shape in ((3, 17), (2, 5)):
        assert_same_training(student, FARSKIP.reference(model), batch(*shape, padded=True))

    student.save_pretrained(tmp_path / "student")
    loaded = type(student).from_pretrained(tmp_path / "student", experts_implementation="eager")
    assert_same_logits(loaded, student, batch())


@pytest.mark.slow
def test_longcat_flash() -> None:
    """A loop over experts, a MoE that is added half a layer later, and two attentions a layer, each with its cache."""
    model = tiny_of_any_type("longcat_flash")
    student = fxskip.transform(model, "identity")
    assert_same_training(student, model, batch())

    prompt = batch()["input_ids"]
    tokens = [m.generate(prompt, max_new_tokens=4, do_sample=False) for m in (student, model)]
    assert torch.equal(*tokens)
    assert fxskip.plan(model, "farskip").rewired == 5
