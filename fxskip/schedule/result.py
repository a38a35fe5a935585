"""A schedule: the host order, when each task runs by the simple model, and what hides each collective."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from fxskip.schedule.problem import OrderRule, Problem
from fxskip.schedule.steps import Step, steps_of
from fxskip.schedule.tasks import COMPUTE, HOST, TaskGraph
from fxskip.schedule.times import peak_bytes, times_of

_ROUNDING_US = 1e-6


@dataclass(frozen=True)
class Placed:
    """A task and when it runs, in microseconds from the start of the step."""

    name: str
    lane: str
    start_us: float
    end_us: float


@dataclass(frozen=True)
class CollectiveRecord:
    """One collective of a schedule, in estimated microseconds."""

    name: str
    lane: str
    layer: int
    issued_after: str | None
    """The compute or host task right before its issue in the host order; None at the very start."""
    waited_by: str | None
    """Its first consumer in the host order; None if it has none and the end of the step waits for it."""
    bytes: int
    cost_us: float
    start_us: float
    end_us: float
    hidden_by: tuple[tuple[str, float], ...]
    """Compute tasks that run beside it, with the microseconds that they share."""
    exposed_us: float
    """Time that it runs while no compute does. hidden + exposed = cost."""
    reason: str
    """Why nothing hides the exposed part; "" where nothing is exposed."""


@dataclass(frozen=True)
class Schedule:
    """What `solve` returns. `order` is what runs; all times are estimates by the simple model of `times`."""

    order: tuple[str, ...]
    """All tasks in the order in which the host issues them, the same on every rank."""
    steps: tuple[Step, ...]
    """The same with starts and waits."""
    placed: tuple[Placed, ...]
    """By start."""
    collectives: tuple[CollectiveRecord, ...]
    """In the order of issue."""
    makespan_us: float
    lower_bound_us: float
    """No order takes less by the simple model."""
    peak_bytes: int
    """Most bytes in flight."""
    rule: OrderRule
    method: str
    """What found the order: "critical path", "beam of 8", "cp_sat (optimal)", ..."""
    cost_us: float
    """What the order was chosen by: the makespan, or the simulated step where contention is modelled."""

    @property
    def source(self) -> Literal["estimated"]:
        """Where times are from."""
        return "estimated"

    @property
    def exposed_us(self) -> float:
        return sum(record.exposed_us for record in self.collectives)

    @property
    def hidden_share(self) -> float:
        """Part of all collective time that has compute beside it; 1 where there is no collective."""
        cost = sum(record.cost_us for record in self.collectives)
        return 1 - self.exposed_us / cost if cost else 1.0

    @cached_property
    def at(self) -> dict[str, Placed]:
        """Each task's times, by name."""
        return {one.name: one for one in self.placed}


def schedule_of(
    graph: TaskGraph, problem: Problem, order: Sequence[int], *, rule: OrderRule, method: str, cost_us: float
) -> Schedule:
    """The record of an order."""
    times = times_of(problem, order)
    names = tuple(problem.names[i] for i in order)
    placed = [
        Placed(problem.names[i], graph[problem.names[i]].lane, times.start[i], times.end[i]) for i in order
    ]
    return Schedule(
        names,
        steps_of(graph, names),
        tuple(sorted(placed, key=lambda one: one.start_us)),
        _records(graph, placed),
        times.makespan,
        problem.lower_bound,
        peak_bytes(problem, order),
        rule,
        method,
        cost_us,
    )


def _records(graph: TaskGraph, placed: Sequence[Placed]) -> tuple[CollectiveRecord, ...]:
    """Of each collective of the host order `placed`."""
    view = _View(graph, placed)
    records = []
    last: str | None = None
    for one in placed:
        task = graph[one.name]
        if not task.is_collective:
            last = one.name
            continue
        beside = tasks_beside(one, view.compute)
        exposed = task.cost_us - sum(us for _, us in beside)
        readers = sorted(graph.consumers(one.name), key=view.position.__getitem__)
        records.append(
            CollectiveRecord(
                one.name,
                one.lane,
                task.layer,
                last,
                readers[0] if readers else None,
                task.bytes_in_flight,
                task.cost_us,
                one.start_us,
                one.end_us,
                beside,
                exposed if exposed > _ROUNDING_US else 0.0,
                view.reason(one, readers) if exposed > _ROUNDING_US else "",
            )
        )
    return tuple(records)


def tasks_beside(collective: Placed, compute: Sequence[Placed]) -> tuple[tuple[str, float], ...]:
    """Tasks that run while a collective does, and for how long.

    compute   one after another, by time
    """
    found = []
    for one in compute[bisect_right(compute, collective.start_us, key=lambda task: task.end_us) :]:
        if one.start_us >= collective.end_us:
            break
        found.append((one.name, min(one.end_us, collective.end_us) - max(one.start_us, collective.start_us)))
    return tuple(found)


class _View:
    """A host order with times, to ask what happens beside a collective."""

    def __init__(self, graph: TaskGraph, placed: Sequence[Placed]) -> None:
        self.graph = graph
        self.position = {one.name: k for k, one in enumerate(placed)}
        self.at = {one.name: one for one in placed}
        self.compute = [one for one in placed if one.lane == COMPUTE]
        self.order = placed
        self.ends = [one.end_us for one in self.compute]

    def reason(self, collective: Placed, readers: Sequence[str]) -> str:
        """Why the compute stream idles while the collective runs."""
        idle_us, after = collective.start_us, bisect_right(self.ends, collective.start_us)
        while after < len(self.compute) and self.compute[after].start_us <= idle_us + _ROUNDING_US:
            idle_us = self.compute[after].end_us
            after += 1
        if after == len(self.compute):
            return "no compute is left to run"
        following = self.compute[after]
        producers = self.graph.producers(following.name)
        arrived = max((self.at[p].end_us for p in producers), default=0.0)
        if following.start_us > max(arrived, idle_us) + _ROUNDING_US:
            return f"{following.name} comes next, behind {self._holding(following)}"
        other = next((c for c in self.compute[after + 1 :] if self._is_ready(c, idle_us)), None)
        if other is not None:
            us = self.graph[other.name].cost_us
            return f"{following.name} is to run as soon as it can, and {other.name} ({us:.0f} us) stands behind it"
        if following.name in readers:
            which = "its only consumer" if len(readers) == 1 else "its consumer"
            return f"{which} {following.name} needs it next and nothing else is ready"
        late = max(producers, key=lambda p: self.at[p].end_us)
        return f"{following.name} comes next, waits for {late}, and nothing else is ready"

    def _holding(self, held: Placed) -> str:
        """What else than its needs a compute task waits for: the host, or a start that reads another collective."""
        for one in reversed(self.order[: self.position[held.name]]):
            reads = [p for p in self.graph.producers(one.name) if self.graph[p].is_collective]
            if one.lane == HOST and abs(one.end_us - held.start_us) < _ROUNDING_US:
                return f"{one.name} of the host"
            if self.graph[one.name].is_collective and any(
                abs(self.at[p].end_us - held.start_us) < _ROUNDING_US for p in reads
            ):
                return f"the issue of {one.name}, which reads {', '.join(reads)}"
        return "what the compute stream waits for"

    def _is_ready(self, one: Placed, now: float) -> bool:
        """By its needs alone."""
        return all(self.at[p].end_us <= now + _ROUNDING_US for p in self.graph.producers(one.name))
