"""Schedules of random graphs in the simulator, known optima, rules, caps, and the place of each start."""

from itertools import permutations

import pytest

from fxskip.errors import ScheduleError
from fxskip.schedule.derive_backward import derive_backward
from fxskip.schedule.machine import Contention, Machine
from fxskip.schedule.periodic import Periods
from fxskip.schedule.problem import Problem
from fxskip.schedule.simulate import simulate
from fxskip.schedule.solve import solve
from fxskip.schedule.steps import steps_of
from fxskip.schedule.tasks import HOST, TaskGraph
from tests.schedule.graphs import COSTS, decoder, random_graph, task


def seconds(seed):
    """The first candidate alone, and now and then all that take little time."""
    return 0.02 if seed % 8 == 0 else 0.0


def replayed(graph, schedule, ranks=1):
    return simulate(graph, schedule.steps, Machine(ranks=ranks)).require_sound()


def is_issued_early(graph, order):
    """Whether only collectives stand between each collective and the last thing that it had to stand behind."""
    at = {name: k for k, name in enumerate(order)}
    for name in order:
        own = graph[name]
        reads = graph.producers(name)
        if not own.is_collective or any(graph[p].is_collective for p in reads):
            continue
        lane_before = [at[n] for n in order[: at[name]] if graph[n].lane == own.lane]
        behind = max([-1, *(at[p] for p in reads), *lane_before[-1:]])
        if not all(graph[n].is_collective for n in order[behind + 1 : at[name]]):
            return False
    return True


@pytest.mark.parametrize("block", range(20))
def test_random_schedules_are_sound(block):
    for seed in range(50 * block, 50 * block + 50):
        graph = random_graph(seed)
        schedule = solve(graph, seconds=seconds(seed))
        found = replayed(graph, schedule, ranks=2)
        # Two models written apart agree to rounding; the machine has no contention here.
        assert found.step_us == pytest.approx(schedule.makespan_us, abs=1e-6), seed
        assert found.peak_bytes == schedule.peak_bytes or (
            _has_host(graph) and found.peak_bytes < schedule.peak_bytes
        )
        assert schedule.makespan_us >= schedule.lower_bound_us - 1e-6
        assert is_issued_early(graph, schedule.order), seed


def _has_host(graph):
    """Then a value may be given up before the compute stream comes to the next start, which is no host order."""
    return HOST in graph.lanes


@pytest.mark.parametrize("block", range(4))
def test_random_schedules_keep_to_the_cap(block):
    tightened = 0
    for seed in range(50 * block, 50 * block + 50):
        graph = random_graph(seed)
        free = solve(graph, seconds=seconds(seed)).peak_bytes
        cap = max([one.bytes_in_flight for one in graph] + [int(0.7 * free)])
        try:
            schedule = solve(graph, seconds=seconds(seed), max_in_flight_bytes=cap)
        except ScheduleError as error:
            assert "max_in_flight" in str(error)
            continue
        assert replayed(graph, schedule, ranks=2).peak_bytes <= schedule.peak_bytes <= cap
        tightened += cap < free
    assert tightened > 10


@pytest.mark.parametrize("seed", range(60))
def test_corrupted_schedules_are_caught(seed):
    graph = random_graph(seed, least=10)
    steps = solve(graph, seconds=seconds(seed)).steps
    waits = [k for k, step in enumerate(steps) if step.action == "wait" and graph.consumers(step.task)]
    caught = 0
    for k in waits:  # whoever reads it has no wait
        found = simulate(graph, steps[:k] + steps[k + 1 :])
        on_lane = {graph[c].lane for c in graph.consumers(steps[k].task)} <= {graph[steps[k].task].lane, HOST}
        assert found.faults or on_lane  # its own lane is a queue, and the host waits by itself
        caught += bool(found.faults)
    for k in range(len(steps)):
        if steps[k].action != "wait":
            assert simulate(graph, steps[:k] + steps[k + 1 :]).faults
            assert simulate(graph, steps[: k + 1] + steps[k:]).faults
            caught += 2
    swapped = _lane_swapped(graph, steps)
    if swapped is not None:
        assert "deadlock" in {f.kind for f in simulate(graph, [steps, swapped], Machine(ranks=2)).faults}
        caught += 1
    assert caught >= 2 * len(graph)


