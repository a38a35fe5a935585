"""The order in which a region's backward pass runs, from a schedule of its own.

Tasks are those of the forward pass, against the direction of the data. A collective is one task, but two steps of the
region's program: the backward of its *wait* issues the reverse collective, that of its *start* waits for it. A sum of
values, `reduce`, has nothing to send back; a sum of gradients, `enter`, is sent in the backward alone.

    forward    permute, dispatch | attention | dispatch.wait, experts, combine | shared experts | combine.wait ...
    backward   ... combine.wait | shared experts | combine, experts.dgrad, dispatch.wait | experts.wgrad | dispatch ...
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace

from fxskip.parallel import RegionParallel
from fxskip.schedule.derive_backward import derive_backward
from fxskip.schedule.gradient_sums import GRADIENT_LANES, gradient_task
from fxskip.schedule.region_tasks import ARRIVAL, RegionTasks, wait_step
from fxskip.schedule.result import Schedule
from fxskip.schedule.solve_region import gradient_us, measured_graph, solved
from fxskip.schedule.tasks import Task, TaskGraph

_DGRAD, _WGRAD, _WHOLE = ".dgrad", ".wgrad", ".bwd"


@dataclass(frozen=True)
class BackwardSchedule:
    """What the backward pass of one capture of a region is ordered by."""

    graph: TaskGraph
    """Of one region, or of several in a row."""
    schedule: Schedule
    """Of the tasks of `graph`."""
    events: tuple[str, ...]
    """The steps of the region's program in the order in which they run backward; `name.dgrad`, and later
    `name.wgrad`, where weight gradients are split off."""


def order_backward(tasks: RegionTasks, parallel: RegionParallel, split: Collection[str]) -> BackwardSchedule:
    """The schedule of a region's backward pass.

    split   roles of the tasks whose weight gradients can be computed apart

    Weight gradients stay in the region of their layer: autograd runs layer after layer. Raises ScheduleError where
    no order keeps to `max_in_flight_mib`.
    """
    forward = with_weights(measured_graph(tasks.gradients, parallel), split)
    reductions = _reductions(tasks, parallel)
    graph = _crossing(derive_backward(forward, split_weights=True, reductions=reductions), tasks)
    schedule = solved(_without_gradient_bytes(graph), tasks.copies, parallel)
    records = [replace(one, bytes=graph[one.name].bytes_in_flight) for one in schedule.collectives]
    schedule = replace(schedule, collectives=tuple(records))
    return BackwardSchedule(graph, schedule, tuple(_events(tasks, schedule)))


def _reductions(tasks: RegionTasks, parallel: RegionParallel) -> dict[Task, list[str]]:
    """The all-reduces of gradients of all copies, and the forward tasks that each adds up gradients of."""
    return {
        gradient_task(one, copy, gradient_us(one, parallel)): [
            f"{copy}.{r}" for r in tasks.gradients_of(one.lane)
        ]
        for copy in range(tasks.copies)
        for one in parallel.gradients
    }


def _without_gradient_bytes(graph: TaskGraph) -> TaskGraph:
    """For the cap: where gradients in flight reach it, the runtime waits for the oldest, whatever the order."""
    tasks = [replace(t, bytes_in_flight=0) if t.lane in GRADIENT_LANES else t for t in graph]
    return TaskGraph(tasks, graph.needs, backward=True)


def with_weights(graph: TaskGraph, split: Collection[str]) -> TaskGraph:
    """The graph with weights that can be split off in the tasks of these roles, and in no others."""
    return TaskGraph([replace(t, has_weights=t.role in split) for t in graph], graph.needs)


def _crossing(graph: TaskGraph, tasks: RegionTasks) -> TaskGraph:
    """The reverse of a collective that arrives in the next layer is issued in that layer, which runs before."""
    roles = {role + _WHOLE for role in tasks.leaving}
    moved = [_issued_before(t) if t.role in roles and t.is_collective else t for t in graph]
    return TaskGraph(moved, graph.needs, backward=True)


def _issued_before(task: Task) -> Task:
    return replace(task, may_cross="previous")


def _events(tasks: RegionTasks, schedule: Schedule) -> Iterator[str]:
    """The steps of one region between others, in the order of the schedule."""
    own = max(0, min(1, tasks.copies - 1))  # backward runs from the last copy to copy 0: the last but one
    arriving = {f"0.{ARRIVAL}{_WHOLE}"} if tasks.copies == 1 else set()
    arriving |= {f"{own - 1}.{role}{_WHOLE}" for role in tasks.leaving}
    sums = {one.name for one in schedule.placed if one.lane in GRADIENT_LANES}
    for step in schedule.steps:
        if step.task in sums:  # hooks on parameters start them
            continue
        layer, _, named = step.task.partition(".")
        role = named.removesuffix(_WHOLE)
        if step.task in arriving:
            if step.action == "start":
                yield wait_step(ARRIVAL)
        elif layer != str(own):
            continue
        elif step.action == "start":
            if role not in tasks.leaving:
                yield wait_step(role)
        else:  # a task that runs, or the wait for a reverse collective
            yield role


def complete_events(
    events: Iterable[str], steps: Iterable[str], split: Collection[str], readers: dict[str, set[str]]
) -> tuple[str, ...]:
    """The events as an order of all `steps` of a program: the same order where the data allow it.

    readers   for each step those that read what it makes, whose backward has to come before its own

    Steps without a task, which carry no gradient or cost nothing, run as soon as they may. A step that the schedule
    splits and `split` does not name is one event.
    """
    wanted: dict[str, int] = {}
    for event in events:
        wanted.setdefault(event, len(wanted))
    found: list[str] = []
    left = list(steps)
    done: set[str] = set()
    while left:
        ready = [s for s in left if readers[s] <= done]
        step = min(ready, key=lambda s: wanted.get(s, wanted.get(s + _DGRAD, -1)))
        left.remove(step)
        done.add(step)
        found.append(step + _DGRAD if step in split else step)
    return tuple(_with_weights(found, wanted))


def _with_weights(order: list[str], wanted: dict[str, int]) -> list[str]:
    """Put each weight gradient behind what the schedule has in front of it."""
    halves = [event for event in order if event.endswith(_DGRAD)]
    for event in sorted(halves, key=lambda e: wanted.get(e.removesuffix(_DGRAD) + _WGRAD, 0)):
        later = event.removesuffix(_DGRAD) + _WGRAD
        before = {e for e in order if e in wanted and wanted[e] < wanted.get(later, 0)} | {event}
        order.insert(1 + max(order.index(e) for e in before), later)
    return order
