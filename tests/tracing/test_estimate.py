"""The schedules of layers as one of the whole model, against the simulator and the layers' own."""

from dataclasses import replace
from functools import cache

import pytest

from fxskip.parallel import GradientSum, RegionParallel
from fxskip.schedule.gradient_sums import gradient_task
from fxskip.schedule.machine import Contention, Machine
from fxskip.schedule.order_backward import order_backward
from fxskip.schedule.order_region import RegionSchedule, _costs
from fxskip.schedule.region_tasks import RegionTasks, region_tasks
from fxskip.schedule.simulate import simulate
from fxskip.schedule.solve_region import region_schedule
from fxskip.schedule.tasks import DATA, EXPERT_DATA
from fxskip.tracing.estimate import collective_behind, estimated, forward_order, whole_model
from tests.schedule.regions import region

LAYERS = 4


@cache
def layer(spec: str) -> RegionSchedule:
    one = region("deepseek_v2", spec)
    tasks = region_tasks(one.units, _costs(one.units, one.parallel), repeats=one.arriving is not None)
    return scheduled(tasks, one.parallel)


def scheduled(tasks: RegionTasks, parallel: RegionParallel) -> RegionSchedule:
    return RegionSchedule("test", tasks, tasks.graph, tasks.gradients, None, region_schedule(tasks, parallel))


@pytest.mark.parametrize("spec", ["farskip", "identity"])
def test_it_is_sound_and_has_each_layer_once(spec):
    layers = [layer(spec)] * LAYERS
    graph, order = whole_model(layers), forward_order(layers)
    roles = set(layers[0].tasks.roles)
    assert sorted(order) == sorted(f"{number}.{role}" for number in range(LAYERS) for role in roles)
    assert [name.partition(".")[0] for name in order] == sorted(name.partition(".")[0] for name in order)
    steps = estimated(layers, backward=False)["forward"].schedule.steps
    assert simulate(graph, steps, Machine(ranks=2)).faults == ()


def test_contention_is_in_the_figures():
    """Orders and times of the simple model are the same; what is simulated is slower."""
    alone, beside = (
        estimated([replace(layer("farskip"), machine=machine)] * 2, backward=False)["forward"]
        for machine in (None, Machine(contention={"expert": Contention(collective_stretch=2.0)}))
    )
    assert beside.schedule.placed == alone.schedule.placed
    assert beside.figures.collective_us > alone.figures.collective_us


def test_a_combine_in_flight_is_waited_for_in_the_next_layer():
    graph = whole_model([layer("farskip")] * LAYERS)
    for number in range(LAYERS - 1):
        readers = graph.consumers(f"{number}.combine")
        assert readers and {graph[name].layer for name in readers} == {number + 1}
    assert graph.consumers(f"{LAYERS - 1}.combine") == ()


def test_compute_adds_up():
    """Of all layers' tasks, each once: in the forward as the layer has them, in the backward twice that."""
    one = layer("farskip")
    own = [one.graph[f"{one.tasks.copy}.{role}"] for role in one.tasks.roles]
    compute = sum(task.cost_us for task in own if task.lane == "compute")
    found = estimated([one] * LAYERS, backward=True)
    for phase, factor in (("forward", 1), ("backward", 2)):
        placed = [p for p in found[phase].schedule.placed if p.lane == "compute"]
        assert sum(p.end_us - p.start_us for p in placed) == pytest.approx(LAYERS * factor * compute)


def test_the_backward_is_the_mirror_image_without_counts():
    """A reverse exchange starts when its gradient is there: where the forward one was waited for."""
    found = estimated([layer("farskip")] * LAYERS, backward=True)
    forward = list(found["forward"].schedule.order)
    backward = found["backward"].schedule
    mirrored = [name.removesuffix(".bwd") for name in reversed(backward.order)]
    left = [n for n in forward if n.partition(".")[2] not in ("counts", "routing")]
    exchanges = {n for n in left if n.partition(".")[2] in ("dispatch", "combine")}
    assert [n for n in mirrored if n not in exchanges] == [n for n in left if n not in exchanges]
    assert sorted(mirrored) == sorted(left) and len(left) == len(forward) - 2 * LAYERS
    readers = {one.name: one for one in found["forward"].schedule.collectives}
    for one in backward.collectives:
        reader = readers[one.name.removesuffix(".bwd")].waited_by
        assert reader is None or one.issued_after == f"{reader}.bwd"


