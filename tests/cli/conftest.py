"""A saved original, its rewired student and a text, made once by the command line itself."""

import pytest

from tests.checkpoint.samples import save_stock
from tests.cli.command import run


@pytest.fixture(scope="session")
def original(tmp_path_factory):
    """Do not write into it; copy it."""
    return save_stock(tmp_path_factory.mktemp("original") / "mixtral", "mixtral")


@pytest.fixture(scope="session")
def converted(original, tmp_path_factory):
    """Do not write into it; copy it."""
    out = tmp_path_factory.mktemp("converted") / "student"
    assert run("convert", original, "farskip", out) == 0
    return out


@pytest.fixture(scope="session")
def text(tmp_path_factory):
    file = tmp_path_factory.mktemp("data") / "text.txt"
    file.write_text("To be, or not to be, that is the question:\n" * 8)
    return file
