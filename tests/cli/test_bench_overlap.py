"""fxskip bench overlap: its tables, clocks, and what becomes of failures. What it measures needs two GPUs."""

import json
from collections.abc import Iterator
from datetime import datetime

import pytest
import torch

from fxskip.bench import overlap
from fxskip.bench.goals import verdicts
from fxskip.bench.mirror import mirrored
from fxskip.bench.overlap import table
from fxskip.bench.overlap_goals import REAL, TURN, ZERO, goals_of
from fxskip.bench.overlap_model import MIRROR, Setting
from fxskip.bench.overlap_ranks import measure_alone
from fxskip.bench.power import PowerLog
from fxskip.errors import FxskipError
from fxskip.tracing.processes import in_processes
from tests.cli.command import run

SETTING = Setting(
    layers=3, micro_batch=1, tokens=8, rounds=2, traced_steps=1, link="default", measured_costs=False, is_tiny=True
)  # fmt: skip


def test_one_process_against_the_original():
    found = {place[0]: value for place, value in measure_alone(SETTING, 0)}
    assert found.keys() == {"environment", "original", "student", "student over original", "peak_gib"}
    assert [len(own) for own in found["student"]["samples_ms"]] == [2]
    middle = [sum(s["step"] for s in found[who]["samples_ms"][0]) / 2 for who in ("student", "original")]
    assert found["student over original"] == pytest.approx(middle[0] / middle[1])


def mode(ms, clocks=None):
    return {"step_ms": ms, "clocks": clocks or {"unavailable": "nvidia-smi is not installed"}}


def test_the_table():
    phase = {"coincidence": 0.9, "exposed_us": 1400.0, "stretch_us": 5500.0}
    own = {
        "blocking": mode(85.0),
        "as it is": mode(81.0, {"gpu 0": {"mhz": 1650.0, "watts": 695.0, "readings": 9}}),
        "nothing sent": mode(75.0),
        "trace": {"forward": phase, "backward": phase | {"coincidence": 0.85}, "step": phase},
    }
    report = {
        "what": "two ranks", "layers": 8, "micro_batch": 2, "tokens": 4096, "choices": 6, "link": "default",
        "transport": "measured", "costs": "roofline",
        "rows moved by": {"farskip": {"chosen": "nccl", "why": "nccl 1.250 ms, copy_engine 1.500 ms"}},
        "tiny": False, "failed": "rank 1: it broke",
        "real routing, real data": {"farskip": own, "stock": {k: v for k, v in own.items() if k != "trace"}},
        "routing in turn, real data": {"farskip": own | {"as it is": mode(80.0)}},
    }  # fmt: skip
    text = "\n".join(table(report))
    assert "  failed: rank 1: it broke" in text
    assert "  farskip: rows moved by nccl (nccl 1.250 ms, copy_engine 1.500 ms)" in text
    row = next(line for line in text.splitlines() if "farskip, real routing" in line)
    assert row.split()[-11:] == [
        "85.00", "81.00", "75.00", "0.40", "x1.080", "0.90", "0.85", "1.40", "5.50", "1650", "695",
    ]  # fmt: skip
    assert "farskip: real routing over routing in turn x1.012" in text
    assert "real routing, real data: stock scheduled over FarSkip scheduled x1.000" in text
    assert "not traced" in next(line for line in text.splitlines() if "stock, real routing" in line)


def test_goals():
    """Of what was measured; a step's hidden share is 1 - (scheduled - none) / (blocking - none)."""
    own = {"blocking": mode(85.0), "as it is": mode(81.0), "nothing sent": mode(75.0)}
    report = {"transport": "auto", "link": "default", TURN: {"farskip": own}, ZERO: {"farskip": own}}
    found = {one["goal"]: (one["measured"], one["verdict"]) for one in verdicts(goals_of(report), report, ())}
    name = "auto, link default: "
    assert found[name + "hidden at constant clock"] == (pytest.approx(0.4), "missed by 35 %")
    assert found[name + "step over that with nothing sent, real data"] == (pytest.approx(1.08), "met")
    assert found[name + "step with real routing over routing in turn"] == (None, "not measured")
    assert found[name + "coincidence, forward"] == (None, "not measured")
    alone = {"student over original": 1.03}
    assert [one["verdict"] for one in verdicts(goals_of(alone), alone, ())] == ["missed by 0.98 %"]
    image = report | {"link": MIRROR, "transport": "copy_engine", REAL: {"farskip": own}}
    assert [one["verdict"] for one in verdicts(goals_of(image), image, ())] == ["met"]


def test_clocks_within_the_steps():
    log = PowerLog()
    at = datetime(2026, 1, 2, 3, 4, 5).timestamp()
    log.take(
        [
            "2026/01/02 03:04:05.500, 0, 1600, 690.5",
            "2026/01/02 03:04:05.700, 0, 1700, 700.5",
            "2026/01/02 03:04:05.700, 1, 1980, 420.0",
            "2026/01/02 03:04:09.000, 0, 300, 90.0",
        ]
    )
    found = log.summary([(at, at + 1.0)])
    assert found["gpu 0"] == {"mhz": 1650.0, "watts": 695.5, "readings": 2}
    assert found["gpu 1"]["readings"] == 1
    assert log.summary([(at + 100, at + 101)]) == {"unavailable": "no reading within the steps"}


