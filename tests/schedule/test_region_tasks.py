"""A region's nodes, in the order of a schedule of its tasks."""

from dataclasses import replace
from functools import cache

import networkx as nx
import pytest

from fxskip.analysis import Analysis
from fxskip.errors import PassError, ScheduleError
from fxskip.ir import is_matrix_product, value
from fxskip.parallel import TaskCosts
from fxskip.passes.place import place
from fxskip.passes.split_collectives import flight_kind, is_start, is_wait
from fxskip.passes.verify_flights import verify_flights
from fxskip.schedule.hardware import load_hardware
from fxskip.schedule.order_region import _costs, order_region, schedules_of
from fxskip.schedule.region_tasks import TASK, WAITS_FOR, RegionTasks, region_tasks
from fxskip.schedule.solve_region import region_schedule
from fxskip.schedule.tasks import HOST
from fxskip.spec import Schedule
from tests.schedule.regions import Drawn, declared, region
from tests.zoo import tiny

drawn = cache(region)


def tasks_of(one: Drawn) -> RegionTasks:
    return region_tasks(one.units, _costs(one.units, one.parallel), repeats=one.arriving is not None)


def ordered(one: Drawn, name: str = "test"):
    arriving = one.arriving.digest if one.arriving else None
    return place(one.graph, order_region(one.parallel, arriving, name))


@pytest.mark.parametrize("spec", ["farskip", "identity", "ladder"])
def test_every_node_has_its_place_and_no_flight_is_touched(spec: str) -> None:
    one = drawn("deepseek_v2", spec)
    graph = verify_flights(ordered(one))
    assert sorted(n.name for n in graph.nodes) == sorted(n.name for n in one.graph.nodes)
    assert [n.name for n in graph.nodes] != [n.name for n in one.graph.nodes]


def test_tasks_cover_what_costs_something() -> None:
    one = drawn("deepseek_v2", "farskip")
    tasks = tasks_of(one)
    placed = {node for units in tasks.roles.values() for unit in units for node in unit.nodes}
    heavy = [n.name for n in one.graph.nodes if is_matrix_product(n)]
    names = {n.name for n in placed}
    assert len(heavy) > 8 and set(heavy) <= names
    lanes = {task.role: task.lane for task in tasks.graph}
    assert (lanes["dispatch"], lanes["combine"], lanes["counts"]) == ("expert",) * 3
    assert lanes["routing"] == HOST


def test_the_combine_is_read_in_the_next_layer() -> None:
    """By what finishes the stream, and by nothing in its own layer."""
    tasks = tasks_of(drawn("deepseek_v2", "farskip"))
    readers = tasks.graph.consumers("1.combine")
    assert readers and {tasks.graph[name].layer for name in readers} == {2}
    attention = [t.name for t in tasks.graph if t.layer == 2 and t.role.startswith("attention")]
    assert attention and not set(attention) & set(readers)


def test_stock_connectivity_reads_it_at_home() -> None:
    one = drawn("deepseek_v2", "identity")
    tasks = tasks_of(one)
    assert one.arriving is not None  # it may cross as well; attention then waits for it first of all
    assert {tasks.graph[name].layer for name in tasks.graph.consumers("1.combine")} == {2}


@pytest.mark.parametrize("spec", ["farskip", "identity"])
def test_sums_of_gradients_are_collectives_of_the_backward_alone(spec: str) -> None:
    """Two values enter what only this rank's experts do, hidden states and routing weights; one is added up."""
    one = drawn("deepseek_v2", spec, exchange="all_reduce")
    tasks = tasks_of(one)
    forward = {t.role: t for t in tasks.graph if t.layer == tasks.copy}
    gradients = {t.role: t for t in tasks.gradients if t.layer == tasks.copy}
    assert {r for r, t in forward.items() if t.is_collective} == {"reduce"}
    assert {r for r, t in gradients.items() if t.is_collective} == {"enter", "enter.2"}
    assert gradients["reduce"].lane == "compute" and not gradients["reduce"].has_weights
    assert {tasks.lanes[r] for r in ("reduce", "enter", "enter.2")} == {"expert"}
    starts = [n for n in one.graph.nodes if is_start(n) and flight_kind(n)[0] == "enter"]
    assert len(starts) == 2
    h200 = load_hardware("h200")
    for task, start in zip((gradients["enter"], gradients["enter.2"]), starts, strict=True):
        sent = value(start).numel() * value(start).element_size()  # a ring of two sends half of it twice
        assert task.bytes_in_flight == sent
        assert task.cost_us == pytest.approx(
            1e6 * (sent / h200.domain.bytes_per_s(2) + h200.collective_start_s.value)
        )


@pytest.mark.parametrize("exchange", ["all_to_all", "all_reduce"])
def test_gradients_come_back_through_all_that_computes(exchange: str) -> None:
    """And through nothing that the host or the counts do."""
    tasks = tasks_of(drawn("deepseek_v2", "farskip", exchange=exchange))
    sums = set(tasks.sums_back)
    computing = {
        t.role
        for t in tasks.graph
        if t.lane == "compute" and not sums.issuperset(n for u in tasks.roles[t.role] for n in u.nodes)
    }
    assert computing <= {t.role for t in tasks.gradients}
    assert not {"counts", "routing"} & {t.role for t in tasks.gradients}
    assert set(tasks.gradients_of("data")) == computing
    experts = tasks.gradients_of("expert_data")
    assert len(experts) == 1
    producers = {tasks.gradients[p].role for p in tasks.gradients.producers(f"{tasks.copy}.{experts[0]}")}
    assert ("dispatch" if exchange == "all_to_all" else "moe2.") in " ".join(producers)


