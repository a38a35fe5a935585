"""The optimum by constraint programming: the yardstick of `solve`, and for steps that its searches do badly on.

Needs Google's OR-tools (`pip install "fxskip[solver]"`), whose solver CP-SAT gets each task as an interval, each lane
as a machine that runs one at a time, and the makespan to minimise.

Left out of the model, so that the bound holds but the optimum may be out of reach: that a task of the host holds up
what is issued behind it, and that a collective which reads another one makes the compute stream wait.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING

from fxskip.errors import ScheduleError
from fxskip.schedule.problem import CPU, HOST_LANE, OrderRule, Problem
from fxskip.schedule.result import Schedule, schedule_of
from fxskip.schedule.solve import solve
from fxskip.schedule.tasks import TaskGraph
from fxskip.schedule.times import issued_early, obeys, times_of

if TYPE_CHECKING:
    from ortools.sat.python import cp_model

PER_US = 100
"""CP-SAT computes with whole numbers: hundredths of a microsecond, costs rounded down so that its bound holds."""


@dataclass(frozen=True)
class Optimum:
    """What CP-SAT found in the time that it had."""

    schedule: Schedule
    """The better of CP-SAT's order, played by the simple model, and the list schedule that it started from."""
    bound_us: float
    """No order takes less."""
    is_optimal: bool
    """The schedule reaches the bound, but for the rounding of costs."""
    seconds: float


def solve_optimal(
    graph: TaskGraph,
    *,
    rule: OrderRule = "free",
    max_in_flight_bytes: int | None = None,
    seconds: float = 30.0,
    workers: int = 2,
    repeatable: bool = False,
) -> Optimum:
    """The best order that CP-SAT finds within `seconds` on `workers` threads, and a bound on all orders.

    repeatable   count `seconds` in CP-SAT's own measure of work and use one worker: every rank finds the same order

    With a cap, collectives are issued right behind their last producer, as far as the order on their lane allows: an
    order that delays an issue to save memory is not looked for, and the bound is one on those that do not.

    Raises ScheduleError if OR-tools is not installed, for the rule "periodic", and if no order keeps to the cap.
    """
    cp = _cp_model()
    if rule == "periodic":
        raise ScheduleError(
            "solve_optimal",
            "cp_sat has no periodic orders",
            hint='write solver: list, or the rule "layers" or "free"',
        )
    began = time.monotonic()
    tries = _TRIES if repeatable else None
    start = solve(graph, rule=rule, max_in_flight_bytes=max_in_flight_bytes, tries=tries)
    problem = Problem.of(graph, rule=rule, cap=max_in_flight_bytes)
    model = _Model(cp, problem, start)
    solver = cp.CpSolver()
    if repeatable:
        solver.parameters.max_deterministic_time = seconds
    else:
        solver.parameters.max_time_in_seconds = seconds
    solver.parameters.num_workers = 1 if repeatable else workers
    solver.parameters.random_seed = 0
    status = solver.solve(model.model)
    if status not in (cp.OPTIMAL, cp.FEASIBLE):
        if status == cp.UNKNOWN:  # not even the hint was looked at in the time
            return Optimum(start, start.lower_bound_us, False, time.monotonic() - began)
        raise ScheduleError(
            "solve_optimal",
            f"cp_sat finds no order ({solver.status_name(status)})",
            hint="raise max_in_flight",
        )
    bound = max(start.lower_bound_us, solver.best_objective_bound / PER_US)
    best = start
    order = model.order(solver)
    if obeys(problem, order) and (us := times_of(problem, order).makespan) < start.makespan_us:
        best = schedule_of(graph, problem, order, rule=rule, method="cp_sat", cost_us=us)
    rounding = (len(problem) + 1) / PER_US
    return Optimum(best, bound, best.makespan_us <= bound + rounding, time.monotonic() - began)


_TRIES = 300
"""Of the search for the order that CP-SAT starts from, where it must be the same on every rank."""


