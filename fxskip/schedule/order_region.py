"""The order in which a region's nodes run, from a schedule of its tasks."""

from __future__ import annotations

from collections.abc import Callable

import torch

from fxskip.collectives.border import leave_pending
from fxskip.collectives.expert_parallel import unpermute
from fxskip.ir import value
from fxskip.parallel import RegionParallel
from fxskip.passes.dependencies import Unit
from fxskip.schedule.derive_backward import derive_backward
from fxskip.schedule.hardware import load_hardware
from fxskip.schedule.machine import Machine, contention_of
from fxskip.schedule.node_costs import NodeCosts
from fxskip.schedule.region_tasks import RegionTasks, region_tasks
from fxskip.schedule.simulate import simulate
from fxskip.schedule.sizes import product
from fxskip.schedule.solve import solve
from fxskip.schedule.steps import steps_of
from fxskip.schedule.tasks import TaskGraph

_FOREVER_S = 3600.0
"""All candidates are tried, so that every rank finds the same order."""


def order_region(parallel: RegionParallel, arriving: str | None) -> Callable[[list[Unit]], list[Unit]]:
    """What puts the units of a region into the order of a schedule.

    Backpropagation runs them in reverse, so with gradients the order counts in both directions.

    arriving   digest of what the layer before leaves, None where it leaves nothing
    """

    def ordered(units: list[Unit]) -> list[Unit]:
        left = next((n for u in units for n in u.nodes if n.target is leave_pending), None)
        repeats = (left.args[0] if left is not None else None) == arriving
        tasks = region_tasks(units, _costs(units, parallel), repeats=repeats)
        first = tasks.order(best_order(tasks, parallel))
        return [*first, *(u for u in units if u not in set(first))]

    return ordered


def best_order(tasks: RegionTasks, parallel: RegionParallel) -> tuple[str, ...]:
    """The host order of the tasks with the least forward, or forward and mirrored backward, by simulation."""
    machine = _machine(parallel)
    wish = parallel.schedule
    cap = wish.max_in_flight_mib << 20

    def found(graph: TaskGraph) -> tuple[str, ...]:
        rule = "periodic" if tasks.copies > 1 else "layers"
        return solve(graph, rule=rule, machine=machine, max_in_flight_bytes=cap, seconds=_FOREVER_S).order  # type: ignore[arg-type]

    def us(graph: TaskGraph, order: tuple[str, ...]) -> float:
        return simulate(graph, steps_of(graph, order), machine).require_sound().step_us

    if not torch.is_grad_enabled():
        return found(tasks.graph)
    back = derive_backward(tasks.graph)
    candidates = [found(tasks.graph)]

    def both(order: tuple[str, ...]) -> float:
        return us(tasks.graph, order) + us(
            back, tuple(f"{n}.bwd" for n in reversed(order) if f"{n}.bwd" in back)
        )

    return min(candidates, key=both)


def _machine(parallel: RegionParallel) -> Machine | None:
    """What candidates are simulated on; None where nothing is known of contention: then makespans are compared."""
    hardware = load_hardware(parallel.hardware)
    if parallel.transport == "gloo":
        return None
    contention = contention_of(hardware, parallel.transport)
    return Machine(contention={"expert": contention}) if contention is not None else None


def _costs(units: list[Unit], parallel: RegionParallel) -> NodeCosts:
    weights = [value(n.args[2]) for u in units for n in u.nodes if n.target is unpermute]  # type: ignore[arg-type]
    choices = product(weights[0].shape[1:]) if weights else 1
    return NodeCosts(load_hardware(parallel.hardware), parallel, choices)
