"""A task graph as arrays, for the solvers: positions in program order in place of names."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, get_args

from fxskip.errors import ScheduleError
from fxskip.schedule.tasks import COMPUTE, HOST, Task, TaskGraph

OrderRule = Literal["free", "layers", "periodic"]
"""What may stand before what in the host order.

free      anything that the data allow
layers    regions run one after another: a task of one layer stands before all tasks of later layers. Tasks that
          `may_cross` may stand in the neighbouring region too; a collective in flight crosses by itself
periodic  layers, and all layers of one kind have one order, so that equal regions share one graph
"""

CPU, HOST_LANE = 0, 1
"""Lane numbers of compute and host; collectives' lanes follow."""


@dataclass(frozen=True)
class Problem:
    """What the solvers work on. Task i is the i-th of the program order."""

    names: tuple[str, ...]
    cost: tuple[float, ...]
    lane: tuple[int, ...]
    producers: tuple[tuple[int, ...], ...]
    consumers: tuple[tuple[int, ...], ...]
    size: tuple[int, ...]
    """Bytes in flight."""
    low: tuple[int, ...]
    """First region that the task may run in. Those of the layers are numbered from 1, in the order in which they run;
    0 is what comes before them, and the last one what comes after: there, too, pending values are finished."""
    high: tuple[int, ...]
    """Last region that it may run in."""
    lanes: int
    cap: int | None
    """Bytes in flight, at most."""

    @classmethod
    def of(cls, graph: TaskGraph, *, rule: OrderRule = "free", cap: int | None = None) -> Problem:
        if rule not in get_args(OrderRule):
            raise ScheduleError(
                "solve", f"no rule is called {rule!r}", hint=f"write one of {', '.join(get_args(OrderRule))}"
            )
        names = graph.program_order
        index = {name: i for i, name in enumerate(names)}
        tasks = [graph[name] for name in names]
        lanes = {COMPUTE: CPU, HOST: HOST_LANE}
        for name in graph.lanes:
            lanes.setdefault(name, len(lanes))
        region = {layer: i for i, layer in enumerate(graph.layers, 1)}
        ranges = [(0, 0) if rule == "free" else _regions(task, region[task.layer]) for task in tasks]
        _check_regions(graph, names, ranges)
        return cls(
            names,
            tuple(task.cost_us for task in tasks),
            tuple(lanes[task.lane] for task in tasks),
            tuple(tuple(index[p] for p in graph.producers(name)) for name in names),
            tuple(tuple(index[c] for c in graph.consumers(name)) for name in names),
            tuple(task.bytes_in_flight for task in tasks),
            tuple(low for low, _ in ranges),
            tuple(high for _, high in ranges),
            len(lanes),
            cap,
        )

    def __len__(self) -> int:
        return len(self.names)

    @cached_property
    def tail(self) -> tuple[float, ...]:
        """From the start of each task to the end of the step along its longest chain of needs."""
        found = [0.0] * len(self)
        for i in reversed(range(len(self))):
            found[i] = self.cost[i] + max((found[c] for c in self.consumers[i]), default=0.0)
        return tuple(found)

    @cached_property
    def head(self) -> tuple[float, ...]:
        """From the start of the step to the start of each task along its longest chain of needs."""
        found = [0.0] * len(self)
        for i in range(len(self)):
            found[i] = max((found[p] + self.cost[p] for p in self.producers[i]), default=0.0)
        return tuple(found)

    @cached_property
    def lower_bound(self) -> float:
        """No order takes less: each lane alone, with preemption, by heads and tails (Jackson's schedule)."""
        lanes = [self._one_lane(lane) for lane in range(self.lanes)]
        return max([0.0, *lanes, *(h + t for h, t in zip(self.head, self.tail, strict=True))])

    def _one_lane(self, lane: int) -> float:
        jobs = sorted((self.head[i], i) for i in range(len(self)) if self.lane[i] == lane)
        waiting: list[tuple[float, int, float]] = []
        now = bound = 0.0
        position = 0
        while waiting or position < len(jobs):
            if not waiting:
                now = max(now, jobs[position][0])
            while position < len(jobs) and jobs[position][0] <= now:
                i = jobs[position][1]
                heapq.heappush(waiting, (-(self.tail[i] - self.cost[i]), i, self.cost[i]))
                position += 1
            after, i, left = heapq.heappop(waiting)
            until = jobs[position][0] if position < len(jobs) else float("inf")
            ran = min(left, until - now)
            now += ran
            if ran < left:
                heapq.heappush(waiting, (after, i, left - ran))
            else:
                bound = max(bound, now - after)
        return bound

    def reversed(self) -> Problem:
        """The same step played backwards; an order of it, reversed, is one of this problem. It has no cap."""
        last = len(self) - 1
        regions = max(self.high, default=0)

        def turned(links: tuple[tuple[int, ...], ...]) -> tuple[tuple[int, ...], ...]:
            return tuple(tuple(last - j for j in reversed(row)) for row in reversed(links))

        return Problem(
            self.names[::-1],
            self.cost[::-1],
            self.lane[::-1],
            turned(self.consumers),
            turned(self.producers),
            self.size[::-1],
            tuple(regions - high for high in reversed(self.high)),
            tuple(regions - low for low in reversed(self.low)),
            self.lanes,
            None,
        )


def _check_regions(graph: TaskGraph, names: Sequence[str], ranges: Sequence[tuple[int, int]]) -> None:
    """Raise ScheduleError where a task must run before something that it needs."""
    earliest: dict[str, tuple[int, str]] = {}
    for name, (low, high) in zip(names, ranges, strict=True):
        earliest[name] = max(
            [(low, name), *(earliest[p] for p in graph.producers(name))], key=lambda one: one[0]
        )
        region, source = earliest[name]
        if region > high:
            late, early = ((0, *graph.layers, "last")[n] for n in (high, region))
            raise ScheduleError(
                "solve",
                f"{name} runs with layer {late} at the latest and needs {source}, which runs with layer {early} "
                "at the earliest",
                where="layers in order",
                hint='give the task may_cross="next", correct its layer, or schedule with the rule "free"',
            )


def _regions(task: Task, own: int) -> tuple[int, int]:
    return own - (task.may_cross == "previous"), own + (task.may_cross == "next")
