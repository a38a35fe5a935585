"""Beam search over host orders, guided by a lower bound on the step that each beginning can still reach.

List scheduling never lets a lane idle while something is ready. Where communication is heavy that is wrong: a long
task started just before the next one of the critical chain becomes ready delays the chain. Here a task may be placed
as soon as all that it needs is placed, whether or not that has arrived.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from fxskip.schedule.problem import CPU, HOST_LANE, Problem

CANDIDATES = 6
"""Compute tasks that are tried as the next one."""


@dataclass(slots=True)
class _State:
    """The beginning of a host order."""

    parent: _State | None
    task: int
    placed: int
    """Bit set of the tasks."""
    free: list[float]
    """When each lane is done."""
    host: float
    work: list[float]
    """Left for each lane."""
    bound: float
    """On the step, from the tasks placed."""
    ready: dict[int, float]
    """Tasks whose needs are all placed, and when those have arrived."""
    waiting: dict[int, tuple[int, float]]
    """Tasks of which some needs are placed: how many are missing, when the others have arrived."""
    region: int
    open: list[int]
    in_flight: int
    live: dict[int, int]
    """Collectives in flight, and how many consumers they still have."""


def beam_order(problem: Problem, *, width: int, idle_weight: float = 0.0) -> list[int] | None:
    """The best host order that a beam of `width` beginnings finds; None where the memory cap stops all of them.

    idle_weight  how much it counts against a beginning that lanes have idled in it, besides the bound
    """
    search = _Search(problem, idle_weight)
    beam = [search.root()]
    for _ in range(len(problem)):
        best: dict[int, tuple[float, float, int, _State, float, float]] = {}
        for number, state in enumerate(beam):
            for i, begin in search.candidates(state):
                score, bound = search.score(state, i, begin)
                key = state.placed | (1 << i)
                known = best.get(key)
                if known is None or (score, number) < known[:2]:
                    best[key] = (score, number, i, state, begin, bound)
        if not best:
            return None
        chosen = sorted(best.values(), key=lambda one: one[:3])[:width]
        beam = [search.child(state, i, begin, bound) for _, _, i, state, begin, bound in chosen]
    order: list[int] = []
    at: _State | None = min(beam, key=lambda state: max(state.free))
    while at is not None and at.task >= 0:
        order.append(at.task)
        at = at.parent
    return order[::-1]


class _Search:
    def __init__(self, problem: Problem, idle_weight: float) -> None:
        self.problem = problem
        self.weight = idle_weight
        self.after = [float("inf")] * problem.lanes
        for i, lane in enumerate(problem.lane):
            self.after[lane] = min(self.after[lane], problem.tail[i] - problem.cost[i])

    def root(self) -> _State:
        problem = self.problem
        work = [0.0] * problem.lanes
        for i, lane in enumerate(problem.lane):
            work[lane] += problem.cost[i]
        opened = [0] * (max(problem.high, default=0) + 1)
        for high in problem.high:
            opened[high] += 1
        ready = {i: 0.0 for i in range(len(problem)) if not problem.producers[i]}
        region = next((k for k, count in enumerate(opened) if count), 0)
        return _State(None, -1, 0, [0.0] * problem.lanes, 0.0, work, 0.0, ready, {}, region, opened, 0, {})

    def candidates(self, state: _State) -> Iterator[tuple[int, float]]:
        """Tasks that may come next, with their start. A collective that may be issued now is."""
        problem, free, host = self.problem, state.free, state.host
        compute: list[tuple[float, int, float]] = []
        issued = False
        filler = None
        for i, arrived in state.ready.items():
            lane = problem.lane[i]
            if problem.low[i] > state.region:
                continue
            if lane > HOST_LANE:
                if problem.cap is not None and state.in_flight + problem.size[i] > problem.cap:
                    continue
                movable = all(problem.lane[p] <= HOST_LANE for p in problem.producers[i])
                if movable:
                    issued = True
                    yield i, max(arrived, free[CPU], free[lane], host)
                else:
                    compute.append((-problem.tail[i], i, max(arrived, free[CPU], free[lane], host)))
            elif problem.consumers[i] or lane == HOST_LANE:
                compute.append((-problem.tail[i], i, max(arrived, free[lane], host)))
            elif filler is None:
                filler = i
                compute.append((-problem.tail[i], i, max(arrived, free[lane], host)))
        if issued:
            return
        compute.sort()
        # Whoever starts only after another one could have come and gone gains nothing by going first.
        soonest = min(
            (begin + problem.cost[i] for _, i, begin in compute if problem.lane[i] == CPU), default=0.0
        )
        yielded = 0
        for _, i, begin in compute:
            if begin < soonest or problem.lane[i] != CPU:
                yield i, begin
                yielded += 1
                if yielded == CANDIDATES:
                    return

    def score(self, state: _State, i: int, begin: float) -> tuple[float, float]:
        """What the step takes at least with the task placed, with and without the part that breaks ties."""
        problem = self.problem
        tail, lane = problem.tail, problem.lane
        own, done = lane[i], begin + problem.cost[i]
        bound = max(state.bound, begin + tail[i])
        total = bound
        idle = 0.0
        for k, after in enumerate(self.after):
            left = state.work[k]
            at = state.free[k]
            if k == own:
                at, left = done, left - problem.cost[i]
            if left > 1e-9:
                idle += at + left
                if at + left + after > total:
                    total = at + left + after
        for r, arrived in state.ready.items():
            if r != i:
                at = done if lane[r] == own else state.free[lane[r]]
                least = (arrived if arrived > at else at) + tail[r]
                if least > total:
                    total = least
        return total + self.weight * idle, bound

    def child(self, state: _State, i: int, begin: float, bound: float) -> _State:
        problem = self.problem
        own, end = problem.lane[i], begin + problem.cost[i]
        free, work = state.free.copy(), state.work.copy()
        if own > HOST_LANE and any(problem.lane[p] > HOST_LANE for p in problem.producers[i]):
            free[CPU] = max(free[CPU], state.ready[i])
        free[own], work[own] = end, work[own] - problem.cost[i]
        ready, waiting = state.ready.copy(), state.waiting.copy()
        del ready[i]
        for c in problem.consumers[i]:
            missing, arrived = waiting.pop(c, (len(problem.producers[c]), 0.0))
            arrived = max(arrived, end)
            if missing == 1:
                ready[c] = arrived
            else:
                waiting[c] = (missing - 1, arrived)
        opened, region = state.open.copy(), state.region
        opened[problem.high[i]] -= 1
        while region < len(opened) - 1 and not opened[region]:
            region += 1
        in_flight, live = state.in_flight, state.live
        if problem.cap is not None:
            in_flight, live = self._memory(state, i)
        host = end if own == HOST_LANE else state.host
        return _State(
            state, i, state.placed | (1 << i), free, host, work, bound, ready, waiting, region, opened, in_flight, live
        )  # fmt: skip

    def _memory(self, state: _State, i: int) -> tuple[int, dict[int, int]]:
        problem, live, in_flight = self.problem, state.live.copy(), state.in_flight
        if problem.size[i]:
            live[i] = len(problem.consumers[i])
            in_flight += problem.size[i]
        for p in problem.producers[i]:
            if p in live:
                live[p] -= 1
                if not live[p]:
                    del live[p]
                    in_flight -= problem.size[p]
        return in_flight, live