def explicit(tasks: RegionTasks, parallel: RegionParallel) -> RegionSchedule:
    """A layer's, with an order of its backward."""
    split = {task.role for task in tasks.graph if task.has_weights}
    return replace(scheduled(tasks, parallel), backward=order_backward(tasks, parallel, split))


def test_an_explicit_backward_is_that_of_the_layers():
    """In the order of their events; what a layer issues for the one before it stands among its own tasks."""
    one = region("deepseek_v2", "farskip")
    tasks = region_tasks(one.units, _costs(one.units, one.parallel), repeats=True)
    own = explicit(tasks, one.parallel)
    assert own.backward is not None
    found = estimated([own] * LAYERS, backward=True)["backward"].schedule
    issued = [name for name in found.order if name.startswith("1.") or name == "0.combine.bwd"]
    want = {"dispatch.wait": "1.dispatch.bwd", "arrival.wait": "0.combine.bwd", "dispatch": "", "combine": ""}
    wanted = [
        want.get(event, f"1.{event}" if event.endswith("grad") else f"1.{event}.bwd")
        for event in own.backward.events
    ]
    assert [n for n in issued if n != "1.combine.bwd"] == [n for n in wanted if n]
    assert (
        issued.index("1.combine.bwd") == 0
        and found.at["1.combine.bwd"].start_us < found.at[issued[1]].start_us
    )
    assert any(name.endswith(".wgrad") for name in found.order)
    mirrored = estimated([scheduled(tasks, one.parallel)] * LAYERS, backward=True)["backward"].schedule
    compute = [sum(p.end_us - p.start_us for p in s.placed if p.lane == "compute") for s in (found, mirrored)]
    assert compute[0] == pytest.approx(compute[1])


def test_the_forward_alone():
    assert set(estimated([layer("farskip")] * 2, backward=False)) == {"forward"}


def test_what_arrives_in_a_layer_of_another_kind():
    """Such a layer is looked at alone, and has a task for what is under way when it begins."""
    one = region("deepseek_v2", "farskip")
    tasks = region_tasks(one.units, _costs(one.units, one.parallel), repeats=False)
    last = scheduled(tasks, one.parallel)
    assert "0.arrival" in last.graph
    layers = [layer("farskip"), layer("farskip"), last]
    assert collective_behind(layers) == {2: "combine"}
    graph, order = whole_model(layers), forward_order(layers)
    assert "2.arrival" not in order
    assert {graph[name].layer for name in graph.consumers("1.combine")} == {2}


def test_gradients_are_added_up_behind_what_makes_them():
    """Head first, a layer's while the one before it runs backward, the embedding's at the end, exposed."""
    sums = [
        GradientSum(role, lane, 1 << 20, 2)
        for role, lane in (("head_gradients", DATA), ("gradients", DATA), ("embedding_gradients", DATA))
    ]
    head, own, embedding = sums
    experts = GradientSum("expert_gradients", EXPERT_DATA, 1 << 18, 2)
    layers = [layer("farskip")] * LAYERS
    last = LAYERS - 1
    reductions = [gradient_task(head, last, 30.0)]
    for number in reversed(range(LAYERS)):
        reductions += [gradient_task(experts, number, 5.0), gradient_task(own, number, 20.0)]
    reductions += [gradient_task(embedding, 0, 10.0)]
    found = estimated(layers, backward=True, reductions=reductions)["backward"]
    order = found.schedule.order
    compute = [p for p in found.schedule.placed if p.lane == "compute"]
    at = found.schedule.at
    for number in range(LAYERS):
        finished = max(p.end_us for p in compute if p.name.startswith(f"{number}."))
        assert at[f"{number}.gradients"].start_us >= finished
        mlp = [p.end_us for p in compute if p.name.startswith(f"{number}.") and p.end_us > 0]
        assert min(mlp) < at[f"{number}.expert_gradients"].start_us < finished
    sent = [name for name in order if at[name].lane == DATA]
    assert sent == [f"{last}.head_gradients", *(f"{n}.gradients" for n in reversed(range(LAYERS))),
                    "0.embedding_gradients"]  # fmt: skip
    records = {one.name: one for one in found.schedule.collectives}
    assert (records["1.gradients"].bytes, records["1.gradients"].cost_us) == (1 << 20, 20.0)
    assert records["1.gradients"].waited_by is None
    assert records["0.embedding_gradients"].reason == "no compute is left to run"
