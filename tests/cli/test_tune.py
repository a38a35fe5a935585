"""fxskip tune."""

import json

import pytest

from tests.cli.command import run

SMALL = ("--length", 8, "--batch-size", 1, "--steps", 1)


def test_one_process_has_nothing_to_order(original, capsys):
    assert run("tune", original, "farskip", *SMALL) == 3
    assert "one process, where nothing is in flight" in capsys.readouterr().err


@pytest.mark.distributed
@pytest.mark.slow
def test_its_last_line_is_what_the_spec_should_say(original, tmp_path, capsys):
    spec, out = tmp_path / "spec.yaml", tmp_path / "costs.json"
    spec.write_text("fxskip: 1\npreset: farskip\nparallel: {expert: {size: 2}}\n")
    assert run("tune", original, spec, *SMALL, "--forward-only", "--out", out) == 0
    printed = capsys.readouterr()
    lines = printed.out.splitlines()
    assert lines[0].startswith("a step, forward alone") and lines[-1].startswith("schedule: {costs: ")
    assert out.exists() == ("measured now, chosen" in printed.out) == ("written: " in printed.err)
    spec.write_text(f"{spec.read_text()}{lines[-1]}\n")
    assert run("tune", original, spec, *SMALL, "--forward-only", "--json", "--out", out) == 0
    data = json.loads(capsys.readouterr().out)
    assert {one["order"]["backward"] for one in data["timed"]} == {"mirrored"}
