"""fxskip bench: that every part runs, at tiny sizes. What it measures needs a GPU and is no test."""

import json
from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from fxskip.bench import loss, loss_sweep
from fxskip.bench.loss import PARTS
from fxskip.bench.loss_goals import ONE_GPU
from fxskip.bench.loss_inputs import draw_inputs, four_products, three_products, tiny
from fxskip.bench.measure import failures, measure, require_no_failures
from fxskip.errors import FxskipError
from fxskip.loss import implementation
from fxskip.loss.tails import TAILS
from tests.cli.command import run
from tests.loss.implementations import has_triton

NEEDS_TRITON = pytest.mark.skipif(not has_triton(), reason="triton is not installed")
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")


def assert_nothing_failed(report):
    assert list(failures(report)) == []
    assert report["tiny"] is True
    assert report["sources_sha256"]
    assert "liger-kernel" in report


def one_tuning_each(monkeypatch):
    for tunings in ("SUPPORT_TUNINGS", "ROW_TUNINGS", "PAIR_TUNINGS"):
        monkeypatch.setattr(loss_sweep, tunings, getattr(loss_sweep, tunings)[:1])


@NEEDS_TRITON
def test_tiny_parts(monkeypatch, tmp_path):
    one_tuning_each(monkeypatch)
    out = tmp_path / "loss.json"
    parts = ["sweep", "v32000-4k"]
    assert run("bench", "loss", "--tiny", *(f"--part={part}" for part in parts), "--out", out) == 0
    report = json.loads(out.read_text())
    assert_nothing_failed(report)
    assert [name for name in PARTS if name in report] == parts
    assert len(report["sweep"]["one chunk, V=65536"]) == 4
    variants = report["v32000-4k"]["times"]["variants"]
    for name in ("three products", "dense_sparse_kl", "sparse_kl"):
        assert variants[name]["median_ms"] > 0
        assert len(variants[name]["samples_ms"]) == 1


@NEEDS_TRITON
@pytest.mark.slow
def test_all_tiny_parts(monkeypatch, tmp_path):
    one_tuning_each(monkeypatch)
    out = tmp_path / "loss.json"
    assert run("bench", "loss", "--tiny", "--out", out) == 0
    report = json.loads(out.read_text())
    assert_nothing_failed(report)
    assert all(part in report for part in PARTS)
    rows = {row["case"]: row for row in report["errors"]}
    kinds = ("far", "all options", "peaked", "flat", "near", "near, float32 logits", "equal")
    for name in [*TAILS, *(f"hidden_kl, beta {beta}" for beta in ("0", "0.5", "1"))]:
        assert all(rows[f"{name}, {kind}"]["equal_bits"] for kind in kinds)
    # In the interpreter the kernels cut off what a GPU rounds: float32 is where they can be compared.
    assert rows["truncated, float32"]["within_bounds"]
    goals = {goal["goal"]: goal for goal in report["goals"]}
    assert len(goals) == len(ONE_GPU)
    assert goals["errors: cases whose second run has other bits"]["verdict"] == "met"


@NEEDS_TRITON
@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.skipif(torch.cuda.is_available(), reason="would need two GPUs")
def test_tiny_ranks(tmp_path):
    out = tmp_path / "loss.json"
    assert run("bench", "loss", "--tiny", "--ranks", 2, "--tokens", 4096, "--out", out) == 0
    report = json.loads(out.read_text())
    assert_nothing_failed(report)
    assert [row["tokens"] for row in report["rows"]] == [4096] * 6
    assert all(row["median_ms"] > 0 for row in report["rows"])


def test_a_part_that_fails_loses_no_other(capsys, monkeypatch, tmp_path):
    def works(setting):
        return {
            "rows": [{"case": "one"}, {"case": "two", "failed": "ValueError: two"}],
            "chunk": setting.chunk_tokens,
        }

    def fails(setting):
        raise ValueError("a part\nof several lines")

    def is_not_here(setting):
        raise ImportError("no such package")  # of what is measured, not of what it is compared with

    monkeypatch.setattr(loss, "PARTS", {"first": fails, "second": works, "third": is_not_here})
    out = tmp_path / "loss.json"
    assert run("bench", "loss", "--tiny", "--out", out) == 2
    report = json.loads(out.read_text())
    assert report["first"] == {"failed": "ValueError: a part"}
    assert report["second"]["chunk"] == 1
    assert report["third"] == {"failed": "ImportError: no such package"}
    said = capsys.readouterr().err
    assert "bench loss: 3 measurements failed" in said
    assert "repeat a part with --part" in said
    assert "first: ValueError: a part" in said
    assert "second, rows[1]: ValueError: two" in said


