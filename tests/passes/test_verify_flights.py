"""A region whose values in flight are touched is refused, whatever touched them."""

import pytest
import torch
from torch import fx

from fxskip.collectives import in_flight
from fxskip.errors import ScheduleError
from fxskip.passes.split_collectives import take_off
from fxskip.passes.verify_flights import verify_flights


class Drawn:
    """rows -> start -> (work) -> wait -> out, with each node's example value."""

    def __init__(self) -> None:
        self.graph = fx.Graph()
        self.rows = self.value(self.graph.placeholder("rows"))
        self.routing = self.graph.placeholder("routing")
        self.flight = self.graph.call_function(take_off, (self.routing, "dispatch", False))
        self.buffer = self.value(self.graph.call_function(in_flight.start, (self.rows, self.flight)))
        self.work = self.value(self.graph.call_function(torch.relu, (self.rows,)))
        self.arrived = self.value(self.graph.call_function(in_flight.wait, (self.buffer, self.flight)))
        self.out = self.graph.output((self.work, self.arrived))

    def value(self, node: fx.Node, like: fx.Node | None = None) -> fx.Node:
        node.meta["example_value"] = torch.empty(4, 2) if like is None else like.meta["example_value"]
        return node

    def refusal(self) -> str:
        self.graph.lint()
        with pytest.raises(ScheduleError) as caught:
            verify_flights(self.graph)
        return caught.value.found


def test_a_sound_region_passes() -> None:
    drawn = Drawn()
    assert verify_flights(drawn.graph) is drawn.graph


def test_an_early_read() -> None:
    drawn = Drawn()
    drawn.work.args = (drawn.buffer,)
    assert "'relu' (relu) reads 'start', a buffer in flight" in drawn.refusal()


def test_an_early_read_through_a_view() -> None:
    drawn = Drawn()
    with drawn.graph.inserting_after(drawn.buffer):
        view = drawn.value(drawn.graph.call_method("view", (drawn.buffer, -1)), like=drawn.buffer)
    drawn.work.args = (view,)
    assert "'view' (view) reads 'start'" in drawn.refusal()


def test_no_wait() -> None:
    drawn = Drawn()
    drawn.out.args = ((drawn.work,),)
    drawn.graph.erase_node(drawn.arrived)
    assert "waited for 0 times" in drawn.refusal()


def test_two_waits() -> None:
    drawn = Drawn()
    with drawn.graph.inserting_before(drawn.out):
        drawn.graph.call_function(in_flight.wait, (drawn.buffer, drawn.flight))
    assert "waited for 2 times" in drawn.refusal()


def test_a_wait_for_another_flight() -> None:
    drawn = Drawn()
    with drawn.graph.inserting_before(drawn.arrived):
        other = drawn.graph.call_function(take_off, (drawn.routing, "combine", False))
    drawn.arrived.args = (drawn.buffer, other)
    assert "waits for another flight" in drawn.refusal()


def test_a_wait_for_what_was_never_started() -> None:
    drawn = Drawn()
    drawn.arrived.args = (drawn.work, drawn.flight)
    drawn.graph.erase_node(drawn.buffer)
    assert "no buffer in flight" in drawn.refusal()


@pytest.mark.parametrize("by_alias", [False, True])
def test_writing_what_is_sent(by_alias: bool) -> None:
    drawn = Drawn()
    target = drawn.rows
    with drawn.graph.inserting_before(drawn.work):
        if by_alias:
            target = drawn.value(drawn.graph.call_method("view", (drawn.rows, 2, 4)), like=drawn.rows)
        drawn.value(drawn.graph.call_method("add_", (target, 1)), like=target)
    assert "(add_) writes into memory that 'start' uses" in drawn.refusal()


def test_writing_after_the_wait_is_allowed() -> None:
    drawn = Drawn()
    with drawn.graph.inserting_before(drawn.out):
        drawn.value(drawn.graph.call_method("add_", (drawn.rows, 1)), like=drawn.rows)
    verify_flights(drawn.graph)
