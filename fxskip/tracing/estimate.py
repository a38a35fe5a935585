"""The schedules of all layers as one, and what it says of the whole model. Estimated: nothing here was measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from fxskip.schedule.derive_backward import derive_backward
from fxskip.schedule.gradient_sums import HEAD, behind_its_gradients
from fxskip.schedule.machine import Machine
from fxskip.schedule.order_region import RegionSchedule
from fxskip.schedule.overlap import OverlapFigures, overlap_figures
from fxskip.schedule.problem import Problem
from fxskip.schedule.result import Schedule, schedule_of
from fxskip.schedule.tasks import HOST, Task, TaskGraph
from fxskip.tracing.records import Phase

_ARRIVAL = "arrival"
_COUNTS = "counts"


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
    """By phase. The backward runs in the mirror image of the forward's order.

    reductions   all-reduces of gradients in the backward, in the order in which they start; each does so behind the
                 tasks that make its gradients
    """
    graph, order = whole_model(layers)
    machine = layers[0].machine
    found: dict[Phase, Estimate] = {"forward": _estimate(graph, order, machine)}
    if backward:
        needs = {task: _adds_up(task, layers) for task in reductions}
        reverse = derive_backward(_differentiable(graph), reductions=needs)
        mirrored = [f"{name}.bwd" for name in reversed(order) if f"{name}.bwd" in reverse]
        sums = {task.name: reverse.producers(task.name) for task in reductions}
        found["backward"] = _estimate(reverse, behind_its_gradients(mirrored, sums), machine)
    return found


def whole_model(layers: Sequence[RegionSchedule]) -> tuple[TaskGraph, list[str]]:
    """The tasks of all layers, named `layer.role`, and the order in which the host issues them.

    From layer to layer the compute lane keeps its order anyway; what has to be said is who waits for a collective that
    the layer before left in flight.
    """
    tasks: list[Task] = []
    needs: dict[str, set[str]] = {}
    order: list[str] = []
    pending: set[str] = set()
    for layer, region in enumerate(layers):
        graph, copy, roles = region.graph, region.tasks.copy, region.tasks.roles
        own = {t.name: f"{layer}.{t.role}" for t in graph if t.layer == copy and t.role in roles}
        for name, new in own.items():
            producers = graph.producers(name)
            needs[new] = {own[p] for p in producers if p in own}
            if any(p not in own and graph[p].is_collective for p in producers):
                needs[new] |= pending
            tasks.append(replace(graph[name], name=new, layer=layer))
        order += [own[name] for name in region.schedule.order if name in own]
        pending = {
            new
            for name, new in own.items()
            if graph[name].is_collective and not any(c in own for c in graph.consumers(name))
        }
    return TaskGraph(tasks, needs), order


def _adds_up(reduction: Task, layers: Sequence[RegionSchedule]) -> list[str]:
    """The forward tasks whose gradients it adds up. The head, which is no task, comes before all layers."""
    if reduction.role.startswith(HEAD):
        return []
    number = reduction.layer
    return [f"{number}.{role}" for role in layers[number].tasks.gradients_of(reduction.lane)]


def _differentiable(graph: TaskGraph) -> TaskGraph:
    """Without what has no gradient: the counts, and what the host reads of them."""
    kept = [t for t in graph if t.lane != HOST and t.role.partition(".")[0] != _COUNTS]
    names = {task.name for task in kept}
    needs = {name: [p for p in graph.needs.get(name, ()) if p in names] for name in names}
    return TaskGraph(kept, needs)


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
    found: dict[int, str] = {}
    for layer, region in enumerate(layers):
        if layer and f"0.{_ARRIVAL}" in region.graph:
            before = layers[layer - 1]
            own = {t.name for t in before.graph if t.layer == before.tasks.copy}
            found[layer] = next(
                before.graph[name].role
                for name in sorted(own)
                if before.graph[name].is_collective
                and not any(c in own for c in before.graph.consumers(name))
            )
    return found
