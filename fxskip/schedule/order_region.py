"""The order in which a region's nodes run, from a schedule of its tasks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from fxskip.collectives.border import leave_pending
from fxskip.collectives.routing import unpermute
from fxskip.ir import value
from fxskip.parallel import RegionParallel
from fxskip.passes.dependencies import Unit
from fxskip.schedule.hardware import load_hardware
from fxskip.schedule.machine import Machine
from fxskip.schedule.node_costs import NodeCosts
from fxskip.schedule.order_backward import BackwardSchedule
from fxskip.schedule.region_tasks import RegionTasks, region_tasks
from fxskip.schedule.result import Schedule
from fxskip.schedule.sizes import product
from fxskip.schedule.solve_region import machine_of, measured_graph, region_schedule
from fxskip.schedule.tasks import TaskGraph


@dataclass
class RegionSchedule:
    """What one capture of a region was ordered by."""

    region: str
    """Name of the region function."""
    tasks: RegionTasks
    graph: TaskGraph
    """The tasks' graph, with the costs that the spec asks for."""
    gradients: TaskGraph
    """That of the tasks that gradients come back through, likewise."""
    machine: Machine | None
    """What candidates were simulated on; None where nothing is known of contention."""
    schedule: Schedule
    """Of the tasks."""
    backward: BackwardSchedule | None = None
    """Of the backward pass; None where that runs in the mirror image of the forward order."""


_FOUND: dict[str, list[RegionSchedule]] = {}


def schedules_of(region: str) -> list[RegionSchedule]:
    """The schedules of a region's captures so far, by the name of its function."""
    return list(_FOUND.get(region, ()))


def order_region(
    parallel: RegionParallel, arriving: str | None, region: str
) -> Callable[[list[Unit]], list[Unit]]:
    """What puts the units of a region into the order of a schedule, and notes the schedule under its name.

    arriving   digest of what the layer before leaves, None where it leaves nothing
    region     name of the region function
    """

    def ordered(units: list[Unit]) -> list[Unit]:
        left = next((n for u in units for n in u.nodes if n.target is leave_pending), None)
        repeats = (left.args[0] if left is not None else None) == arriving
        tasks = region_tasks(units, _costs(units, parallel), repeats=repeats)
        graph, machine = measured_graph(tasks.graph, parallel), machine_of(parallel)
        gradients = measured_graph(tasks.gradients, parallel)
        schedule = region_schedule(tasks, parallel)
        tasks.mark()
        _FOUND.setdefault(region, []).append(
            RegionSchedule(region, tasks, graph, gradients, machine, schedule)
        )
        first = tasks.order(schedule.order)
        return [*first, *(u for u in units if u not in set(first))]

    return ordered


def _costs(units: list[Unit], parallel: RegionParallel) -> NodeCosts:
    weights = [n.args[2] for u in units for n in u.nodes if n.target is unpermute]
    choices = product(value(weights[0]).shape[1:]) if weights else 1  # type: ignore[arg-type]
    return NodeCosts(load_hardware(parallel.hardware), parallel, choices)