def _cp_model() -> ModuleType:
    try:
        from ortools.sat.python import cp_model
    except ModuleNotFoundError as error:
        raise ScheduleError(
            "solve_optimal",
            f"solver: cp_sat needs OR-tools, and {error.name} is not installed",
            hint='pip install "fxskip[solver]", or write solver: list',
        ) from None
    return cp_model


class _Model:
    """The problem in CP-SAT's terms, with the list schedule as hint."""

    def __init__(self, cp: ModuleType, problem: Problem, hint: Schedule) -> None:
        self._problem = problem
        self.model: cp_model.CpModel = cp.CpModel()
        cost = [math.floor(us * PER_US) for us in problem.cost]
        horizon = sum(cost) + 1
        self._start = [self.model.new_int_var(0, horizon, name) for name in problem.names]
        self._end = [start + us for start, us in zip(self._start, cost, strict=True)]
        intervals = [
            self.model.new_fixed_size_interval_var(start, us, name)
            for start, us, name in zip(self._start, cost, problem.names, strict=True)
        ]
        for lane in range(problem.lanes):
            self.model.add_no_overlap(
                one for one, own in zip(intervals, problem.lane, strict=True) if own == lane
            )
        for i, producers in enumerate(problem.producers):
            for p in producers:
                self.model.add(self._start[i] >= self._end[p])
        self._regions(horizon)
        if problem.cap is not None:
            self._memory(horizon, problem.cap)
        last = self.model.new_int_var(0, horizon, "makespan")
        self.model.add_max_equality(last, self._end)
        self.model.minimize(last)
        for name, start in zip(problem.names, self._start, strict=True):
            self.model.add_hint(start, math.floor(hint.at[name].start_us * PER_US))

    def _regions(self, horizon: int) -> None:
        """A task stands behind all that must run in regions before its own."""
        problem = self._problem
        before: cp_model.IntVar | None = None
        for region in range(max(problem.low, default=0)):
            closed = self.model.new_int_var(0, horizon, f"region {region}")
            for i in range(len(problem)):
                if problem.high[i] == region:
                    # A collective has only to be issued by then: behind its producers.
                    ended = problem.producers[i] if problem.lane[i] > HOST_LANE else (i,)
                    for j in ended:
                        if problem.lane[j] <= HOST_LANE:
                            self.model.add(closed >= self._end[j])
                if problem.low[i] == region + 1:
                    self.model.add(self._start[i] >= closed)
            if before is not None:
                self.model.add(closed >= before)
            before = closed

    def _memory(self, horizon: int, cap: int) -> None:
        """From its issue behind its last producer to the end of its last consumer a collective holds its bytes."""
        problem, intervals, sizes = self._problem, [], []
        for i, size in enumerate(problem.size):
            if not size:
                continue
            issue = self.model.new_int_var(0, horizon, f"issue {i}")
            self.model.add_max_equality(issue, [0, *(self._end[p] for p in problem.producers[i])])
            free: cp_model.LinearExprT = horizon
            if problem.consumers[i]:
                free = self.model.new_int_var(0, horizon, f"free {i}")
                self.model.add_max_equality(free, [self._end[c] for c in problem.consumers[i]])
            length = self.model.new_int_var(0, horizon, f"held {i}")
            intervals.append(self.model.new_interval_var(issue, length, free, f"held {i}"))
            sizes.append(size)
        self.model.add_cumulative(intervals, sizes, cap)

    def order(self, solver: cp_model.CpSolver) -> list[int]:
        """By start, a task behind what it needs, and each collective then right behind its last producer.

        Sorted by start alone, a collective that waits for its lane would stand behind the compute that hides it.
        """
        by_start: Sequence[int] = sorted(
            range(len(self._problem)),
            key=lambda i: (solver.value(self._start[i]), self._problem.lane[i] == CPU, i),
        )
        return issued_early(self._problem, by_start)
