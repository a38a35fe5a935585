"""The order in which a region's nodes run, from a schedule of its tasks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from fxskip.collectives.border import leave_pending
from fxskip.collectives.routing import unpermute
from fxskip.errors import ScheduleError
from fxskip.ir import value
from fxskip.parallel import EXPERT, RegionParallel
from fxskip.passes.dependencies import Unit
from fxskip.schedule.cost_table import load_costs
from fxskip.schedule.hardware import load_hardware
from fxskip.schedule.machine import Machine, contention_of
from fxskip.schedule.node_costs import NodeCosts
from fxskip.schedule.optimal import solve_optimal
from fxskip.schedule.problem import OrderRule
from fxskip.schedule.region_tasks import RegionTasks, region_tasks
from fxskip.schedule.result import Schedule
from fxskip.schedule.sizes import product
from fxskip.schedule.solve import solve
from fxskip.schedule.tasks import TaskGraph

_TRIES = 300
"""Orders that are costed. Not seconds: every rank has to find the same order by itself."""


@dataclass(frozen=True)
class RegionSchedule:
    """What one capture of a region was ordered by."""

    region: str
    """Name of the region function."""
    tasks: RegionTasks
    schedule: Schedule
    """Of the tasks; the backward pass runs in the mirror image of its order."""


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
        schedule = region_schedule(tasks, parallel)
        _FOUND.setdefault(region, []).append(RegionSchedule(region, tasks, schedule))
        first = tasks.order(schedule.order)
        return [*first, *(u for u in units if u not in set(first))]

    return ordered


def region_schedule(tasks: RegionTasks, parallel: RegionParallel) -> Schedule:
    """The schedule of a region's tasks that the spec's `schedule` asks for.

    Raises ScheduleError where no order keeps to `max_in_flight_mib`, where a cost table lacks a task, and
    where OR-tools is asked for and missing.
    """
    wish, machine, graph = (
        parallel.schedule,
        _machine(parallel),
        _with_measured(tasks, parallel.schedule.costs),
    )
    rule: OrderRule = "periodic" if tasks.copies > 1 else "layers"
    cap = wish.max_in_flight_mib << 20
    if wish.solver == "cp_sat":  # which knows no periodic orders: a region in the middle stands for all
        return solve_optimal(graph, rule="layers", max_in_flight_bytes=cap, repeatable=True).schedule
    return solve(graph, rule=rule, machine=machine, max_in_flight_bytes=cap, tries=_TRIES)


def _with_measured(tasks: RegionTasks, costs: str) -> TaskGraph:
    """The task graph, with the costs of a table, by role, where the spec names one."""
    if costs == "roofline":
        return tasks.graph
    table = load_costs(costs).costs_us
    unknown = sorted({task.role for task in tasks.graph} - set(table))
    if unknown:
        raise ScheduleError(
            "schedule.costs",
            f"the table has no cost for {', '.join(unknown)}",
            where=costs,
            hint="measure this model with fxskip trace, or write costs: roofline",
        )
    return tasks.graph.with_costs({task.name: table[task.role] for task in tasks.graph})


def _machine(parallel: RegionParallel) -> Machine | None:
    """What candidates are simulated on; None where nothing is known of contention: then makespans are compared."""
    if parallel.transport == "gloo":
        return None
    contention = contention_of(load_hardware(parallel.hardware), parallel.transport)
    return Machine(contention={EXPERT: contention}) if contention is not None else None


def _costs(units: list[Unit], parallel: RegionParallel) -> NodeCosts:
    weights = [n.args[2] for u in units for n in u.nodes if n.target is unpermute]
    choices = product(value(weights[0]).shape[1:]) if weights else 1  # type: ignore[arg-type]
    return NodeCosts(load_hardware(parallel.hardware), parallel, choices)
