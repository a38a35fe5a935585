"""What the reader of a log gets to see, also when the error came from another process."""

import pickle

import pytest

from fxskip.errors import CheckpointError, FxskipError, PassError, SpecError, first_line


def test_an_error_says_who_what_where_and_what_to_write():
    error = PassError(
        "reroute", "drops nothing", where="model  layers\nin two lines", hint="select layers 2-26"
    )
    assert (
        str(error)
        == """\
reroute: drops nothing
  where  model  layers
         in two lines
  hint   select layers 2-26"""
    )
    assert (
        str(CheckpointError("doctor", "no spec", hint="save again")) == "doctor: no spec\n  hint   save again"
    )


def test_errors_of_others_are_quoted_by_their_first_line():
    assert first_line(ValueError("\n  no such kernel\nTraceback")) == "no such kernel"
    assert first_line(AssertionError()) == ""


@pytest.mark.parametrize(
    "error",
    [
        PassError("reroute", "drops nothing", where="layer 3", hint="select other layers"),
        SpecError("layers", "out of range", hint="0-15"),
        SpecError("mine.yaml", [(4, "connect.0", "missing"), (None, "", "empty")]),
    ],
)
def test_an_error_survives_the_way_from_a_worker_process(error):
    error.add_note("pass 3 of 5")
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error) and isinstance(again, FxskipError)
    assert str(again) == str(error) and vars(again) == vars(error)
