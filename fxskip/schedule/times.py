"""When the tasks of a host order run, by the simple model: lanes that do not slow each other.

    compute     after the compute task before it in the order, when all that it reads has arrived
    collective  after the one before it on its lane, and after every compute task that stands before it: a stream
                of collectives waits for everything that was enqueued on the compute stream before the issue
    host        when it is reached and all that it reads has arrived; everything behind it is issued after it

Needed by a collective, the result of another one is waited for by the compute stream before the issue.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fxskip.schedule.problem import CPU, HOST_LANE, Problem


@dataclass(slots=True)
class Times:
    """Start and end of each task, by position in the problem, and of the step."""

    start: list[float]
    end: list[float]
    makespan: float


def times_of(problem: Problem, order: Sequence[int]) -> Times:
    """Play the order; it must have every task after all that it needs."""
    cost, lane, producers = problem.cost, problem.lane, problem.producers
    start, end = [0.0] * len(problem), [0.0] * len(problem)
    free = [0.0] * problem.lanes
    host = 0.0
    for i in order:
        ready = host
        for p in producers[i]:
            if end[p] > ready:
                ready = end[p]
        own = lane[i]
        if own > HOST_LANE:
            for p in producers[i]:
                if lane[p] > HOST_LANE:
                    free[CPU] = max(free[CPU], end[p])
            ready = max(ready, free[CPU])
        start[i] = begin = max(ready, free[own])
        end[i] = free[own] = begin + cost[i]
        if own == HOST_LANE:
            host = end[i]
    return Times(start, end, max(end, default=0.0))


def peak_bytes(problem: Problem, order: Iterable[int]) -> int:
    """Most bytes in flight. A value counts from its issue to the enqueueing of its last consumer.

    The caching allocator hands memory out in host order, and what is issued behind the last consumer starts after it.
    """
    left = [len(consumers) for consumers in problem.consumers]
    now = peak = 0
    for i in order:
        now += problem.size[i]
        peak = max(peak, now)
        now -= released(problem, left, i)
    return peak


def released(problem: Problem, left: list[int], i: int) -> int:
    """Bytes that are free once task i is enqueued; `left` counts the consumers that each task still has."""
    freed = 0  # what nobody reads is waited for, and held, at the end of the step
    for p in problem.producers[i]:
        left[p] -= 1
        if not left[p]:
            freed += problem.size[p]
    return freed


def issued_early(problem: Problem, order: Sequence[int]) -> list[int]:
    """The same orders of compute and of each lane, with every collective right behind its last producer.

    A collective's start waits for all that stands before it, so anything between its producer and its issue would
    delay it. Collectives stay behind those before them on their lane, and where they do not fit into the cap any
    earlier. Nothing starts later than before. One that reads another collective stays where it is, since its issue
    makes the compute stream wait.
    """
    movable = [
        [i for i in order if problem.lane[i] == lane and _is_movable(problem, i)]
        for lane in range(problem.lanes)
    ]
    fixed = [i for i in order if problem.lane[i] <= HOST_LANE or not _is_movable(problem, i)]
    position = {i: k for k, i in enumerate(order)}
    tracker = Placement(problem)
    heads = [0] * problem.lanes
    found: list[int] = []

    def issue_ready() -> None:
        while True:
            ready = [
                queue[heads[lane]]
                for lane, queue in enumerate(movable)
                if heads[lane] < len(queue)
                and tracker.may_place(queue[heads[lane]])
                and not any(position[i] < position[queue[heads[lane]]] for i in blocked[lane])
            ]
            if not ready:
                return
            first = min(ready, key=position.__getitem__)
            heads[problem.lane[first]] += 1
            tracker.place(first)
            found.append(first)

    # A collective that stays where it is keeps its turn on its lane.
    blocked = [
        [i for i in fixed if problem.lane[i] == lane and lane > HOST_LANE] for lane in range(problem.lanes)
    ]
    issue_ready()
    for i in fixed:
        if not tracker.may_place(i):
            return list(order)  # what was issued earlier takes the room that this one's producer had
        if problem.lane[i] > HOST_LANE:
            blocked[problem.lane[i]].remove(i)
        tracker.place(i)
        found.append(i)
        issue_ready()
    return found if len(found) == len(order) else list(order)


def _is_movable(problem: Problem, i: int) -> bool:
    return problem.lane[i] > HOST_LANE and all(problem.lane[p] <= HOST_LANE for p in problem.producers[i])


class Placement:
    """Which tasks of a host order may come next: by data, by regions, by memory."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self.waits_for = [len(producers) for producers in problem.producers]
        self._left = [len(consumers) for consumers in problem.consumers]
        self._in_flight = 0
        self._open = [0] * (max(problem.high, default=0) + 1)
        for high in problem.high:
            self._open[high] += 1
        self.region = 0
        """First region with a task that must run in it or before."""
        self._advance()

    def may_place(self, i: int) -> bool:
        return not self.waits_for[i] and self.is_allowed(i)

    def is_allowed(self, i: int) -> bool:
        """By regions and memory alone."""
        problem = self._problem
        fits = problem.cap is None or self._in_flight + problem.size[i] <= problem.cap
        return problem.low[i] <= self.region and fits

    def place(self, i: int) -> list[int]:
        """Enqueue the task; the tasks whose needs are now all enqueued."""
        problem = self._problem
        self._in_flight += problem.size[i] - released(problem, self._left, i)
        self._open[problem.high[i]] -= 1
        self._advance()
        ready = []
        for c in problem.consumers[i]:
            self.waits_for[c] -= 1
            if not self.waits_for[c]:
                ready.append(c)
        return ready

    def _advance(self) -> None:
        while self.region < len(self._open) - 1 and not self._open[self.region]:
            self.region += 1


def obeys(problem: Problem, order: Sequence[int]) -> bool:
    """Whether the order has every task once, after what it needs, in its regions, and keeps to the cap."""
    placement = Placement(problem)
    seen = set()
    for i in order:
        if i in seen or not placement.may_place(i):
            return False
        seen.add(i)
        placement.place(i)
    return len(seen) == len(problem)
