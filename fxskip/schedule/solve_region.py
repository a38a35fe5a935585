"""The schedule of a region's tasks, forward or backward, as the spec's `schedule` asks for it."""

from __future__ import annotations

from collections.abc import Sequence

from fxskip.errors import ScheduleError
from fxskip.parallel import EXPERT, GradientSum, RegionParallel
from fxskip.schedule.gradient_sums import GRADIENT_LANES, roofline_us
from fxskip.schedule.hardware import load_hardware
from fxskip.schedule.machine import Machine, contention_of
from fxskip.schedule.optimal import solve_optimal
from fxskip.schedule.problem import OrderRule
from fxskip.schedule.region_tasks import RegionTasks
from fxskip.schedule.result import Schedule
from fxskip.schedule.solve import solve
from fxskip.schedule.tasks import TaskGraph

_TRIES = 300
"""Orders that are costed. Not seconds: every rank has to find the same order by itself."""


def region_schedule(tasks: RegionTasks, parallel: RegionParallel) -> Schedule:
    """The schedule of a region's forward tasks; raises what `solved` and `measured_graph` raise."""
    return solved(measured_graph(tasks.graph, parallel), tasks.copies, parallel)


def solved(graph: TaskGraph, copies: int, parallel: RegionParallel) -> Schedule:
    """The schedule of the tasks of `copies` equal regions in a row.

    Raises ScheduleError where no order keeps to `max_in_flight_mib`, and where OR-tools is asked for and missing.
    """
    rule: OrderRule = "periodic" if copies > 1 else "layers"
    cap = parallel.schedule.max_in_flight_mib << 20
    if (
        parallel.schedule.solver == "cp_sat"
    ):  # which knows no periodic orders: a region in the middle stands for all
        return solve_optimal(graph, rule="layers", max_in_flight_bytes=cap, repeatable=True).schedule
    return solve(graph, rule=rule, machine=machine_of(parallel), max_in_flight_bytes=cap, tries=_TRIES)


def measured_graph(graph: TaskGraph, parallel: RegionParallel) -> TaskGraph:
    """The tasks of a region, with the costs of a table, by role, where the spec names one.

    Raises ScheduleError where the table lacks a task.
    """
    if parallel.measured is None:
        return graph
    table = dict(parallel.measured.us)
    unknown = sorted({task.role for task in graph} - set(table))
    if unknown:
        raise _not_in_table(unknown, parallel.schedule.costs)
    return graph.with_costs({task.name: table[task.role] for task in graph})


def gradient_us(one: GradientSum, parallel: RegionParallel) -> float:
    """Microseconds of an all-reduce of gradients, by the costs that the spec asks for.

    Raises ScheduleError where their table lacks it.
    """
    if parallel.measured is None:
        return roofline_us(one, load_hardware(parallel.hardware))
    table = dict(parallel.measured.us)
    if one.role not in table:
        raise _not_in_table([one.role], parallel.schedule.costs)
    return table[one.role]


def _not_in_table(roles: Sequence[str], path: str) -> ScheduleError:
    return ScheduleError(
        "schedule.costs",
        f"the table has no cost for {', '.join(roles)}",
        where=path,
        hint="measure this model with fxskip trace, or write costs: roofline",
    )


def machine_of(parallel: RegionParallel) -> Machine | None:
    """What candidates are simulated on; None where nothing is known of contention: then makespans are compared."""
    if parallel.transport == "gloo":
        return None
    hardware = load_hardware(parallel.hardware)
    # Only experts' rows go over copy engines.
    of_sums = "nccl" if parallel.transport == "copy_engine" else parallel.transport
    found = {EXPERT: contention_of(hardware, parallel.transport)}
    found |= dict.fromkeys(GRADIENT_LANES, contention_of(hardware, of_sums))
    known = {lane: contention for lane, contention in found.items() if contention is not None}
    return Machine(contention=known) if known else None
