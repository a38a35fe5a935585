"""The specs that come with fxskip: each loads, says what its name promises, and travels inside the wheel."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import yaml

from fxskip.spec import load_spec, preset_names, specs_folder

ROOT = Path(__file__).parents[1]

ATTENTION, FEED_FORWARD = (("mixer",), ["routed@1"]), (("moe", "dense"), ["all@1"])
EVERYWHERE = range(27)
LAST_75 = range(7, 27)  # 75% of 27 is 20.25: 20 layers

# In a model of 27 layers, as Moonlight has: (blocks, addends they no longer see, layers).
EXPECTED = {
    "farskip": [(*ATTENTION, EVERYWHERE), (*FEED_FORWARD, EVERYWHERE)],
    "farskip-attention": [(*ATTENTION, EVERYWHERE)],
    "farskip-moe": [(*FEED_FORWARD, EVERYWHERE)],
    "parallel": [(*FEED_FORWARD, EVERYWHERE)],
    "ladder": [(("all",), ["all@1"], EVERYWHERE)],
    "identity": [],
    "farskip-last-75": [(*ATTENTION, LAST_75), (*FEED_FORWARD, LAST_75)],
    "farskip-amd-range": [(*ATTENTION, range(5, 27)), (("moe",), ["all@1"], range(4, 27))],
}


def test_the_folder_holds_the_presets_and_nothing_else():
    assert set(preset_names()) == set(EXPECTED)


@pytest.mark.parametrize("name", EXPECTED)
def test_each_preset_says_what_its_name_promises(name):
    spec = load_spec(name)
    found = [(rule.blocks, list(map(str, rule.without)), rule.layers.resolve(27)) for rule in spec.connect]
    assert found == [(blocks, without, tuple(layers)) for blocks, without, layers in EXPECTED[name]]
    assert load_spec(specs_folder() / f"{name}.yaml") == spec
    # `preset:` takes over the rules and nothing more, so a preset may hold nothing more.
    assert yaml.safe_load((specs_folder() / f"{name}.yaml").read_text()).keys() == {
        "fxskip",
        "name",
        "connect",
    }
    assert spec.name == name


def test_specs_differ_in_meaning_except_the_two_names_of_one_wiring():
    rules = {name: load_spec(name).connect for name in EXPECTED}
    assert rules["parallel"] == rules["farskip-moe"]
    assert len({str(found) for found in rules.values()}) == len(EXPECTED) - 1


def test_an_installed_package_finds_its_presets(tmp_path):
    build = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(tmp_path)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("fxskip-*.whl")
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")

    code = "import fxskip.spec as s; print(s.specs_folder()); print(s.load_spec('farskip').to_yaml(), end='')"
    environment = {"PYTHONPATH": str(tmp_path / "site")}
    run = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=environment,
        check=True,
        capture_output=True,
        text=True,
    )
    folder, _, text = run.stdout.partition("\n")
    assert folder == str(tmp_path / "site" / "fxskip" / "specs")
    assert text == load_spec("farskip").to_yaml()
    package = tmp_path / "site" / "fxskip"
    for file in ("py.typed", "planning/style.css", "checkpoint/remote_code.txt", "specs/distill/fcsd.yaml"):
        assert (package / file).exists(), file
