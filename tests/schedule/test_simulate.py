"""The simulated machine against timelines worked out by hand, and what it must catch."""

from itertools import pairwise

import pytest

from fxskip.errors import ScheduleError
from fxskip.schedule.hardware import load_hardware
from fxskip.schedule.machine import Contention, Machine, contention_of
from fxskip.schedule.simulate import simulate
from fxskip.schedule.steps import Step, blocking, steps_of
from fxskip.schedule.tasks import TaskGraph
from tests.schedule.graphs import task

STRETCH = {"matrix": 1.5, "attention": 1.1, "elementwise": 1.2}


def window(**fields):
    """gate, then dispatch with `core` beside it, then experts."""
    tasks = [
        task("gate"),
        task("dispatch", "expert", 40.0, bytes_in_flight=7),
        task("core", cost_us=100.0, **fields),
    ]
    return TaskGraph([*tasks, task("experts", cost_us=30.0)], {"dispatch": ["gate"], "experts": ["dispatch"]})


ORDER = ("gate", "dispatch", "core", "experts")


def times(found, rank=0):
    return {one.task: (one.start_us, one.end_us) for one in found.intervals[rank]}


def run(graph, steps=None, machine=None, **more):
    return simulate(graph, steps or steps_of(graph, ORDER), machine, **more).require_sound()


def test_a_collective_runs_beside_compute():
    found = run(window())
    assert times(found) == {"gate": (0, 10), "dispatch": (10, 50), "core": (10, 110), "experts": (110, 140)}
    assert (found.step_us, found.peak_bytes) == (140, 7)


def test_a_start_waits_for_all_that_was_enqueued_before_it():
    graph = window()
    late = run(graph, steps_of(graph, ("gate", "core", "dispatch", "experts")))
    assert times(late)["dispatch"] == (110, 150)
    assert late.step_us == 180


def test_blocking_and_without_communication():
    graph = window()
    assert run(graph, blocking(steps_of(graph, ORDER))).step_us == 10 + 40 + 100 + 30
    assert run(graph, communication=False).step_us == 10 + 100 + 30


@pytest.mark.parametrize(
    ("fields", "delay"),
    [
        ({"kernel": "long"}, 25),
        ({"kernel": "short"}, 4),
        ({"kernel": "short", "work": "elementwise"}, 4),
        ({"kernel": "long", "work": "attention"}, 25),
    ],
)
def test_a_start_behind_a_kernel_is_late(fields, delay):
    machine = Machine(contention={"expert": Contention(25.0, 4.0)})
    found = times(run(window(**fields), machine=machine))
    assert found["dispatch"] == (10 + delay, 50 + delay)


def test_a_late_start_is_no_later_than_the_end_of_the_task():
    machine = Machine(contention={"expert": Contention(1000.0, 4.0)})
    assert times(run(window(), machine=machine))["dispatch"] == (110, 150)


def test_both_sides_of_a_window_are_stretched():
    machine = Machine(contention={"expert": Contention(stretch=STRETCH, collective_stretch=1.25)})
    found = times(run(window(), machine=machine))
    # The dispatch takes 40 * 1.25 beside the core, which does 50 / 1.5 of its work meanwhile, the rest alone.
    assert found["dispatch"] == (10, 60)
    assert found["core"] == pytest.approx((10, 60 + 100 - 50 / 1.5))


def test_the_rest_of_a_collective_runs_alone():
    machine = Machine(contention={"expert": Contention(stretch=STRETCH, collective_stretch=2.0)})
    graph = window(work="elementwise").with_costs({"core": 20.0})
    found = times(run(graph, machine=machine))
    assert found["core"] == (10, 10 + 20 * 1.2)
    assert found["dispatch"] == (10, 34 + 40 - 24 / 2)


def test_lanes_without_contention_are_left_alone():
    machine = Machine(contention={"tensor": Contention(25.0, 4.0, STRETCH, 2.0)})
    assert times(run(window(), machine=machine)) == times(run(window()))


def test_ranks_meet_in_a_collective():
    slow = [{}, {"gate": 35.0}]
    found = run(window(), machine=Machine(ranks=2), rank_costs=slow)
    assert times(found, 0)["dispatch"] == (10, 75)  # its kernel waits for the peer
    assert times(found, 1)["dispatch"] == (35, 75)
    assert found.step_us == 35 + 100 + 30


def test_a_lane_runs_one_collective_after_another():
    tasks = [task("a", "expert", 30.0), task("b", "expert", 20.0), task("c", "tensor", 25.0)]
    graph = TaskGraph(tasks, {})
    found = times(run(graph, steps_of(graph, ("b", "a", "c"))))
    assert found == {"b": (0, 20), "a": (20, 50), "c": (0, 25)}


def test_the_host_is_waited_for():
    tasks = [
        task("gate"),
        task("sizes", "host", 5.0),
        task("core", cost_us=4.0),
        task("experts", cost_us=30.0),
    ]
    graph = TaskGraph(tasks, {"sizes": ["gate"], "experts": ["sizes"]})
    found = times(run(graph, steps_of(graph, ("gate", "sizes", "core", "experts"))))
    assert found == {"gate": (0, 10), "sizes": (10, 15), "core": (15, 19), "experts": (19, 49)}
    early = times(run(graph, steps_of(graph, ("gate", "core", "sizes", "experts"))))
    assert early == {"gate": (0, 10), "core": (10, 14), "sizes": (10, 15), "experts": (15, 45)}


