"""Overlap figures by hand."""

import pytest

from fxskip.errors import ScheduleError
from fxskip.schedule.machine import Contention, Machine
from fxskip.schedule.overlap import overlap_figures
from fxskip.schedule.steps import steps_of
from fxskip.schedule.tasks import TaskGraph
from tests.schedule.graphs import task


def graph():
    tasks = [
        task("gate"),
        task("dispatch", "expert", 40.0),
        task("core", cost_us=30.0),
        task("experts", cost_us=50.0),
    ]
    return TaskGraph(tasks, {"dispatch": ["gate"], "experts": ["dispatch"]})


ORDER = ("gate", "dispatch", "core", "experts")


def test_without_contention():
    found = overlap_figures(graph(), steps_of(graph(), ORDER))
    assert (found.none_us, found.step_us, found.blocking_us) == (90, 100, 130)
    assert (found.collective_us, found.exposed_us, found.stretch_us) == (40, 10, 0)
    assert found.hidden == pytest.approx(1 - 10 / 40)
    assert found.coincidence == pytest.approx(30 / 40)


def test_coincidence_flatters_where_kernels_are_stretched():
    stretch = {"matrix": 1.5, "attention": 1.0, "elementwise": 1.0}
    machine = Machine(contention={"expert": Contention(stretch=stretch, collective_stretch=1.125)})
    found = overlap_figures(graph(), steps_of(graph(), ORDER), machine)
    # Both end at 10 + 45: the dispatch takes 45 beside the core, and the core 30 * 1.5.
    assert (found.none_us, found.step_us, found.blocking_us) == pytest.approx((90, 105, 130))
    assert (found.collective_us, found.stretch_us) == pytest.approx((45, 15))
    assert found.exposed_us == pytest.approx(0, abs=1e-9)
    assert found.coincidence == pytest.approx(1)
    assert found.hidden == pytest.approx(1 - 15 / 40)


def test_collectives_of_two_lanes_count_once_where_they_coincide():
    tasks = [task("a", "expert", 40.0), task("b", "tensor", 30.0), task("u", cost_us=10.0), task("v")]
    both = TaskGraph(tasks, {"v": ["a", "b"]})
    found = overlap_figures(both, steps_of(both, ("a", "b", "u", "v")), Machine(ranks=2))
    assert (found.collective_us, found.exposed_us, found.coincidence) == pytest.approx((70, 30, 0.25))


def test_a_step_without_collectives():
    alone = TaskGraph([task("a")], {})
    found = overlap_figures(alone, steps_of(alone, ("a",)))
    assert (found.hidden, found.coincidence, found.exposed_us) == (1, 1, 0)


def test_unsound_steps_have_no_figures():
    with pytest.raises(ScheduleError, match="experts reads dispatch"):
        overlap_figures(graph(), [step for step in steps_of(graph(), ORDER) if step.action != "wait"])
