"""Model types that share a model class, and models that read images: saved, loaded, examined, refused."""

import json
import pickle

import pytest
import torch
import transformers

import fxskip
from fxskip.checkpoint.doctor import examine
from tests.checkpoint.samples import edited
from tests.ecosystem.architectures import auto_class, tiny
from tests.zoo import batch

# The Auto class that loads it, and classes of transformers that read the same config.json or its text part.
STOCK_CLASSES = {
    "sarvam_moe": ("AutoModelForCausalLM", ("Glm4MoeForCausalLM", "SarvamMoEConfig")),
    "qwen3_vl_moe": (
        "AutoModelForImageTextToText",
        ("Qwen3VLMoeForConditionalGeneration", "Qwen3VLMoeTextModel", "Qwen3VLMoeTextConfig"),
    ),
}


@pytest.fixture(scope="module", params=STOCK_CLASSES)
def case(request, tmp_path_factory):
    """A model type, its student and the folder with the saved student. Do not change them."""
    student = fxskip.transform(tiny(request.param), "farskip", inplace=True)
    folder = tmp_path_factory.mktemp(request.param) / "student"
    student.save_pretrained(folder)
    return request.param, student, folder


def logits(model):
    with torch.no_grad():
        return model(input_ids=batch()["input_ids"], use_cache=False).logits


def test_it_loads_as_it_was_saved(case):
    model_type, student, folder = case
    assert auto_class(model_type).__name__ == STOCK_CLASSES[model_type][0]
    loaded = auto_class(model_type).from_pretrained(folder)
    assert type(loaded) is type(student) and type(loaded.config) is type(student.config)
    assert loaded.config.model_type == f"fxskip_{model_type}"
    assert fxskip.spec_of(loaded).name == "farskip"
    assert torch.equal(logits(loaded), logits(student))


def test_it_can_be_pickled(case):
    _, student, _ = case
    twin = pickle.loads(pickle.dumps(student))
    assert type(twin) is type(student) and type(twin.config) is type(student.config)
    assert torch.equal(logits(twin), logits(student))


def test_the_doctor_finds_it_intact(case):
    report = examine(case[2], values=True)
    assert report.is_intact and report.kind == "rewired", report


@pytest.mark.parametrize("repaired", [False, True])
def test_no_class_of_transformers_loads_it(case, repaired, tmp_path):
    """Nor where somebody has written the original's model_type into it.

    The text model reads the text part of the config alone: that part refuses too.
    """
    model_type, _, folder = case
    values = {"model_type": model_type} if repaired else {}
    copy = edited(folder, tmp_path / "copy", lambda config: config.update(values))
    for name in STOCK_CLASSES[model_type][1]:
        with pytest.raises(ValueError, match="pip install fxskip"):
            getattr(transformers, name).from_pretrained(copy)


def test_the_doctor_sees_a_text_part_that_no_longer_refuses(tmp_path):
    student = fxskip.transform(tiny("qwen3_vl_moe", num_hidden_layers=1), "identity", inplace=True)
    student.save_pretrained(tmp_path / "student")
    copy = edited(tmp_path / "student", tmp_path / "copy", lambda c: c["text_config"].pop("id2label"))
    assert examine(tmp_path / "student").is_intact
    assert "text_config.id2label is None" in str(examine(copy))


def test_remote_code_is_named_for_each_auto_class_that_loads_it(case):
    model_type, _, folder = case
    named = set(json.loads((folder / "config.json").read_text())["auto_map"])
    others = {"AutoModelForMultimodalLM"} if model_type == "qwen3_vl_moe" else set()
    assert named == {"AutoConfig", STOCK_CLASSES[model_type][0]} | others


def test_a_class_of_ones_own_is_not_saved_under_the_name_of_another(tmp_path):
    class Mine(transformers.MixtralForCausalLM):
        pass

    model = tiny("mixtral", num_hidden_layers=1)
    model.__class__ = Mine
    student = fxskip.transform(model, "identity", inplace=True)
    with pytest.raises(fxskip.CheckpointError, match="Mine is not what MixtralConfig loads"):
        student.save_pretrained(tmp_path)
    assert not list(tmp_path.iterdir())