def test_launches_cost_host_time():
    graph = TaskGraph([task("a"), task("b", host_us=50.0)], {})
    found = times(run(graph, steps_of(graph, ("a", "b")), Machine(launch_us=2.0)))
    assert found == {"a": (2, 12), "b": (54, 64)}


def test_bytes_in_flight_last_to_the_end_of_the_last_consumer():
    tasks = [task(f"c{i}", "expert", 5.0, bytes_in_flight=10**i) for i in range(3)]
    tasks += [task("u0"), task("u1"), task("u2")]
    graph = TaskGraph(tasks, {"u0": ["c0"], "u1": ["c1"], "u2": ["c2", "c0"]})
    at_once = run(graph, steps_of(graph, ("c0", "c1", "c2", "u0", "u1", "u2")))
    one_by_one = run(graph, steps_of(graph, ("c0", "u0", "c1", "u1", "c2", "u2")))
    assert (at_once.peak_bytes, one_by_one.peak_bytes) == (111, 101)


# What must not happen.


def faults(graph, steps, machine=None):
    found = simulate(graph, steps, machine)
    with pytest.raises(ScheduleError):
        found.require_sound()
    return {(fault.kind, fault.task) for fault in found.faults}


def test_a_read_before_the_data():
    graph = window()
    steps = [
        step for step in steps_of(graph, ("gate", "dispatch", "experts", "core")) if step.action != "wait"
    ]
    assert ("early read", "experts") in faults(graph, steps)


def test_a_read_without_a_wait_that_was_lucky():
    graph = window()  # the core takes longer than the dispatch, so its data are there
    steps = [step for step in steps_of(graph, ORDER) if step.action != "wait"]
    assert ("early read", "experts") in faults(graph, steps)


def test_a_task_before_its_producer():
    graph = TaskGraph([task("a"), task("b")], {"b": ["a"]})
    assert ("early read", "b") in faults(graph, [Step("run", "b"), Step("run", "a")])


def test_a_task_twice_and_a_task_never():
    graph = TaskGraph([task("a"), task("b")], {})
    assert faults(graph, [Step("run", "a"), Step("run", "a")]) == {("repeated", "a"), ("missing", "b")}
    collective = TaskGraph([task("c", "expert")], {})
    assert faults(collective, [Step("start", "c")] * 2) == {("repeated", "c")}


def test_a_step_that_names_no_task():
    graph = TaskGraph([task("a")], {})
    assert faults(graph, [Step("run", "a"), Step("run", "z")]) == {("unknown", "z")}


def test_a_wait_for_what_was_never_started():
    graph = window()
    steps = [step for step in steps_of(graph, ORDER) if step.action != "start"]
    assert ("deadlock", "dispatch") in faults(graph, steps)


def test_ranks_that_issue_in_different_orders_hang():
    graph = TaskGraph([task("a", "expert"), task("b", "expert")], {})
    one, other = steps_of(graph, ("a", "b")), steps_of(graph, ("b", "a"))
    simulate(graph, [one, one], Machine(ranks=2)).require_sound()
    found = simulate(graph, [one, other], Machine(ranks=2))
    assert [(fault.kind, fault.rank) for fault in found.faults] == [("deadlock", 0), ("deadlock", 1)]
    assert "collective 0 on the lane expert is b, where another rank is in a" in found.faults[1].text


def test_a_rank_that_leaves_a_collective_out_hangs_the_other():
    graph = TaskGraph([task("a", "expert"), task("b")], {})
    full = steps_of(graph, ("a", "b"))
    found = simulate(graph, [full, [Step("run", "b")]], Machine(ranks=2))
    assert [(fault.kind, fault.rank, fault.task) for fault in found.faults] == [
        ("deadlock", 0, "a"),
        ("missing", 1, "a"),
    ]


@pytest.mark.parametrize(
    ("machine", "found"),
    [
        (Machine(ranks=0), "ranks is 0"),
        (Machine(launch_us=-1.0), "launch_us is -1.0"),
        (Machine(contention={"expert": Contention(collective_stretch=0.5)}), "below 1"),
        (Machine(contention={"expert": Contention(start_behind_long_us=-1)}), "below 0"),
    ],
)
def test_machines_that_do_not_exist(machine, found):
    with pytest.raises(ScheduleError, match=found):
        simulate(window(), steps_of(window(), ORDER), machine)


def test_arguments_for_another_number_of_ranks():
    steps = steps_of(window(), ORDER)
    with pytest.raises(ScheduleError, match="steps of 3 ranks for a machine of 2"):
        simulate(window(), [steps] * 3, Machine(ranks=2))
    with pytest.raises(ScheduleError, match="1 rank_costs for 2 ranks"):
        simulate(window(), steps, Machine(ranks=2), rank_costs=[{}])


def test_contention_comes_from_the_hardware_file():
    h200 = load_hardware("h200")
    found = contention_of(h200, "nccl")
    assert found.stretch == {"matrix": 1.48, "attention": 1.06, "elementwise": 1.23}
    assert (found.start_behind_long_us, found.start_behind_short_us) == pytest.approx((230, 10))
    assert contention_of(h200, "copy_engine").collective_stretch == 1.0
    assert contention_of(load_hardware("b200"), "nccl") is None  # nobody measured it


def test_intervals_are_in_order():
    found = run(window())
    assert all(a.start_us <= b.start_us for a, b in pairwise(found.intervals[0]))
