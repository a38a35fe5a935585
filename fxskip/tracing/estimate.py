"""The schedules of all layers as one, and what it says of the whole model. Estimated: nothing here was measured."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import networkx as nx

from fxskip.schedule.derive_backward import derive_backward
from fxskip.schedule.gradient_sums import HEAD, behind_its_gradients
from fxskip.schedule.machine import Machine
from fxskip.schedule.order_backward import with_weights
from fxskip.schedule.order_region import RegionSchedule
from fxskip.schedule.overlap import OverlapFigures, overlap_figures
from fxskip.schedule.problem import Problem
from fxskip.schedule.region_tasks import ARRIVAL, is_wait_step
from fxskip.schedule.result import Schedule, schedule_of
from fxskip.schedule.tasks import COMPUTE, Task, TaskGraph
from fxskip.tracing.records import Phase


@dataclass(frozen=True)
class Estimate:
    """Of one phase of the whole model, on any rank."""

    schedule: Schedule
    """Times by the simple model, in which lanes leave each other alone."""
    figures: OverlapFigures
    """Simulated, with contention where the hardware file knows of it."""


def estimated(
    layers: Sequence[RegionSchedule], *, backward: bool, reductions: Sequence[Task] = ()
) -> dict[Phase, Estimate]:
    """By phase. The backward runs in the order of the layers' own schedules of it; where they have none, in the mirror
    image of the forward's, in which a collective starts when what it sends is there.

    reductions   all-reduces of gradients in the backward, in the order in which they start; each does so behind the
                 tasks that make its gradients
    """
    graph, order = whole_model(layers), forward_order(layers)
    machine = layers[0].machine
    found: dict[Phase, Estimate] = {"forward": _estimate(graph, order, machine)}
    if backward:
        needs = {task: _adds_up(task, layers) for task in reductions}
        reverse = derive_backward(whole_model(layers, backward=True), split_weights=True, reductions=needs)
        sums = {task.name: reverse.producers(task.name) for task in reductions}
        host = [name for name in backward_order(layers, reverse) if name not in sums]
        found["backward"] = _estimate(reverse, behind_its_gradients(host, sums), machine)
    return found


def whole_model(layers: Sequence[RegionSchedule], *, backward: bool = False) -> TaskGraph:
    """The tasks of all layers, named `layer.role`.

    From layer to layer the compute lane keeps its order anyway; what has to be said is who waits for a collective that
    the layer before left in flight.

    backward   those that gradients come back through, with weight gradients to be split off where a layer does so
    """
    tasks: list[Task] = []
    needs: dict[str, set[str]] = {}
    pending: set[str] = set()
    for layer, region in enumerate(layers):
        graph = with_weights(region.gradients, _split(region)) if backward else region.graph
        own = _own(layer, region, graph)
        for name, new in own.items():
            producers = graph.producers(name)
            needs[new] = {own[p] for p in producers if p in own}
            if any(p not in own and graph[p].is_collective for p in producers):
                needs[new] |= pending
            tasks.append(replace(graph[name], name=new, layer=layer))
        pending = {f"{layer}.{role}" for role in region.tasks.leaving}
    return TaskGraph(tasks, needs)


def _own(layer: int, region: RegionSchedule, graph: TaskGraph) -> dict[str, str]:
    """The tasks of a region between others, with their names in the whole model."""
    copy = region.tasks.copy
    return {t.name: f"{layer}.{t.role}" for t in graph if t.layer == copy and t.role != ARRIVAL}


def _split(region: RegionSchedule) -> set[str]:
    """The roles whose weight gradients run apart."""
    events = region.backward.events if region.backward is not None else ()
    return {event.removesuffix(".wgrad") for event in events if event.endswith(".wgrad")}


def forward_order(layers: Sequence[RegionSchedule]) -> list[str]:
    """The tasks of `whole_model` in the order in which the host issues them."""
    return [name for layer, region in enumerate(layers) for name in _order_of(layer, region)]


def _order_of(layer: int, region: RegionSchedule) -> list[str]:
    own = _own(layer, region, region.graph)
    return [own[name] for name in region.schedule.order if name in own]


def backward_order(layers: Sequence[RegionSchedule], reverse: TaskGraph) -> list[str]:
    """The tasks of the backward, `reverse`, in the order in which the host issues them."""
    order: list[str] = []
    for layer in reversed(range(len(layers))):
        if layers[layer].backward is not None:
            order += [name for name in _issued(layer, layers) if name in reverse]
        else:
            mirrored = [f"{name}.bwd" for name in reversed(_order_of(layer, layers[layer]))]
            # Collectives are left out: they start as soon as they can.
            order += [name for name in mirrored if name in reverse and not reverse[name].is_collective]
    position = {name: at for at, name in enumerate(order)}
    return list(nx.lexicographical_topological_sort(reverse.digraph, key=lambda n: position.get(n, -1)))


def _issued(layer: int, layers: Sequence[RegionSchedule]) -> Iterator[str]:
    """What the events of a layer's backward issue: the steps that wait in the forward start collectives."""
    backward = layers[layer].backward
    assert backward is not None
    lanes = {task.role: task.lane for task in layers[layer].gradients}
    for event in backward.events:
        role = event.removesuffix(".wait")
        if role == ARRIVAL:
            yield from (f"{layer - 1}.{left}.bwd" for left in sorted(layers[layer - 1].tasks.leaving))
        elif is_wait_step(event):
            yield f"{layer}.{role}.bwd"
        elif event.endswith((".dgrad", ".wgrad")):
            yield f"{layer}.{event}"
        elif lanes.get(event) == COMPUTE:
            yield f"{layer}.{event}.bwd"


def _adds_up(reduction: Task, layers: Sequence[RegionSchedule]) -> list[str]:
    """The forward tasks whose gradients it adds up. The head, which is no task, comes before all layers."""
    if reduction.role.startswith(HEAD):
        return []
    number = reduction.layer
    return [f"{number}.{role}" for role in layers[number].tasks.gradients_of(reduction.lane)]


def _estimate(graph: TaskGraph, order: Sequence[str], machine: Machine | None) -> Estimate:
    problem = Problem.of(graph)
    index = {name: i for i, name in enumerate(problem.names)}
    found = schedule_of(
        graph, problem, [index[name] for name in order], rule="free", method="the layers' orders", cost_us=0.0
    )
    figures = overlap_figures(graph, found.steps, machine)
    return Estimate(replace(found, cost_us=figures.step_us), figures)


def collective_behind(layers: Sequence[RegionSchedule]) -> dict[int, str]:
    """For each layer whose tasks wait for something that arrives: the task of the layer before that started it."""
    return {
        layer: min(layers[layer - 1].tasks.leaving)
        for layer, region in enumerate(layers)
        if layer and f"0.{ARRIVAL}" in region.graph
    }
