"""fxskip trace."""

import json

import pytest

from tests.cli.command import run

SMALL = ("--length", 8, "--batch-size", 1, "--steps", 1)


def test_one_process(original, tmp_path, capsys):
    assert run("trace", original, "farskip", *SMALL, "--forward-only", "--out", tmp_path / "out") == 0
    printed = capsys.readouterr()
    assert "nothing is in flight" in printed.out and "forward only: the model is in eval mode" in printed.out
    assert (tmp_path / "out" / "timeline.txt").read_text() == printed.out


def test_a_config_alone(original, capsys):
    assert run("trace", original / "config.json", "farskip", *SMALL, "--json") == 0
    printed = capsys.readouterr()
    assert "weights are random" in printed.err
    data = json.loads(printed.out)
    assert data["about"]["gradients"] is True and data["about"]["key"]["dtype"] == "float32"


@pytest.mark.distributed
@pytest.mark.slow
def test_it_starts_the_processes_that_the_spec_needs(original, tmp_path, capsys):
    spec = tmp_path / "spec.yaml"
    spec.write_text("fxskip: 1\npreset: farskip\nparallel: {expert: {size: 2}}\n")
    assert run("trace", original, spec, *SMALL, "--out", tmp_path / "out") == 0
    assert "2 processes on cpu" in capsys.readouterr().out
    costs = tmp_path / "out" / "costs.json"
    spec.write_text(spec.read_text() + f"schedule: {{costs: {costs}}}\n")
    assert run("trace", original, spec, *SMALL) == 0
