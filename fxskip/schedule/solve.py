"""The host order of a step's tasks: the best of several list schedules and beam searches.

Without a contention model the best order is that with the least makespan by `times`; with one, that with the least
step in `simulate`, whose excess over the step without communication is what is exposed and what is stretched.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace

from fxskip.errors import ScheduleError
from fxskip.schedule.beam import beam_order
from fxskip.schedule.list_schedule import list_order, program_order
from fxskip.schedule.machine import Machine
from fxskip.schedule.periodic import Cost, Found, Periods, Search, has_roles, periodic_order
from fxskip.schedule.problem import OrderRule, Problem
from fxskip.schedule.result import Schedule, schedule_of
from fxskip.schedule.short_first import short_first
from fxskip.schedule.simulate import simulate
from fxskip.schedule.steps import steps_of
from fxskip.schedule.tasks import TaskGraph
from fxskip.schedule.times import issued_early, peak_bytes, times_of

_SAME = 1e-9
"""Relative difference of step times that is rounding."""


def solve(
    graph: TaskGraph,
    *,
    rule: OrderRule = "free",
    max_in_flight_bytes: int | None = None,
    machine: Machine | None = None,
    seconds: float = 1.2,
    tries: int | None = None,
    seed: int = 0,
) -> Schedule:
    """A host order of all tasks, with each collective right behind its last producer.

    rule                 what may stand before what, see `OrderRule`
    max_in_flight_bytes  cap on what collectives hold from their issue until their last consumer is enqueued
    machine              what candidates are simulated on; None: the makespan by the simple model counts
    seconds              of this thread's processor time, after which no further candidate is tried. The result is the
                         same in every run unless this ends the search, so ranks receive it from one of them
    tries                in place of seconds: orders that are costed before no further candidate is tried. The result is
                         the same in every run and on every rank
    seed                 of the perturbed priorities

    Raises ScheduleError where no order obeys the rule, or none that was found the cap.
    """
    problem = Problem.of(graph, rule=rule, cap=max_in_flight_bytes)
    _check_cap(problem)
    budget = _Budget(tries)
    search = Search(
        lambda one, its: _candidates(one, its, seed, machine),
        lambda one, its: budget.counted(_cost_function(one, its, machine)),
        budget.spent() + (seconds if tries is None else tries),
        budget.spent,
    )
    if rule == "periodic":
        method, order = periodic_order(graph, problem, search)
    else:
        method, order = _best(graph, problem, search)
    cost = search.cost(graph, problem)
    if machine is not None:
        accepts = Periods(graph, problem).is_periodic if rule == "periodic" else lambda _: True
        order = short_first(graph, problem, order, cost, lambda: search.now() >= search.deadline, accepts)
    return schedule_of(graph, problem, order, rule=rule, method=method, cost_us=cost(order))


class _Budget:
    """What a search has spent: tries where they are limited, else this thread's processor time."""

    def __init__(self, tries: int | None) -> None:
        self._counts = tries is not None
        self._tried = 0

    def spent(self) -> float:
        return float(self._tried) if self._counts else time.thread_time()

    def counted(self, cost: Cost) -> Cost:
        """`cost`, each call of which is a try."""

        def counting(order: Sequence[int]) -> float:
            self._tried += 1
            return cost(order)

        return counting


def _cost_function(graph: TaskGraph, problem: Problem, machine: Machine | None) -> Cost:
    if machine is None:
        return lambda order: times_of(problem, order).makespan

    def simulated(order: Sequence[int]) -> float:
        names = [problem.names[i] for i in order]
        return simulate(graph, steps_of(graph, names), machine).require_sound().step_us

    return simulated


def _best(graph: TaskGraph, problem: Problem, search: Search) -> Found:
    """The cheapest candidate, the first of equals."""
    best: tuple[float, Found] | None = None
    cost = search.cost(graph, problem)
    for method, order in _with_periodic(graph, problem, search):
        us = cost(order)
        if best is None or us < best[0] * (1 - _SAME):
            best = (us, (method, order))
        if best[0] <= problem.lower_bound * (1 + _SAME) or search.now() >= search.deadline:
            break
    if best is None:
        raise ScheduleError(
            "solve",
            f"no order was found that keeps {problem.cap:,} bytes in flight or fewer",
            hint="raise max_in_flight; a consumer may need several collectives at once",
        )
    return best[1]


