"""fxskip distill; the training itself is tested in tests/distill."""

import json
import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from fxskip.checkpoint.doctor import examine
from fxskip.distill.config import load_config
from tests.checkpoint.samples import ROOT, tree
from tests.cli.command import run

RECIPE = "steps: 4\nbatch_size: 2\nlearning_rate: 0.002\neval_every: 4\nsave_every: 1\n"


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    file = tmp_path_factory.mktemp("recipe") / "short.yaml"
    file.write_text(RECIPE)
    return file


@pytest.fixture(scope="module")
def arguments(original, converted, text, recipe):
    options = ["--teacher", original, "--data", text, "--eval-data", text, "--config", recipe, "--length", 32]
    return ["distill", converted, *options]


@pytest.fixture(scope="module")
def finished(arguments, tmp_path_factory):
    out = tmp_path_factory.mktemp("finished") / "run"
    assert run(*arguments, "--out", out) == 0
    return out


def test_it_trains_a_copy_towards_the_original(original, converted, finished):
    results = json.loads((finished / "results.json").read_text())
    first, last = (point["metrics"] for point in results["evaluations"])
    assert results["steps"] == 4 and last["kl"] < first["kl"]
    assert examine(finished / "model", values=True).is_intact
    assert set(tree(finished / "model")) == set(tree(converted))
    trained, before = (load_file(folder / "model.safetensors") for folder in (finished / "model", converted))
    assert trained.keys() == before.keys()
    assert not torch.equal(trained["model.norm.weight"], before["model.norm.weight"])


def test_what_was_saved_is_what_was_measured(capsys, original, finished, text):
    expected = json.loads((finished / "results.json").read_text())["metrics"]
    options = ["--teacher", original, "--data", text, "--length", 32, "--json"]
    assert run("eval", finished / "model", *options) == 0
    found = json.loads(capsys.readouterr().out)
    assert {name: found[name] for name in expected} == pytest.approx(expected, abs=1e-5)


def test_a_finished_run_is_reported_again_and_its_model_written_again(capsys, arguments, finished):
    before = tree(finished)
    shutil.rmtree(finished / "model")
    assert run(*arguments, "--out", finished, "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["steps"], report["model"]) == (4, str(finished / "model"))
    assert "curve" not in report and len(report["evaluations"]) == 2
    assert tree(finished) == before


@pytest.mark.skipif(sys.platform == "win32", reason="SIGKILL")
def test_killed_and_started_again_it_ends_with_the_same_model(arguments, finished, tmp_path):
    out = tmp_path / "run"
    command = [sys.executable, "-m", "fxskip", *map(str, arguments), "--out", str(out)]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 300
    while not (out / "checkpoint.pt").exists():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.0005)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert not (out / "results.json").exists()

    assert run(*arguments, "--out", out) == 0
    assert tree(out / "model") == tree(finished / "model")


def test_weights_are_stored_in_the_type_of_the_student(original, text, recipe, tmp_path):
    student = tmp_path / "bfloat16"
    assert run("convert", original, "farskip", student, "--dtype", "bfloat16") == 0
    options = ["--teacher", original, "--data", text, "--config", recipe, "--length", 32]
    assert run("distill", student, *options, "--out", tmp_path / "run") == 0
    found = load_file(tmp_path / "run" / "model" / "model.safetensors")
    assert {tensor.dtype for tensor in found.values()} == {torch.bfloat16}
    kept = torch.load(tmp_path / "run" / "checkpoint.pt", weights_only=True)["trained"]
    assert torch.equal(found["lm_head.weight"], kept["lm_head.weight"].to(torch.bfloat16))
    assert kept["lm_head.weight"].dtype == torch.float32
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model").dtype == torch.bfloat16


def test_recipes_have_names():
    assert load_config("sft").objective == "cross_entropy"
    assert load_config("fcsd") == load_config(None)


def refused(capsys, code, message, *arguments):
    assert run("distill", *arguments) == code
    out, err = capsys.readouterr()
    assert out == "" and message in err and "Traceback" not in err


def test_refusals(capsys, original, converted, text, recipe, tmp_path):
    data = ["--data", text, "--out", tmp_path / "run"]
    refused(capsys, 4, "holds a stock model", original, "--teacher", original, *data)
    refused(
        capsys, 2, "the recipes are fcsd, sft", converted, "--teacher", original, *data, "--config", "fscd"
    )
    bad = tmp_path / "bad.yaml"
    bad.write_text("stepps: 3\n")
    refused(capsys, 2, "did you mean 'steps'", converted, "--teacher", original, *data, "--config", bad)
    assert not (tmp_path / "run").exists()


def test_the_student_is_not_overwritten(capsys, original, converted, text, tmp_path):
    shutil.copytree(converted, tmp_path / "model")
    options = ["--teacher", original, "--data", text, "--out", tmp_path]
    refused(capsys, 4, "would be written over", tmp_path / "model", *options)


def test_the_folder_of_another_run(capsys, arguments, finished, text):
    refused(capsys, 4, "belongs to another run", *arguments[1:], "--data", text, "--out", finished)
