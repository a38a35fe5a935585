"""Where a recorder puts what it is told of, and when: without a model, in one process."""

from unittest.mock import Mock

import pytest
import torch

from fxskip.collectives.measuring import Place, Sent
from fxskip.tracing.recorder import Recorder

DISPATCH = Sent("dispatch of decoder layer 3", Place(3, "dispatch", "expert"), flight=7)


@pytest.fixture
def recorder() -> Recorder:
    return Recorder(torch.device("cpu"))


def sent(recorder: Recorder, *collectives: Sent) -> list[str]:
    """The names in the record, in the order of issue."""
    for one in collectives:
        recorder.flight(one).issued(torch.zeros(2, 4), Mock())
    return [flight.name for flight in recorder.record().flights]


def test_a_collective_has_the_role_of_the_task_that_sends_it(recorder: Recorder) -> None:
    """The second dispatch of a layer is called so by its task alone; its reverse is known by the flight."""
    recorder.enter(Place(3, "dispatch.2", "expert"))
    first = recorder.flight(DISPATCH)
    recorder.enter(Place(3, "moe2.1", "compute"))
    other = recorder.flight(Sent("combine", Place(3, "combine", "expert"), flight=8))
    recorder.end_phase()
    reverse = recorder.flight(DISPATCH.reversed())
    assert [one.place.role for one in (first, other, reverse)] == ["dispatch.2", "combine", "dispatch.2.bwd"]


def test_two_calls_of_a_layer_are_told_apart(recorder: Recorder) -> None:
    """Reverses may come in any order: each belongs to its own flight."""
    for number, role in ((1, "enter"), (2, "enter.2")):
        recorder.enter(Place(0, role, "tensor"))
        recorder.flight(Sent("enter", Place(0, "enter", "tensor"), flight=number))
    recorder.end_phase()
    reverses = [Sent("enter", Place(0, "enter", "tensor"), flight=n).reversed() for n in (1, 2)]
    assert [recorder.flight(one).place.role for one in reverses] == ["enter.bwd", "enter.2.bwd"]


def test_what_is_sent_again_does_not_change_the_reverse(recorder: Recorder) -> None:
    recorder.enter(Place(3, "dispatch", "expert"))
    recorder.flight(DISPATCH)
    recorder.end_phase()
    recorder.enter(Place(3, "dispatch", "expert"))
    again = recorder.flight(DISPATCH.of_flight(9))
    assert again.place.role == "dispatch.again"
    assert recorder.flight(DISPATCH.reversed()).place.role == "dispatch.bwd"


def test_sums_of_gradients_belong_to_no_task_that_runs(recorder: Recorder) -> None:
    recorder.end_phase()
    recorder.enter(Place(0, "dispatch", "expert"))
    place = Place(2, "gradients.2", "data")
    assert sent(recorder, Sent("gradients.2 (data) of decoder layer 2", place)) == ["2.gradients.2"]


def test_parts_of_a_backward(recorder: Recorder) -> None:
    """What a region says of its backward; the same task entered in the backward as it is runs again."""
    recorder.end_phase()
    place = Place(1, "moe2.3", "compute")
    for part in ("dgrad", "wgrad", "bwd", "forward"):
        recorder.enter(place, part)
    recorder.enter(None)
    names = [task.name for task in recorder.record().tasks]
    assert names == ["1.moe2.3.dgrad", "1.moe2.3.wgrad", "1.moe2.3.bwd", "1.moe2.3.again"]


def test_each_lane_has_a_side_stream(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream that waited for a long collective would see the end of a short one of another lane too late."""
    monkeypatch.setattr("torch.cuda.Stream", Mock(side_effect=lambda device: object()))
    expert, data = recorder.side_stream("expert"), recorder.side_stream("data")
    assert expert is not data and recorder.side_stream("expert") is expert