def test_no_clocks():
    log = PowerLog()
    log.take(['Field "power.draw.instant" is not a valid field to query.'])
    assert log.summary([(0.0, 1e12)]) == {
        "unavailable": 'Field "power.draw.instant" is not a valid field to query.'
    }


@pytest.mark.skipif(torch.cuda.device_count() >= 2, reason="there are two GPUs")
def test_without_two_gpus(tmp_path, capsys):
    assert run("bench", "overlap", "--out", tmp_path / "report.json") == 2
    assert "CUDA devices needed: 2; seen by this PyTorch: 0" in capsys.readouterr().err


@pytest.fixture
def image():
    """The group of a process whose other ranks are its mirror images."""
    with mirrored(2):
        yield
    assert not torch.distributed.is_initialized()


def test_a_mirror_image_sends_what_is_sent_to_it(image):
    sent, received = torch.arange(6.0).view(3, 2), torch.zeros(3, 2)
    torch.distributed.all_to_all_single(received, sent, [1, 2], [1, 2])
    assert torch.equal(received, sent)
    said = [None, None]
    torch.distributed.all_gather_object(said, {"rows": 3})
    assert said == [{"rows": 3}, {"rows": 3}]


def test_what_a_mirror_image_cannot_know(image):
    with pytest.raises(ValueError, match="sends"):
        torch.distributed.all_to_all_single(torch.zeros(3), torch.zeros(3), [1, 2], [2, 1])
    with pytest.raises(RuntimeError):
        torch.distributed.all_reduce(torch.ones(1))


def test_the_mirror_is_measured_by_itself(tmp_path, capsys):
    assert run("bench", "overlap", "--tiny", "--mirror", "--alone", "--out", tmp_path / "report.json") == 2
    assert "--mirror is given with another choice" in capsys.readouterr().err


@pytest.mark.parametrize(
    "option", ["--slow-link", "--copy-engine", "--measured-transport", "--measured-costs"]
)
def test_one_process_exchanges_nothing(tmp_path, capsys, option):
    out = tmp_path / "report.json"
    assert run("bench", "overlap", "--tiny", "--alone", option, "--out", out) == 2
    assert f"--alone is given with {option}" in capsys.readouterr().err
    assert not out.exists()


@pytest.mark.slow
def test_tiny_mirror(tmp_path):
    out = tmp_path / "report.json"
    assert run("bench", "overlap", "--tiny", "--mirror", "--rounds", "1", "--choices", "1", "--out", out) == 0
    (found,) = json.loads(out.read_text())["settings"]
    assert (found["what"], found["link"], found["choices"]) == ("one rank and its mirror image", MIRROR, 1)
    assert set(found[ZERO]["farskip"]) == {"blocking", "as it is", "nothing sent", "trace"}


def test_failures_are_in_the_file_and_in_the_exit_status(tmp_path, monkeypatch, capsys):
    """One variant is measured, then a rank fails; what does not fit into memory is a finding."""
    ended = iter(["OutOfMemoryError: CUDA out of memory", "RuntimeError: it broke"])

    def processes(body, ranks, *, environment):
        yield ("environment",), {"gpus": 0}
        yield ("real routing, real data", "stock", "blocking"), mode(3.0)
        raise FxskipError("rank 1", next(ended), hint="")

    monkeypatch.setattr(overlap, "in_processes", processes)
    out = tmp_path / "report.json"
    assert run("bench", "overlap", "--tiny", "--out", out) == 2
    assert "it broke" in capsys.readouterr().err
    pair, alone = json.loads(out.read_text())["settings"]
    assert pair["unavailable"] == "rank 1: OutOfMemoryError: CUDA out of memory"
    assert alone["failed"] == "rank 1: RuntimeError: it broke"
    assert pair["real routing, real data"]["stock"]["blocking"]["step_ms"] == 3.0


def second_rank_fails(rank: int) -> Iterator[int]:
    yield 7
    if rank == 1:
        raise ValueError("no luck")
    torch.distributed.barrier()
    yield 8


@pytest.mark.distributed
@pytest.mark.slow
def test_a_rank_that_fails_is_named(monkeypatch):
    found = []
    with pytest.raises(FxskipError, match="rank 1: ValueError: no luck"):
        found += in_processes(second_rank_fails, 2)


@pytest.mark.distributed
@pytest.mark.slow
def test_tiny(tmp_path):
    out = tmp_path / "report.json"
    options = ("--tiny", "--slow-link", "--measured-transport", "--rounds", "1")
    assert run("bench", "overlap", *options, "--out", out) == 0
    report = json.loads(out.read_text())
    assert report["environment"]["sources_sha256"]
    assert [(one["what"], one["link"], one["transport"]) for one in report["settings"]] == [
        ("two ranks", "default", "auto"), ("two ranks", "NCCL_P2P_DISABLE=1", "auto"),
        ("two ranks", "default", "measured"), ("one process", "default", "auto"),
    ]  # fmt: skip
    for one in report["settings"][:-1]:
        for choice in one["rows moved by"].values():
            assert choice["asked"] == one["transport"] and choice["chosen"] and choice["why"]
