"""Which tokens `fxskip trace` draws, and what it refuses before it starts."""

import pytest

from fxskip.cli.students import ranks_with_same_tokens
from fxskip.spec import load_spec
from tests.cli.command import run

TENSOR = {"tensor": {"size": 2}}


@pytest.mark.parametrize(
    ("parallel", "same"),
    [
        ({"expert": {"size": 4}}, 1),
        (TENSOR, 2),
        ({"expert": {"size": 4}} | TENSOR, 2),
        ({"expert": {"size": 4, "exchange": "all_reduce"}}, 4),
        ({"expert": {"size": 2, "exchange": "all_reduce"}} | TENSOR, 2),
    ],
)
def test_ranks_that_add_up_have_the_same_tokens(parallel, same):
    assert ranks_with_same_tokens(load_spec({"fxskip": 1, "parallel": parallel})) == same


def test_a_folder_that_cannot_be_made(tmp_path, capsys):
    (tmp_path / "file").touch()
    config = tmp_path / "config.json"
    config.write_text("{}")
    assert run("trace", config, "farskip", "--out", tmp_path / "file" / "trace") == 2
    assert "file/trace: Not a directory" in capsys.readouterr().err
