"""What a schedule says of each collective."""

import pytest

from fxskip.schedule.problem import Problem
from fxskip.schedule.result import schedule_of
from fxskip.schedule.solve import solve
from fxskip.schedule.tasks import TaskGraph
from tests.schedule.graphs import decoder, random_graph, task


def record(tasks, needs, name):
    schedule = solve(TaskGraph(tasks, needs))
    return next(one for one in schedule.collectives if one.name == name)


def test_a_hidden_collective():
    tasks = [
        task("gate"),
        task("dispatch", "expert", 40.0, bytes_in_flight=7, layer=3),
        task("core", cost_us=60.0),
    ]
    needs = {"dispatch": ["gate"], "core": ["gate"], "experts": ["dispatch"]}
    found = record([*tasks, task("experts")], needs, "dispatch")
    assert (found.issued_after, found.waited_by, found.bytes, found.layer) == ("gate", "experts", 7, 3)
    assert (found.start_us, found.end_us, found.cost_us) == (10, 50, 40)
    assert found.hidden_by == (("core", 40.0),)
    assert (found.exposed_us, found.reason) == (0, "")


@pytest.mark.parametrize(
    ("tasks", "needs", "reason"),
    [
        (
            [task("c", "ep"), task("u")],
            {"u": ["c"]},
            "its only consumer u needs it next and nothing else is ready",
        ),
        (
            [task("c", "ep"), task("u"), task("v")],
            {"u": ["c"], "v": ["c"]},
            "its consumer u needs it next and nothing else is ready",
        ),
        ([task("c", "ep")], {}, "no compute is left to run"),
        (
            [task("c", "ep"), task("d", "tp", 15.0), task("u")],
            {"u": ["c", "d"], "d": []},
            "its only consumer u needs it next and nothing else is ready",
        ),
        (
            [task("c", "ep", 5.0), task("d", "tp", 15.0), task("u"), task("v")],
            {"u": ["d"], "v": ["c", "u"]},
            "u comes next, waits for d, and nothing else is ready",
        ),
        (
            [task("h", "host", 8.0), task("c", "ep", 12.0), task("u", cost_us=20.0), task("v")],
            {"u": ["h"], "v": ["c"]},
            "u comes next, waits for h, and nothing else is ready",
        ),
    ],
)
def test_why_nothing_hides_it(tasks, needs, reason):
    assert record(tasks, needs, "c").reason == reason


def test_compute_that_is_ready_and_kept_back_is_named():
    # The chain of c is the long one: x would be in its way.
    tasks = [task("g", cost_us=1.0), task("c", "ep", 10.0), task("u", cost_us=90.0), task("d", "ep", 95.0)]
    tasks += [task("x", cost_us=80.0), task("v", cost_us=5.0)]
    needs = {"c": ["g"], "u": ["c"], "d": ["u"], "v": ["d"]}
    found = record(tasks, needs, "c")
    assert found.reason == "u is to run as soon as it can, and x (80 us) stands behind it"


@pytest.mark.parametrize(
    ("second", "reads", "reason"),
    [
        (task("h", "host", 40.0), [], "u comes next, behind h of the host"),
        (task("d", "tp", 5.0), ["c"], "u comes next, behind the issue of d, which reads c"),
    ],
)
def test_compute_behind_something_else_than_its_needs(second, reads, reason):
    graph = TaskGraph([task("c", "ep", 60.0), second, task("u")], {second.name: reads})
    problem = Problem.of(graph)
    order = [problem.names.index(name) for name in ("c", second.name, "u")]
    schedule = schedule_of(graph, problem, order, rule="free", method="by hand", cost_us=0.0)
    assert schedule.collectives[0].reason == reason


@pytest.mark.parametrize("seed", range(30))
def test_hidden_and_exposed_add_up(seed):
    schedule = solve(random_graph(seed), seconds=0)
    for one in schedule.collectives:
        hidden_us = sum(us for _, us in one.hidden_by)
        assert hidden_us + one.exposed_us == pytest.approx(one.cost_us, abs=1e-5)
        assert bool(one.reason) == (one.exposed_us > 0)
        assert one.end_us - one.start_us == pytest.approx(one.cost_us)


def test_the_shares_of_a_schedule():
    schedule = solve(decoder(5, farskip=False))
    assert schedule.exposed_us == pytest.approx(sum(one.exposed_us for one in schedule.collectives))
    assert schedule.hidden_share == pytest.approx(1 - schedule.exposed_us / (8 * 150))
    assert solve(TaskGraph([task("a")], {})).hidden_share == 1.0
