"""A saved student, loaded in another process, is the same model bit for bit."""

import pytest
import torch
from safetensors.torch import load_file

from tests.checkpoint.reload import realign
from tests.checkpoint.samples import rewired, run_module, save_stock
from tests.zoo import batch

# Experts that are renamed and merged while loading; a dense layer and a router bias; no conversion, tied embeddings.
SAMPLES = {
    "mixtral": ("mixtral", {}),
    "deepseek_v3": ("deepseek_v3", {"layers": 3}),
    "llama4_tied": ("llama4_text", {"tie_word_embeddings": True}),
}


@pytest.fixture(scope="module")
def students(tmp_path_factory):
    root = tmp_path_factory.mktemp("students")
    made = {}
    for name, (model_type, overrides) in SAMPLES.items():
        made[name] = rewired(save_stock(root / f"stock_{name}", model_type, **overrides))
        made[name].save_pretrained(root / name)
    made["bfloat16"] = rewired(root / "stock_mixtral").to(torch.bfloat16)
    made["bfloat16"].save_pretrained(root / "bfloat16")
    return root, made


@pytest.fixture(scope="module", params=["import", "remote"])
def reloaded(request, students, tmp_path_factory):
    root, made = students
    folders = [root / name for name in made]
    printed = run_module(
        "tests.checkpoint.reload", request.param, *folders, cache=tmp_path_factory.mktemp("cache")
    )
    return dict(zip(made, printed.splitlines(), strict=True))


@pytest.mark.parametrize("name", [*SAMPLES, "bfloat16"])
def test_logits_are_equal_in_another_process(students, reloaded, name):
    root, made = students
    model = made[name]
    kind, spec, dtype = reloaded[name].split()
    assert (kind, spec, dtype) == (type(model).__name__, "farskip", str(model.dtype))
    realign(model)
    with torch.no_grad():
        expected = model(**batch(padded=True)).logits
    assert torch.equal(load_file(root / name / "logits.safetensors")["logits"], expected)
