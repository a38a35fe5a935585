"""fxskip convert"""

import json
import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import fxskip
from fxskip.checkpoint.doctor import examine
from tests.checkpoint.samples import ROOT, edited, tree
from tests.cli.command import run


def weights(folder):
    return load_file(folder / "model.safetensors")


def assert_same(one, other):
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_the_student_has_the_weights_and_the_tokenizer_of_the_original(original, converted):
    diagnosis = examine(converted, values=True)
    assert diagnosis.is_intact and diagnosis.kind == "rewired"
    assert diagnosis.spec == fxskip.load_spec("farskip").to_dict()
    assert_same(weights(converted), weights(original))
    before, after = tree(original), tree(converted)
    assert all(after[name] == before[name] for name in ("tokenizer.json", "tokenizer_config.json"))
    assert json.loads(after["generation_config.json"])["max_new_tokens"] == 7
    assert set(after) == {*before, "modeling_fxskip.py"}


def saved_hash(folder):
    return json.loads((folder / "config.json").read_text())["fxskip"]["wiring_hash"]


def test_stored_type_is_kept_whatever_the_config_says(original, tmp_path):
    model = edited(original, tmp_path / "float32", lambda config: config.update(dtype="bfloat16"))
    assert run("convert", model, "farskip", tmp_path / "out") == 0
    assert_same(weights(tmp_path / "out"), weights(original))

    assert run("convert", model, "farskip", tmp_path / "out", "--dtype", "bfloat16") == 0
    rounded = {name: tensor.to(torch.bfloat16) for name, tensor in weights(original).items()}
    assert_same(weights(tmp_path / "out"), rounded)
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").dtype == torch.bfloat16


def refused(capsys, code, message, *arguments):
    assert run("convert", *arguments) == code
    out, err = capsys.readouterr()
    assert out == "" and message in err and "Traceback" not in err


def test_out_must_not_be_the_original_nor_hold_it(capsys, original):
    before = tree(original)
    for out in (original, original.parent, original / ".." / original.name):
        refused(capsys, 4, "would be written over", original, "farskip", out, "--overwrite")
    assert tree(original) == before


def test_out_with_something_else_needs_overwrite(capsys, original, tmp_path):
    (tmp_path / "thesis.txt").write_text("years of work")
    refused(capsys, 4, "is not a rewired model", original, "farskip", tmp_path)
    assert tree(tmp_path) == {"thesis.txt": b"years of work"}
    assert run("convert", original, "farskip", tmp_path, "--overwrite", "--json") == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["wiring_hash"] == saved_hash(tmp_path)
    assert err.endswith(f"saved: {tmp_path}\n")
    assert examine(tmp_path).is_intact
    assert (tmp_path / "thesis.txt").read_text() == "years of work"


def test_out_with_another_tokenizer(capsys, original, converted, tmp_path):
    out = tmp_path / "out"
    shutil.copytree(converted, out)
    (out / "vocab.json").write_text("{}")
    refused(capsys, 4, "another tokenizer: vocab.json", original, "farskip", out)


def test_file_as_out(capsys, original, tmp_path):
    (tmp_path / "out").write_text("")
    refused(capsys, 4, "is a file", original, "farskip", tmp_path / "out", "--overwrite")


def test_rewired_model(capsys, converted, tmp_path):
    refused(capsys, 3, "rewired already", converted, "farskip", tmp_path / "out")


def test_missing_weights_are_not_made_up(capsys, original, tmp_path):
    model = tmp_path / "model"
    shutil.copytree(original, model)
    tensors = weights(model)
    tensors.pop("model.norm.weight")
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    refused(capsys, 4, "1 weights are missing: model.norm.weight", model, "farskip", tmp_path / "out")
    (model / "model.safetensors").unlink()
    refused(capsys, 4, "cannot be loaded", model, "farskip", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_quantized_model(capsys, original, tmp_path):
    quantized = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    model = edited(original, tmp_path / "fp8", lambda config: config.update(quantization_config=quantized))
    refused(capsys, 3, "quantized", model, "farskip", tmp_path / "out")


@pytest.mark.skipif(sys.platform == "win32", reason="SIGKILL")
def test_killed_while_it_writes(original, converted, tmp_path):
    """One kill from outside; tests/checkpoint/test_kill.py goes through all moments of the write."""
    out = tmp_path / "out"
    shutil.copytree(converted, out)
    command = [sys.executable, "-m", "fxskip", "convert", str(original), "ladder", str(out)]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 300
    while not list(tmp_path.glob(".out.saving-*")):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.0005)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL

    assert examine(out).is_intact
    assert tree(out) == tree(converted) or saved_hash(out) != saved_hash(converted)
    assert run("convert", original, "ladder", out) == 0
    assert examine(out, values=True).is_intact
    assert examine(out).spec == fxskip.load_spec("ladder").to_dict()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
