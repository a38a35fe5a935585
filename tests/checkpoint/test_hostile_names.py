"""Words of a spec that are code to somebody: they stay data in everything that is saved."""

import json
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

import fxskip
from fxskip.checkpoint.family import REMOTE_CODE
from fxskip.errors import SpecError
from tests.zoo import tiny

MARK = "fxskip_hostile"
NAME = f"{MARK}\"\"\" ''' \\\" ); import os; os.system('touch {MARK}') # {{0}} %s $(id) `id` </script> {{{{ x }}}} ☃"
GLOB = f"*.{MARK}\"\"\"'''\\);__import__('os').system('touch${{IFS}}{MARK}')#"


def test_the_files_of_a_checkpoint_hold_the_words_of_a_spec_as_json_alone(tmp_path: Path) -> None:
    rule = {"blocks": ["*.mlp", GLOB], "without": ["all@1"]}
    student = fxskip.transform(tiny("mixtral", layers=2), {"fxskip": 1, "name": NAME, "connect": [rule]})
    student.save_pretrained(tmp_path)

    code = tmp_path / REMOTE_CODE
    assert list(tmp_path.rglob("*.py*")) == [code]
    assert code.read_bytes() == (Path(fxskip.__file__).parent / "checkpoint/remote_code.txt").read_bytes()
    named = [path.name for path in tmp_path.rglob("*") if MARK.encode() in path.read_bytes()]
    assert named == ["config.json"]
    assert json.loads((tmp_path / "config.json").read_text())["fxskip"]["spec"]["name"] == NAME

    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert fxskip.spec_of(loaded) == fxskip.spec_of(student)
    assert fxskip.spec_of(loaded).name == NAME
    assert fxskip.spec_of(loaded).connect[0].blocks == ("*.mlp", GLOB)


@pytest.mark.parametrize("name", ["two\nlines", 'x"\n"""\nimport os\n', "\x1b[2J", "\u202egnp.exe", "\ud800"])
def test_a_name_of_several_lines_or_with_control_characters_is_refused(name: str) -> None:
    with pytest.raises(
        SpecError, match=r"one line of characters that can be printed|unable to parse raw data"
    ):
        fxskip.load_spec({"fxskip": 1, "name": name})
