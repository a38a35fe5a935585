"""What a saved student leaves in its folder."""

import copy
import json
import pickle
import shutil

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, GenerationConfig

import fxskip
from tests.checkpoint.samples import rewired, save_stock, tree


def stored_keys(folder):
    with safe_open(folder / "model.safetensors", "pt") as file:
        return set(file.keys())


def weights_are_equal(model, other):
    one, two = model.state_dict(), other.state_dict()
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


def test_keys_are_those_of_the_original_in_memory_and_on_disk(stock, student, saved):
    assert list(student.state_dict()) == list(AutoModelForCausalLM.from_pretrained(stock).state_dict())
    assert stored_keys(saved) == stored_keys(stock)


def test_a_model_that_was_never_on_disk_is_saved_with_the_keys_of_the_original(stock, saved, tmp_path):
    AutoModelForCausalLM.from_config(AutoModelForCausalLM.from_pretrained(saved).config).save_pretrained(
        tmp_path / "built"
    )
    assert stored_keys(tmp_path / "built") == stored_keys(stock)


def test_load_and_save_again_gives_the_same_bytes(saved, tmp_path):
    AutoModelForCausalLM.from_pretrained(saved).save_pretrained(tmp_path / "again")
    assert tree(tmp_path / "again") == tree(saved)


def test_generation_config_is_kept(stock, saved):
    assert GenerationConfig.from_pretrained(saved).max_new_tokens == 7
    assert AutoModelForCausalLM.from_pretrained(saved).generation_config.max_new_tokens == 7


def test_what_else_the_folder_holds_is_kept(student, saved, tmp_path):
    folder = tmp_path / "run"
    (folder / "logs").mkdir(parents=True)
    (folder / "tokenizer.json").write_text("a tokenizer")
    log = (folder / "logs" / "events").open("w")
    student.save_pretrained(folder)
    with log:
        log.write("written after the save\n")  # the folder is another one by now; the file must not be

    extra = {"tokenizer.json": b"a tokenizer", "logs/events": b"written after the save\n"}
    assert tree(folder) == tree(saved) | extra


def test_shards_of_the_last_save_do_not_stay(student, saved, tmp_path):
    folder = tmp_path / "sharded"
    student.save_pretrained(folder, max_shard_size="100KB")
    many = sorted(folder.glob("model-*.safetensors"))
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert len(many) > 3
    assert set(index["weight_map"].values()) == {path.name for path in many}
    assert weights_are_equal(AutoModelForCausalLM.from_pretrained(folder), student)

    student.save_pretrained(folder, max_shard_size="300KB")
    few = sorted(folder.glob("model-*.safetensors"))
    assert 1 < len(few) < len(many)
    assert weights_are_equal(AutoModelForCausalLM.from_pretrained(folder), student)

    student.save_pretrained(folder)
    assert tree(folder) == tree(saved)


def test_bfloat16_stays(student, tmp_path):
    half = copy.deepcopy(student).to(torch.bfloat16)
    half.save_pretrained(tmp_path)
    assert {tensor.dtype for tensor in load_file(tmp_path / "model.safetensors").values()} == {torch.bfloat16}
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.dtype == torch.bfloat16
    assert weights_are_equal(loaded, half)


def test_tied_embeddings_stay_tied(tmp_path):
    stock = save_stock(tmp_path / "stock", "mixtral", tie_word_embeddings=True)
    model = rewired(stock)
    model.save_pretrained(tmp_path / "tied")
    assert stored_keys(tmp_path / "tied") == stored_keys(stock)
    for tied in (model, AutoModelForCausalLM.from_pretrained(tmp_path / "tied")):
        assert tied.lm_head.weight is tied.model.embed_tokens.weight


def test_config_can_be_shown_copied_and_pickled(student):
    config = student.config
    assert repr(config).startswith("FxSkipMixtralConfig {")
    assert config.fxskip["wiring_hash"] in repr(config)
    for twin in (copy.deepcopy(config), pickle.loads(pickle.dumps(config))):
        assert type(twin) is type(config)
        assert twin.to_json_string() == config.to_json_string()


def test_the_spec_travels_inside(saved):
    loaded = AutoModelForCausalLM.from_pretrained(saved)
    assert fxskip.spec_of(loaded) == fxskip.load_spec("farskip")
    record = json.loads((saved / "config.json").read_text())["fxskip"]
    assert (
        fxskip.explain(loaded).wiring_hash == record["wiring_hash"]
    )  # the layers, captured anew, are wired like that


def test_a_link_to_a_folder_stays_a_link(student, saved, tmp_path):
    shutil.copytree(saved, tmp_path / "run7")
    (tmp_path / "run7" / "config.json").write_text("{}")
    (tmp_path / "latest").symlink_to("run7")
    student.save_pretrained(tmp_path / "latest")
    assert (tmp_path / "latest").is_symlink()
    assert tree(tmp_path / "run7") == tree(saved)


def test_the_current_folder_is_refused(student, tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with pytest.raises(fxskip.CheckpointError, match="cannot be replaced"):
        student.save_pretrained(".")
    assert tree(tmp_path) == {}
