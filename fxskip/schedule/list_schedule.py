"""List scheduling: whenever a lane is free, it takes the task with the highest priority among those that are ready."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from fxskip.schedule.problem import HOST_LANE, Problem
from fxskip.schedule.times import Placement


def list_order(problem: Problem, priority: Sequence[float]) -> list[int] | None:
    """A host order in which no lane idles while something that it may run is ready; higher priorities first.

    With `problem.tail` as priority this is critical-path list scheduling (Graham 1966, Coffman 1976). O(n log n).
    None where the memory cap stops it: what was issued leaves no room for what must come next.
    """
    placement = Placement(problem)
    lanes = [_Lane() for _ in range(problem.lanes)]
    parked: list[tuple[float, int]] = []
    end = [0.0] * len(problem)
    order: list[int] = []

    def offer(i: int) -> None:
        ready = max((end[p] for p in problem.producers[i]), default=0.0)
        if placement.is_allowed(i):
            heapq.heappush(lanes[problem.lane[i]].later, (ready, i))
        else:
            parked.append((ready, i))

    for i in range(len(problem)):
        if not problem.producers[i]:
            offer(i)
    while len(order) < len(problem):
        start, number = min(((lane.next_start(), -k) for k, lane in enumerate(lanes)), default=(_NEVER, 0))
        if start == _NEVER:
            return None
        i = lanes[-number].take(start, priority)
        if not placement.is_allowed(i):  # another collective has taken the room since it was offered
            parked.append((start, i))
            continue
        end[i] = lanes[-number].free = start + problem.cost[i]
        order.append(i)
        for c in placement.place(i):
            offer(c)
        if parked:
            waiting, parked[:] = list(parked), []
            for _, j in waiting:
                offer(j)
    return order


class _Lane:
    """A queue of the machine while the order is built."""

    def __init__(self) -> None:
        self.free = 0.0
        self.now: list[tuple[float, int]] = []
        """Ready by the time the lane is free: (-priority, task)."""
        self.later: list[tuple[float, int]] = []
        """(time it is ready, task)."""

    def next_start(self) -> float:
        if self.now:
            return self.free
        return max(self.free, self.later[0][0]) if self.later else _NEVER

    def take(self, start: float, priority: Sequence[float]) -> int:
        while self.later and self.later[0][0] <= start:
            _, i = heapq.heappop(self.later)
            heapq.heappush(self.now, (-priority[i], i))
        return heapq.heappop(self.now)[1]


_NEVER = float("inf")


def program_order(problem: Problem) -> list[int] | None:
    """The order in which the tasks were given, with collectives at the last moment: it keeps the least in flight.

    Regions end where they must, and a collective waits for room. None where the cap stops it.
    """
    placement = Placement(problem)
    ready: list[tuple[bool, int]] = []
    held: list[tuple[bool, int]] = []
    order: list[int] = []

    def offer(i: int) -> None:
        heapq.heappush(ready, (problem.lane[i] > HOST_LANE, i))

    for i in range(len(problem)):
        if not problem.producers[i]:
            offer(i)
    while ready:
        is_collective, i = heapq.heappop(ready)
        if not placement.is_allowed(i):
            held.append((is_collective, i))
            continue
        order.append(i)
        for c in placement.place(i):
            offer(c)
        for one in held:  # a region may have ended, or room become free
            heapq.heappush(ready, one)
        held.clear()
    return order if len(order) == len(problem) else None