def test_a_variant_that_fails_loses_no_other():
    def out_of_memory():
        raise torch.OutOfMemoryError("no room")

    def broken():
        raise RuntimeError("wrong")

    def missing():
        raise ImportError("not installed")

    works = {"a": lambda: None, "b": out_of_memory, "c": missing}
    compared = {"x": lambda: None, "y": out_of_memory, "z": missing, "w": broken}
    measured = measure(works, compared, rounds=2)
    assert len(measured["a"].samples_ms) == len(measured["x"].samples_ms) == 2
    # What is measured must run; what it is compared with need not be installed, nor fit.
    assert measured["b"] == {"failed": "OutOfMemoryError: no room"}
    assert measured["c"] == {"failed": "ImportError: not installed"}
    assert measured["y"] == {"unavailable": "OutOfMemoryError: no room"}
    assert measured["z"] == {"unavailable": "ImportError: not installed"}
    assert measured["w"] == {"failed": "RuntimeError: wrong"}


@pytest.mark.skipif(torch.cuda.is_available(), reason="would run the benchmark")
def test_tiny_without_gpu_and_interpreter(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(implementation, "is_interpreted", lambda: False)
    assert run("bench", "loss", "--tiny", "--out", tmp_path / "loss.json") == 2
    assert "set TRITON_INTERPRET=1" in capsys.readouterr().err


def test_tokens_are_of_ranks(capsys, tmp_path):
    assert run("bench", "loss", "--tokens", 4096, "--out", tmp_path / "loss.json") == 2
    assert "--tokens is given without --ranks" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="would run the benchmark")
def test_without_a_gpu(capsys, tmp_path):
    assert run("bench", "loss", "--out", tmp_path / "loss.json") == 2
    assert "bench loss: no CUDA GPU found" in capsys.readouterr().err
    assert not (tmp_path / "loss.json").exists()


def test_parts_of_one_gpu_are_not_asked_of_several(capsys, tmp_path):
    assert run("bench", "loss", "--ranks", 2, "--part", "errors", "--out", tmp_path / "loss.json") == 2
    assert "--part is given with --ranks" in capsys.readouterr().err
    assert not (tmp_path / "loss.json").exists()


@pytest.mark.parametrize(
    "command",
    [["loss", "--tiny"], ["loss", "--ranks", 2, "--tiny"], ["overlap", "--tiny"], ["plot", __file__]],
    ids=["loss", "ranks", "overlap", "plot"],
)
def test_out_in_no_folder_is_refused_first(capsys, command, tmp_path):
    assert run("bench", *command, "--out", tmp_path / "none" / "out.svg") == 2
    assert "the folder" in (said := capsys.readouterr().err)
    assert "does not exist" in said


def test_failures_name_their_command():
    with pytest.raises(FxskipError, match="two: failed") as caught:
        require_no_failures({"two": {"failed": "failed"}}, who="bench overlap", repeat="give --layers")
    assert (caught.value.who, caught.value.hint) == (
        "bench overlap",
        "all others are in the file; give --layers",
    )


@pytest.mark.parametrize("floor", ["three", "four"])
def test_the_floor_takes_any_number_of_tokens(floor):
    inputs = replace(draw_inputs(tiny(), 13 * 4096, 9 * 4096), chunk_tokens=5)
    work = (
        three_products(inputs) if floor == "three" else four_products(inputs, torch.ones(13, 16).bfloat16())
    )
    with FlopCounterMode(display=False) as counter:
        work()
    assert counter.get_total_flops() == {"three": 3, "four": 4}[floor] * 2 * 13 * 9 * 16
