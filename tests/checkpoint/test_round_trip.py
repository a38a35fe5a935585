"""A saved student, loaded in another process, is the same model bit for bit."""

import copy

import pytest
import torch
from safetensors.torch import load_file

from tests.checkpoint.reload import realign
from tests.checkpoint.samples import rewired, run_module, save_stock
from tests.zoo import batch


def logits(model):
    twin = copy.deepcopy(model)
    realign(twin)
    with torch.no_grad():
        return twin(**batch(padded=True)).logits


@pytest.mark.parametrize("mode", ["import", "remote"])
def test_logits_are_equal_in_another_process(student, saved, tmp_path, mode):
    printed = run_module("tests.checkpoint.reload", mode, tmp_path, saved, cache=tmp_path / "cache")
    assert printed.split() == ["FxSkipMixtralForCausalLM", "farskip", "torch.float32"]
    assert torch.equal(load_file(tmp_path / "student.safetensors")["logits"], logits(student))


@pytest.mark.slow
def test_logits_of_other_architectures_and_types(tmp_path):
    """A dense layer and a router bias; no conversion while loading and tied embeddings; weights in bfloat16."""
    deepseek = save_stock(tmp_path / "stock_deepseek", "deepseek_v3", layers=3)
    llama = save_stock(tmp_path / "stock_llama", "llama4_text", tie_word_embeddings=True)
    mixtral = save_stock(tmp_path / "stock_mixtral", "mixtral")
    models = {
        "deepseek": rewired(deepseek),
        "llama": rewired(llama),
        # Loaded as bfloat16, not made so afterwards: that would also round buffers that are not saved.
        "bfloat16": rewired(mixtral, dtype=torch.bfloat16),
    }
    for name, model in models.items():
        model.save_pretrained(tmp_path / name)
    folders = [tmp_path / name for name in models]
    printed = run_module("tests.checkpoint.reload", "import", tmp_path, *folders, cache=tmp_path / "cache")
    assert printed.split("\n")[2] == "FxSkipMixtralForCausalLM farskip torch.bfloat16"
    for name, model in models.items():
        assert torch.equal(load_file(tmp_path / f"{name}.safetensors")["logits"], logits(model)), name