def _lane_swapped(graph, steps):
    """The steps with two neighbouring starts of one lane exchanged, if there are such."""
    for k, (one, other) in enumerate(zip(steps, steps[1:], strict=False)):
        if one.action == other.action == "start" and graph[one.task].lane == graph[other.task].lane:
            return (*steps[:k], other, one, *steps[k + 2 :])
    return None


def test_two_starts_in_another_order_on_one_rank_hang():
    graph = TaskGraph(
        [task("gate"), task("a", "expert"), task("b", "expert")], {"a": ["gate"], "b": ["gate"]}
    )
    steps = solve(graph).steps
    assert simulate(graph, [steps, _lane_swapped(graph, steps)], Machine(ranks=2)).faults


@pytest.mark.parametrize("seed", range(40))
def test_small_steps_are_optimal(seed):
    graph = random_graph(seed, least=4, most=7)
    best = min(
        simulate(graph, steps_of(graph, order)).step_us
        for order in permutations([one.name for one in graph])
        if all(order.index(p) < order.index(c) for c, producers in graph.needs.items() for p in producers)
    )
    assert solve(graph).makespan_us == pytest.approx(best)


# Makespans of the invented costs for 27 layers with one dense; bounds that CP-SAT proved in the first study.
@pytest.mark.parametrize(
    ("farskip", "backward", "optimum"),
    [(False, False, 24790), (False, True, 42040), (True, False, 19200), (True, True, 38400)],
)
@pytest.mark.parametrize("rule", ["free", "layers", "periodic"])
def test_known_optima(farskip, backward, optimum, rule):
    graph = decoder(27, farskip=farskip)
    schedule = solve(derive_backward(graph) if backward else graph, rule=rule)
    assert schedule.makespan_us == pytest.approx(optimum, rel=1e-9)
    assert schedule.hidden_share == pytest.approx(1.0) or not farskip


@pytest.mark.parametrize("times", [1.5, 2, 3])
def test_heavy_communication_is_where_list_scheduling_loses(times):
    costs = COSTS | {"dispatch": times * COSTS["dispatch"], "combine": times * COSTS["combine"]}
    graph = decoder(27, farskip=True, costs=costs)
    schedule = solve(graph)
    assert schedule.makespan_us == pytest.approx({1.5: 20760, 2: 24660, 3: 32460}[times])
    assert schedule.makespan_us == pytest.approx(schedule.lower_bound_us)


def test_the_same_call_gives_the_same_order():
    graph = derive_backward(decoder(9, farskip=False), split_weights=True)
    assert solve(graph, seconds=60).order == solve(graph, seconds=60).order


def test_a_late_issue_costs_most_of_what_is_hidden():
    graph = decoder(27, farskip=True)
    schedule = solve(graph)
    # Sorted by start alone, a collective that started with a compute task stands behind it.
    by_start = sorted(schedule.order, key=lambda n: (schedule.at[n].start_us, graph[n].is_collective))
    late = simulate(graph, steps_of(graph, by_start)).require_sound()
    communication = sum(one.cost_us for one in graph if one.is_collective)
    compute = sum(one.cost_us for one in graph if not one.is_collective)
    assert schedule.makespan_us == pytest.approx(compute)
    assert late.step_us - compute > 0.4 * communication