def _with_periodic(graph: TaskGraph, problem: Problem, search: Search) -> Iterator[Found]:
    """The candidates, and the best order in which all layers of a kind are alike, which long steps gain by.

    A search over a whole step loses sight of what one place costs every layer; a pattern does not.
    """
    started = search.now()
    for number, found in enumerate(search.candidates(graph, problem)):
        yield found
        if number >= _FIRST and search.now() >= started + 0.15 * (search.deadline - started):
            break
    if len(graph.layers) > _FEW_LAYERS and has_roles(graph):
        layered = Problem.of(graph, rule="layers", cap=problem.cap)
        with suppress(ScheduleError):  # no periodic order keeps to the cap, or layers cannot run in order
            yield periodic_order(graph, layered, search)


_FEW_LAYERS, _FIRST = 3, 4
"""Layers that are too few to repeat; candidates that are looked at however long they take."""


def _candidates(graph: TaskGraph, problem: Problem, seed: int, machine: Machine | None) -> Iterator[Found]:
    """Orders that obey the rule and the cap, quick and good ones first."""
    for view in _views(graph, problem, machine):
        for method, order in _raw_candidates(view, seed):
            if order is None:
                continue
            order = issued_early(problem, order)
            if problem.cap is None or peak_bytes(problem, order) <= problem.cap:
                yield method, order


def _views(graph: TaskGraph, problem: Problem, machine: Machine | None) -> Iterator[Problem]:
    """The problem, and with contention what it looks like if collectives are slowed, without and with a late start.

    Candidates that leave room for the longer collectives are compared with the others by simulation.
    """
    yield problem
    if machine is None or not machine.contention:
        return
    for is_late in (False, True):
        costs = []
        for name, us in zip(problem.names, problem.cost, strict=True):
            one = machine.contention.get(graph[name].lane)
            late = 0.0 if one is None else one.start_behind_long_us if is_late else one.start_behind_short_us
            costs.append(us if one is None else us * one.collective_stretch + late)
        yield replace(problem, cost=tuple(costs))


def _raw_candidates(problem: Problem, seed: int) -> Iterator[tuple[str, list[int] | None]]:
    yield "critical path", list_order(problem, problem.tail)
    yield "program order", program_order(problem)
    backwards = problem.reversed()
    yield "reverse critical path", _turned(list_order(backwards, backwards.tail))
    for width, weight in ((8, 1e-3), (8, 0.0), (8, 0.03), (32, 1e-3)):
        yield f"beam of {width}", beam_order(problem, width=width, idle_weight=weight)
    noise = random.Random(seed)
    for number in range(_PERTURBED):
        amount = 0.15 if number % 2 else 0.4
        tails = [tail * (1 + noise.uniform(-amount, amount)) for tail in problem.tail]
        yield "perturbed critical path", list_order(problem, tails)
    wide = min(_WIDEST, _BEGINNINGS // max(1, len(problem)))
    if wide > 32:
        yield f"beam of {wide}", beam_order(problem, width=wide, idle_weight=1e-3)


_PERTURBED = 20
_WIDEST, _BEGINNINGS = 512, 30_000
"""Of a beam that only short steps are searched with, and what it may look at in all: about a second's work."""


def _turned(order: list[int] | None) -> list[int] | None:
    return order and [len(order) - 1 - i for i in reversed(order)]


def _check_cap(problem: Problem) -> None:
    largest = max(range(len(problem)), key=problem.size.__getitem__, default=None)
    if problem.cap is not None and largest is not None and problem.size[largest] > problem.cap:
        raise ScheduleError(
            "solve",
            f"{problem.names[largest]} alone holds {problem.size[largest]:,} bytes in flight, the cap is "
            f"{problem.cap:,}",
            hint=f"raise max_in_flight to {problem.size[largest]:,} bytes or more, or use smaller micro-batches",
        )
