"""A student that was damaged after it was saved: whether it still loads, and what the doctor says."""

import re
import shutil

import pytest
from transformers import AutoModelForCausalLM

from fxskip.checkpoint.doctor import examine
from tests.checkpoint.damages import DAMAGES

FATAL = [name for name, damage in DAMAGES.items() if damage.load is not None]


@pytest.fixture
def damaged(saved, tmp_path, request):
    folder = tmp_path / "damaged"
    shutil.copytree(saved, folder)
    damage = DAMAGES[request.param]
    damage.do(folder)
    return folder, damage


@pytest.mark.parametrize("damaged", FATAL, indirect=True)
def test_it_does_not_load(damaged):
    folder, damage = damaged
    # Errors of transformers are as good as ours here: what matters is that there is no model.
    with pytest.raises(Exception, match=damage.load):
        AutoModelForCausalLM.from_pretrained(folder)


@pytest.mark.parametrize("damaged", DAMAGES, indirect=True)
def test_the_doctor_finds_it(damaged):
    folder, damage = damaged
    diagnosis = examine(folder)
    assert not diagnosis.is_intact
    first = next(check for check in diagnosis.checks if check.status == "FAIL")
    assert first.name == damage.check
    assert re.search(damage.found, first.found)
    assert first.remedy
