"""What the doctor says of folders that are not damaged, and how it says it. Damages: see test_tampering."""

import json
import shutil

import pytest
import transformers
from safetensors.torch import load_file, save_file

import fxskip
from fxskip.checkpoint.doctor import examine, kind_of
from tests.checkpoint.samples import rewired, save_stock


def status(diagnosis):
    return {check.name: check.status for check in diagnosis.checks}


def test_an_intact_student(saved):
    diagnosis = examine(saved, values=True)
    assert (diagnosis.kind, diagnosis.base_model_type, diagnosis.is_intact) == ("rewired", "mixtral", True)
    assert diagnosis.spec == fxskip.load_spec("farskip").to_dict()
    assert (
        diagnosis.saved_with["transformers"]
        == diagnosis.installed["transformers"]
        == transformers.__version__
    )
    assert set(status(diagnosis).values()) == {"ok"}
    assert len(diagnosis.checks) == 12
    assert str(diagnosis).startswith(f"{saved}: mixtral, rewired by the spec 'farskip', intact")
    assert "without: [routed@1]" in str(diagnosis)


def test_an_intact_original(stock):
    diagnosis = examine(stock, values=True)
    assert (diagnosis.kind, diagnosis.base_model_type, diagnosis.is_intact) == ("stock", "mixtral", True)
    assert diagnosis.spec is None
    assert status(diagnosis) == dict.fromkeys(("config", "model type", "weight files", "values"), "ok")


def test_a_folder_that_holds_something_else(tmp_path):
    assert kind_of(tmp_path) == examine(tmp_path).kind == "neither"
    (tmp_path / "config.json").write_text('{"model_type": "spreadsheet"}')
    diagnosis = examine(tmp_path)
    assert (kind_of(tmp_path), diagnosis.kind, diagnosis.is_intact) == ("neither", "neither", False)
    assert "'spreadsheet'" in str(diagnosis)


def test_no_folder_is_an_error(tmp_path):
    with pytest.raises(fxskip.CheckpointError, match="is no folder"):
        examine(tmp_path / "missing")


def test_json_has_everything(saved):
    diagnosis = examine(saved)
    values = json.loads(diagnosis.to_json())
    assert values["is_intact"] is True
    assert values["kind"] == "rewired"
    assert values["checks"][-1] == {
        "name": "values",
        "status": "skipped",
        "found": "not asked for; fxskip doctor --values reads them",
        "remedy": "",
    }
    assert len(values["checks"]) == len(diagnosis.checks)


@pytest.mark.parametrize("bad", [float("nan"), float("-inf")])
def test_values_that_are_not_finite(saved, tmp_path, bad):
    folder = tmp_path / "diverged"
    shutil.copytree(saved, folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"][-1] = bad
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    assert examine(folder).is_intact  # names and shapes are right
    check = examine(folder, values=True).checks[-1]
    assert (check.status, check.found) == ("FAIL", "infinite or NaN: model.norm.weight")


def test_tied_weights(tmp_path):
    stock = save_stock(tmp_path / "stock", "mixtral", tie_word_embeddings=True)
    folder = tmp_path / "tied"
    rewired(stock).save_pretrained(folder)
    (check,) = (check for check in examine(folder).checks if check.name == "tied weights")
    assert (check.status, check.found) == ("ok", "lm_head.weight is model.embed_tokens.weight")

    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    assert examine(folder).is_intact  # twice the same is allowed

    tensors["lm_head.weight"][-1, -1] += 1
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    assert status(examine(folder))["tied weights"] == "FAIL"


@pytest.mark.parametrize("options", [{"max_shard_size": "100KB"}, {"save_original_format": False}])
def test_other_ways_to_save_are_intact_too(student, tmp_path, options):
    student.save_pretrained(tmp_path / "other", **options)
    assert examine(tmp_path / "other", values=True).is_intact


def test_shards_that_are_not_those_of_the_index(student, tmp_path):
    folder = tmp_path / "sharded"
    student.save_pretrained(folder, max_shard_size="100KB")
    shards = sorted(folder.glob("model-*.safetensors"))
    first, second = shards[0].read_bytes(), shards[1].read_bytes()

    shards[0].unlink()
    assert f"lacks {shards[0].name}" in str(examine(folder))
    shards[0].write_bytes(second)
    shards[1].write_bytes(first)
    assert "in model.safetensors.index.json, really" in str(examine(folder))
