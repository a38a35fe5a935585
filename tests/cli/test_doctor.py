"""fxskip doctor; what it examines is tested in tests/checkpoint."""

import json

from fxskip.checkpoint.doctor import examine
from tests.checkpoint.samples import edited
from tests.cli.command import run


def test_intact(capsys, converted):
    assert run("doctor", converted) == 0
    out, err = capsys.readouterr()
    assert (out, err) == (f"{examine(converted)}\n", "")


def test_json_and_values(capsys, converted):
    assert run("doctor", converted, "--json", "--values") == 0
    assert json.loads(capsys.readouterr().out) == json.loads(examine(converted, values=True).to_json())


def test_damaged(capsys, converted, tmp_path):
    damaged = edited(converted, tmp_path / "damaged", lambda config: config["fxskip"].update(wiring_hash="0"))
    assert run("doctor", damaged, "--json") == 1
    checks = {check["name"]: check for check in json.loads(capsys.readouterr().out)["checks"]}
    assert checks["wiring"]["status"] == "FAIL"
    assert checks["wiring"]["remedy"]


def test_original_and_no_model(original, tmp_path):
    assert run("doctor", original) == 0
    assert run("doctor", tmp_path) == 1
    assert run("doctor", tmp_path / "nowhere") == 2
