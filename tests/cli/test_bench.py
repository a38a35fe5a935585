"""fxskip bench; what it measures needs a GPU and is no test."""

import json

import pytest
import torch

from tests.cli.command import run

ROWS = [
    {"variant": "sparse_kl", "tokens": 4096, "median_ms": 11.0, "peak_gib": 1.5},
    {"variant": "sparse_kl", "tokens": 8192, "median_ms": 21.0, "peak_gib": 2.0},
    {"variant": "dense_sparse_kl", "tokens": 4096, "median_ms": 15.0, "peak_gib": 4.0},
    {"variant": "dense_sparse_kl", "tokens": 8192, "failed": "OutOfMemoryError"},
]


@pytest.mark.skipif(torch.cuda.is_available(), reason="would run the benchmark")
def test_without_a_gpu(capsys, tmp_path):
    assert run("bench", "loss", "--out", tmp_path / "loss.json") == 2
    assert "bench loss: no CUDA GPU found" in capsys.readouterr().err
    assert not (tmp_path / "loss.json").exists()


def test_parts_of_one_gpu_are_not_asked_of_several(capsys, tmp_path):
    assert run("bench", "loss", "--ranks", 2, "--part", "errors", "--out", tmp_path / "loss.json") == 2
    assert "--part is given with --ranks" in capsys.readouterr().err
    assert not (tmp_path / "loss.json").exists()


def test_plot(tmp_path):
    report = tmp_path / "report.json"
    report.write_text(json.dumps({"vocabulary": 131072, "ranks": 2, "gpu": "H200", "rows": ROWS}))
    assert run("bench", "plot", report, "--out", tmp_path / "figure.svg") == 0
    drawn = (tmp_path / "figure.svg").read_text()
    assert "<svg" in drawn


def test_plot_of_another_report(capsys, tmp_path):
    report = tmp_path / "report.json"
    report.write_text("{}")
    assert run("bench", "plot", report, "--out", tmp_path / "figure.svg") == 2
    assert "has no rows over tokens" in capsys.readouterr().err