def test_no_task_stands_on_both_sides_of_a_sum_of_gradients() -> None:
    """Its steps forward and backward would depend on each other in a circle."""
    one = drawn("deepseek_v2", "farskip", exchange="all_reduce")
    graph = ordered(one, "sums")
    steps = nx.DiGraph()
    step = {n: n.meta.get(WAITS_FOR, n.meta.get(TASK, ("",))[0]) for n in graph.nodes}
    named = {n: f"{s}.wait" if WAITS_FOR in n.meta else s for n, s in step.items()}
    for node in graph.nodes:
        steps.add_edges_from(
            (named[a], named[node])
            for a in node.all_input_nodes
            if named[a] and named[node] and named[a] != named[node]
        )
    assert {"enter", "enter.wait", "enter.2", "enter.2.wait", "reduce"} <= set(steps)
    assert nx.is_directed_acyclic_graph(steps)


def test_work_stands_between_start_and_wait() -> None:
    """With experts large enough that exchanges are worth hiding: attention runs under the dispatch."""
    one = drawn("deepseek_v2", "farskip", scale=1000)
    nodes = list(ordered(one).nodes)
    dispatch = next(i for i, n in enumerate(nodes) if is_start(n))
    wait = next(i for i, n in enumerate(nodes) if is_wait(n) and n.args[0] is nodes[dispatch])
    assert any(is_matrix_product(n) for n in nodes[dispatch:wait])


def test_a_start_stands_right_behind_its_last_producer() -> None:
    """A collective waits for all compute that was enqueued before it."""
    for spec in ("farskip", "ladder"):
        one = drawn("deepseek_v2", spec)
        tasks = tasks_of(one)
        order = region_schedule(tasks, one.parallel).order
        for at, name in enumerate(order):
            task = tasks.graph[name]
            if task.is_collective:
                producers = set(tasks.graph.producers(name))
                since = [order[k] for k in range(at) if order[k] in producers]
                between = order[order.index(since[-1]) + 1 : at] if since else ()
                assert not [n for n in between if not tasks.graph[n].is_collective], name


@pytest.mark.parametrize("transport", ["gloo", "nccl"])
def test_all_ranks_find_the_same_order(transport: str) -> None:
    one = drawn("deepseek_v2", "farskip", transport=transport)
    again = region("deepseek_v2", "farskip", transport=transport)
    assert [n.name for n in ordered(one).nodes] == [n.name for n in ordered(again).nodes]


def test_the_schedule_is_noted_under_the_regions_name() -> None:
    ordered(drawn("deepseek_v2", "farskip"), "noted")
    (found,) = schedules_of("noted")
    records = {record.name.partition(".")[2] for record in found.schedule.collectives}
    assert records == {"counts", "dispatch", "combine"}
    assert schedules_of("never built") == []


def test_cp_sat_orders_it_too() -> None:
    pytest.importorskip("ortools")
    one = drawn("deepseek_v2", "farskip")
    tasks = tasks_of(one)
    wish = replace(one.parallel, schedule=Schedule(solver="cp_sat"))
    found = region_schedule(tasks, wish)
    assert found.makespan_us <= region_schedule(tasks, one.parallel).makespan_us * (1 + 1e-9)


def test_measured_costs_replace_estimates() -> None:
    one = drawn("deepseek_v2", "farskip")
    tasks = tasks_of(one)
    roles = {task.role for task in tasks.graph}
    wish = replace(one.parallel, schedule=Schedule(costs="mine/costs.json"))
    sevens = tuple((role, 7.0) for role in sorted(roles))
    found = region_schedule(tasks, replace(wish, measured=TaskCosts(16, sevens)))
    assert {round(one.end_us - one.start_us, 6) for one in found.placed} == {7.0}
    lacking = tuple((role, us) for role, us in sevens if role != "dispatch")
    with pytest.raises(ScheduleError, match="no cost for dispatch\n.*mine/costs.json"):
        region_schedule(tasks, replace(wish, measured=TaskCosts(16, lacking)))


def test_a_cap_that_no_order_keeps() -> None:
    one = drawn("deepseek_v2", "farskip")
    costs = _costs(one.units, one.parallel)
    tasks = region_tasks(one.units, costs, repeats=True)
    huge = replace(tasks, graph=_with_bytes(tasks, 1 << 40))
    with pytest.raises(ScheduleError, match="bytes in flight"):
        region_schedule(huge, one.parallel)


def _with_bytes(tasks: RegionTasks, held: int):
    from fxskip.schedule.tasks import TaskGraph

    changed = [replace(t, bytes_in_flight=held) if t.bytes_in_flight else t for t in tasks.graph]
    return TaskGraph(changed, tasks.graph.needs)


@pytest.mark.parametrize("model_type", ["deepseek_v2", "mixtral"])
def test_experts_that_run_as_they_are_cost_what_their_products_do(model_type: str) -> None:
    """As in a parallel student: the products that the graph of the whole model shows are hidden in one node."""
    model = tiny(model_type, layers=2)
    experts = next(m for m in model.modules() if type(m).__name__.endswith("Experts"))
    shown = Analysis.of_original("test", model, None).costs.blocks[-1].parts
    with declared(type(experts)):
        hidden = Analysis.of_original("test", model, None).costs.blocks[-1].parts
    assert hidden == shown
    assert next(p for p in hidden if p.name == "routed").flops_per_token


def test_an_order_that_leaves_something_out_is_refused() -> None:
    one = drawn("deepseek_v2", "farskip")
    with pytest.raises(PassError, match="an order of"):
        place(one.graph, lambda units: units[:-1])
    with pytest.raises(PassError, match="would run before"):
        place(one.graph, lambda units: units[::-1])
