"""A run that is killed and started again is the run that was never interrupted, bit for bit."""

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fxskip.distill import distill
from fxskip.errors import CheckpointError
from tests.distill.killed_runs import CONFIG, MOMENTS, pair, run
from tests.distill.tiny import differing, weights, windows

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="SIGKILL and fork")


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("killed")
    command = [sys.executable, "-m", "tests.distill.killed_runs", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, timeout=120)
    return folder


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    result, student = run(tmp_path_factory.mktemp("unbroken"))
    return result, weights(student)


def step_of_checkpoint(folder):
    return torch.load(folder / "checkpoint.pt", weights_only=True)["state"]["step"]


@pytest.mark.parametrize(("moment", "saved_step"), list(zip(MOMENTS, [3, 3, 9], strict=True)))
def test_a_killed_run_continues_to_the_same_bits(killed, unbroken, moment, saved_step):
    folder = killed / moment
    assert step_of_checkpoint(folder) == saved_step  # whole, also when the kill fell into the next save
    assert (folder / "checkpoint.pt.writing").exists() == (moment == "while_saving_step_6")
    assert not (folder / "results.json").exists()

    result, student = run(folder)

    expected, expected_weights = unbroken
    assert not differing(expected_weights, weights(student))
    ignored = {"wall_seconds": 0.0, "out": None}
    assert replace(result, **ignored) == replace(expected, **ignored)
    kept = json.loads((folder / "results.json").read_text())
    assert kept["curve"] == json.loads(expected.to_json())["curve"]
    assert kept["config"]["steps"] == 9
    assert sorted(path.name for path in folder.iterdir()) == [
        "checkpoint.pt",
        "curves.png",
        "results.json",
        "run.json",
    ]


@pytest.fixture
def finished(unbroken, tmp_path):
    return shutil.copytree(unbroken[0].out, tmp_path / "run")


def test_a_finished_run_is_read_and_not_run_again(unbroken, finished):
    before = {path.name: path.read_bytes() for path in finished.iterdir()}
    result, student = run(finished)
    assert result == replace(unbroken[0], out=finished)
    assert not differing(unbroken[1], weights(student))
    assert {path.name: path.read_bytes() for path in finished.iterdir()} == before
    assert before["curves.png"].startswith(b"\x89PNG")


def start(out, *, config=None, data=None, eval_data=None, student=None, teacher=None):
    own_student, own_teacher = pair()
    distill(
        own_student if student is None else student,
        windows(7) if data is None else data,
        teacher=own_teacher if teacher is None else teacher,
        config=CONFIG | (config or {}),
        out=out,
        eval_data=windows(seed=3) if eval_data is None else eval_data,
        progress=False,
    )


def moved(model):
    with torch.no_grad():
        model.lm_head.weight[0, 0] += 1e-3
    return model


def rewired(model):
    """The same weights in another computation."""
    model.model.layers[1].self_attn.register_forward_hook(
        lambda m, a, out: (torch.zeros_like(out[0]), *out[1:])
    )
    return model


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda: {"config": {"seed": 1, "steps": 10}},
            r"config.seed: 0 there, 1 now\s+config.steps: 9 there, 10 now",
        ),
        (lambda: {"data": windows(8)}, r"\n +data: \w+… there, \w+… now"),
        (lambda: {"eval_data": windows(8)}, r"eval_data: \w+… there, \w+… now"),
        (lambda: {"student": moved(pair()[0])}, r"student.weights: "),
        (lambda: {"student": rewired(pair()[0])}, r"student.output: "),
        (lambda: {"teacher": moved(pair()[1])}, r"teacher.weights: "),
    ],
    ids=["config", "data", "eval_data", "student", "wiring", "teacher"],
)
def test_another_run_in_the_same_folder_is_refused(finished, change, message):
    before = {path.name: path.read_bytes() for path in finished.iterdir()}
    with pytest.raises(CheckpointError, match=message) as error:
        start(finished, **change())
    assert "belongs to another run" in str(error.value)
    assert {path.name: path.read_bytes() for path in finished.iterdir()} == before


def test_a_damaged_folder_is_named_and_not_repaired(finished):
    checkpoint = finished / "checkpoint.pt"
    checkpoint.write_bytes(checkpoint.read_bytes()[:1000])
    with pytest.raises(CheckpointError, match=r"checkpoint.pt cannot be read"):
        start(finished)
    checkpoint.unlink()
    with pytest.raises(CheckpointError, match=r"its weights \(checkpoint.pt\) are missing"):
        start(finished)
    (finished / "run.json").unlink()
    with pytest.raises(CheckpointError, match=r"no run.json"):
        start(finished)
    with pytest.raises(CheckpointError, match="is a file"):
        start(finished / "results.json")