@pytest.mark.parametrize("backward", [False, True])
def test_layers_in_order(backward):
    graph = decoder(8, farskip=True)
    graph = derive_backward(graph) if backward else graph
    region = {layer: i for i, layer in enumerate(graph.layers)}
    schedule = solve(graph, rule="layers")
    replayed(graph, schedule)
    furthest = 0
    for name in schedule.order:
        own = graph[name]
        furthest = max(furthest, region[own.layer] - (own.may_cross == "previous"))
        assert region[own.layer] + (own.may_cross == "next") >= furthest
    assert solve(graph).makespan_us <= schedule.makespan_us


@pytest.mark.parametrize("split", [False, True])
def test_layers_of_a_kind_have_one_order(split):
    graph = derive_backward(decoder(9, farskip=True), split_weights=split)
    schedule = solve(graph, rule="periodic")
    replayed(graph, schedule)
    names = {
        layer: [(graph[n].role) for n in schedule.order if graph[n].layer == layer and not graph[n].may_cross]
        for layer in graph.layers
    }
    assert all(names[layer] == names[2] for layer in range(3, 8))
    problem = Problem.of(graph, rule="periodic")
    index = {name: i for i, name in enumerate(problem.names)}
    assert Periods(graph, problem).is_periodic([index[name] for name in schedule.order])


def test_a_task_that_layers_in_order_cannot_place():
    graph = TaskGraph([task("a", layer=1), task("b", layer=0)], {"b": ["a"]})
    with pytest.raises(
        ScheduleError, match=r"b runs with layer 0 at the latest and needs a, which runs with layer 1"
    ):
        solve(graph, rule="layers")
    assert solve(graph).order == ("a", "b")


def test_a_rule_that_does_not_exist():
    with pytest.raises(ScheduleError, match="free, layers, periodic"):
        solve(TaskGraph([task("a")], {}), rule="layer")


def test_a_periodic_order_needs_roles():
    graph = TaskGraph([task("a", role="x"), task("b", role="x")], {})
    with pytest.raises(ScheduleError, match="b has the role 'x', as a has"):
        solve(graph, rule="periodic")


def test_a_cap_below_one_collective():
    graph = decoder(3, farskip=True)
    with pytest.raises(ScheduleError, match="alone holds 1,000 bytes in flight, the cap is 999"):
        solve(graph, max_in_flight_bytes=999)
    assert solve(graph, max_in_flight_bytes=1000).peak_bytes == 1000


def test_a_consumer_of_more_than_the_cap():
    tasks = [task("a", "expert", bytes_in_flight=60), task("b", "expert", bytes_in_flight=60), task("c")]
    graph = TaskGraph(tasks, {"c": ["a", "b"]})
    with pytest.raises(ScheduleError, match="raise max_in_flight"):
        solve(graph, max_in_flight_bytes=100)


# Contention.


def test_a_short_kernel_goes_first_after_a_start():
    tasks = [
        task("gate"),
        task("dispatch", "expert", 300.0),
        task("core", cost_us=400.0, work="attention"),
        task("add", cost_us=20.0, kernel="short", work="elementwise"),
        task("experts", cost_us=50.0),
    ]
    needs = {"dispatch": ["gate"], "core": ["gate"], "add": ["gate"], "experts": ["dispatch"]}
    graph = TaskGraph(tasks, needs)
    machine = Machine(contention={"expert": Contention(230.0, 10.0)})
    order = solve(graph, machine=machine).order
    assert order.index("dispatch") + 1 == order.index("add") < order.index("core")


@pytest.mark.parametrize("rule", ["free", "layers", "periodic"])
def test_contention_is_part_of_what_is_minimised(rule):
    graph = decoder(4, farskip=True)
    stretch = {"matrix": 1.48, "attention": 1.06, "elementwise": 1.23}
    machine = Machine(contention={"expert": Contention(230.0, 10.0, stretch, 1.4)})
    blind = simulate(graph, solve(graph, rule=rule).steps, machine).require_sound()
    aware = solve(graph, rule=rule, machine=machine, seconds=0.5)
    assert simulate(graph, aware.steps, machine).require_sound().step_us == pytest.approx(aware.cost_us)
    assert aware.cost_us < 0.97 * blind.step_us
