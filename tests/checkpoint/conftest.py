"""A saved original and its rewired student, made once: a transform takes seconds."""

import pytest

from tests.checkpoint.samples import rewired, save_stock


@pytest.fixture(scope="session")
def stock(tmp_path_factory):
    return save_stock(tmp_path_factory.mktemp("stock") / "mixtral", "mixtral")


@pytest.fixture(scope="session")
def student(stock):
    """Do not change it: other tests use it too."""
    return rewired(stock)


@pytest.fixture(scope="session")
def saved(student, tmp_path_factory):
    """Do not write into it; copy it."""
    folder = tmp_path_factory.mktemp("saved") / "student"
    student.save_pretrained(folder)
    return folder
