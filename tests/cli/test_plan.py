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


def test_sizes_and_hardware_reach_the_plan(capsys, config_alone):
    config = config_alone / "config.json"
    options = ("--hardware", "b200", "--tokens-per-rank", 64, "--context", 32, "--ep", 2, "--tp", 4)
    more = ("--dtype", "float8", "--copies-per", "domain")
    assert run("plan", config, "farskip", *options, *more, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    used = found["deployment"]
    assert used.pop("hardware")["name"] == "NVIDIA B200"
    assert used == {
        "dtype": "float8",
        "tokens": 64,
        "context": 32,
        "expert": 2,
        "exchange": "all_to_all",
        "tensor": 4,
        "copies_per": "domain",
        "assumed": False,
        "instead_of": "",
    }
    assert [t["name"] for t in found["blocks"][1]["transfers"]] == ["dispatch", "combine"]
    assert found["forward"]["exposed_before_us"] > found["forward"]["exposed_after_us"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--ep", 3), "3 ranks cannot share 4 experts evenly"),
        (("--tp", 3), "3 ranks cannot share 4 attention heads evenly"),
        (("--hardware", "h20"), "known by name are b200, h200, mi300x"),
    ],
)
def test_what_cannot_be_estimated(capsys, config_alone, options, words):
    assert run("plan", config_alone, "farskip", *options) == 2
    assert words in capsys.readouterr().err


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
