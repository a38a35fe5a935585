"""fxskip plan"""

import json
import shutil

import pytest
from transformers import AutoConfig

import fxskip
from tests.cli.command import run
from tests.zoo import tiny


@pytest.fixture(scope="module")
def expected(original):
    return fxskip.plan(AutoConfig.from_pretrained(original), "farskip")


@pytest.fixture
def config_alone(original, tmp_path):
    shutil.copy(original / "config.json", tmp_path)
    return tmp_path


def test_text_of_a_config_without_weights(capsys, config_alone, expected):
    assert run("plan", config_alone, "farskip") == 0
    assert capsys.readouterr().out == f"{expected}\n"


def test_json_and_page(capsys, config_alone, expected):
    page = config_alone / "plan.html"
    assert run("plan", config_alone, "farskip", "--json", "--html", page) == 0
    out, err = capsys.readouterr()
    assert json.loads(out) == json.loads(expected.to_json())
    assert err == f"written: {page}\n"
    assert page.read_text().lower().startswith("<!doctype html>")


def test_spec_file_with_two_faults(capsys, config_alone):
    spec = config_alone / "mine.yaml"
    spec.write_text("fxskip: 1\nconnect:\n  - blocks: attention\n    witout: [routed@1]\n")
    assert run("plan", config_alone, spec) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"{spec}: 2 problems\n")
    assert "line 4" in err and "did you mean 'without'?" in err


def test_unknown_preset(capsys, config_alone):
    assert run("plan", config_alone, "farskp") == 2
    assert "farskip" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [[], ["farskip", "too", "much"]])
def test_wrong_number_of_arguments(config_alone, arguments):
    assert run("plan", config_alone, *arguments) == 2


def test_no_such_folder(capsys, tmp_path):
    assert run("plan", tmp_path / "nowhere", "farskip") == 2
    assert "nowhere" in capsys.readouterr().err


def test_folder_without_config(capsys, tmp_path):
    assert run("plan", tmp_path, "farskip") == 4
    assert "holds no config.json" in capsys.readouterr().err


def test_unknown_architecture(capsys, tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "spreadsheet"}')
    assert run("plan", tmp_path, "farskip") == 4
    assert "spreadsheet" in capsys.readouterr().err


def test_model_without_experts(capsys, tmp_path):
    tiny("llama", layers=2).config.save_pretrained(tmp_path)
    assert run("plan", tmp_path, "farskip") == 3
    assert "no routed experts" in capsys.readouterr().err


def test_rewired_model(capsys, converted):
    assert run("plan", converted, "farskip") == 3
    assert "rewired already" in capsys.readouterr().err
