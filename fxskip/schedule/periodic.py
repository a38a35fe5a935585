"""One order for all layers of a kind: regions with equal wiring share one graph, and a graph has one order.

A pattern says in which order a region runs its tasks, by role and by the layer that they belong to, relative to the
region. Patterns are taken from orders in which each region has its own, and improved by moving one role at a time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from fxskip.errors import ScheduleError
from fxskip.schedule.problem import Problem
from fxskip.schedule.shorten import shortened
from fxskip.schedule.tasks import Task, TaskGraph
from fxskip.schedule.times import issued_early, obeys

Pattern = tuple[tuple[str, int], ...]
"""(role, layer that it belongs to minus region, counted in the order in which layers run)."""
Patterns = dict[Hashable, Pattern]
"""For each kind of region."""


class Periods:
    """The kinds of a graph's regions, and what turns patterns into orders and back."""

    def __init__(self, graph: TaskGraph, problem: Problem) -> None:
        self._problem = problem
        self._rank = {layer: i for i, layer in enumerate(graph.layers, 1)}
        self._key = [(graph[name].role, self._rank[graph[name].layer]) for name in problem.names]
        self._task = {key: i for i, key in enumerate(self._key)}
        _check_roles(graph)
        self.kinds = [_kind(graph, layer) for layer in graph.layers]

    def of(self, order: Sequence[int]) -> dict[Hashable, Counter[Pattern]]:
        """The patterns of each kind of region, and how many regions have them. One each: the order is periodic."""
        content: list[list[tuple[str, int]]] = [[] for _ in range(len(self.kinds) + 2)]
        region = 0
        for i in order:
            region = max(region, self._problem.low[i])
            role, rank = self._key[i]
            content[region].append((role, rank - region))
        found: dict[Hashable, Counter[Pattern]] = {}
        for kind, tasks in zip(self.kinds, content[1:-1], strict=True):
            found.setdefault(kind, Counter())[tuple(tasks)] += 1
        return found

    def order(self, patterns: Mapping[Hashable, Pattern]) -> list[int] | None:
        """Every region in its kind's pattern; None if that misses a task, breaks a rule, or is not periodic."""
        placed: dict[int, None] = {}
        for region, kind in enumerate(self.kinds, 1):
            for role, shift in patterns[kind]:
                i = self._task.get((role, region + shift))
                if i is not None:
                    placed[i] = None
        # No region of a layer has what finishes the values that are pending at the ends of the model.
        pending = [i for i in range(len(self._problem)) if i not in placed]
        before = [i for i in pending if not self._problem.low[i]]
        order = [*before, *placed, *(i for i in pending if self._problem.low[i])]
        if not obeys(self._problem, order):
            return None
        order = issued_early(self._problem, order)
        return order if self.is_periodic(order) else None

    def is_periodic(self, order: Sequence[int]) -> bool:
        return all(len(patterns) == 1 for patterns in self.of(order).values())


Found = tuple[str, list[int]]
"""A method and the order that it found."""
Cost = Callable[[Sequence[int]], float]


@dataclass(frozen=True)
class Search:
    """What the caller decides."""

    candidates: Callable[[TaskGraph, Problem], Iterator[Found]]
    """Orders to take patterns from, layers in order."""
    cost: Callable[[TaskGraph, Problem], Cost]
    """What an order of the problem is judged by."""
    deadline: float
    """Of `now`."""
    now: Callable[[], float]
    """What has been spent: of this thread's processor time, or of tries."""


def periodic_order(graph: TaskGraph, problem: Problem, search: Search) -> Found:
    """The best periodic order that is found in time, and the method that its patterns come from.

    Patterns are sought on a step of few layers, where a try costs little, then played on the whole step.

    Raises ScheduleError if layers of one kind cannot have one order, such as under a cap that only some exceed.
    """
    periods = Periods(graph, problem)
    small = shortened(graph, periods.kinds, most=_LAYERS)
    found: list[_Choice] = []
    if small is not graph:
        found = _search(small, Problem.of(small, rule="layers", cap=problem.cap), search, share=0.75)
    cost = search.cost(graph, problem)
    best: tuple[float, str, list[int]] | None = None
    for choice in found[:_PLAYED]:
        order = periods.order(choice.patterns) if choice.patterns.keys() == set(periods.kinds) else None
        if order is not None and (best is None or cost(order) < best[0] * (1 - 1e-9)):
            best = cost(order), choice.method, order
    if best is None:
        for choice in _search(graph, problem, search, share=1.0):
            order = periods.order(choice.patterns)
            assert order is not None
            return choice.method, order
        raise ScheduleError(
            "solve",
            "no order was found that all layers of a kind can share",
            hint='raise max_in_flight, or schedule with the rule "layers", which gives each layer an order of its own',
        )
    return best[1], best[2]


@dataclass(frozen=True)
class _Choice:
    us: float
    method: str
    patterns: Patterns


def _search(graph: TaskGraph, problem: Problem, search: Search, *, share: float) -> list[_Choice]:
    """Choices of patterns for a step, the best first. `share`: of the time left, to spend on it."""
    now = search.now()
    deadline = now + share * (search.deadline - now)
    periods, cost = Periods(graph, problem), search.cost(graph, problem)
    found: dict[tuple[int, ...], _Choice] = {}
    for method, order in search.candidates(graph, problem):
        for patterns in _choices(periods.of(order)):
            made = periods.order(patterns)
            if made is not None and tuple(made) not in found:
                own = {kind: next(iter(one)) for kind, one in periods.of(made).items()}
                found[tuple(made)] = _Choice(cost(made), f"pattern of {method}", own)
        if found and search.now() >= now + 0.5 * (deadline - now):
            break
    choices = sorted(found.values(), key=lambda one: one.us)
    for start in choices[:_IMPROVED]:
        if choices[0].us <= problem.lower_bound * (1 + 1e-9) or search.now() >= deadline:
            break
        better = _improved(periods, start, cost, search.now, deadline, problem.lower_bound)
        choices = sorted([*choices, better], key=lambda one: one.us)
    return choices


_COMMON = 4
"""Patterns of each kind that are taken from one order."""
_LAYERS = 8
"""Layers of each kind in the step that patterns are sought on."""
_IMPROVED, _PLAYED = 4, 4
"""Choices that are improved, and that are played on the whole step."""


def _choices(found: dict[Hashable, Counter[Pattern]]) -> Iterator[Patterns]:
    """The most common patterns of an order, then others of its patterns kind by kind."""
    common = {kind: counted.most_common(_COMMON) for kind, counted in found.items()}
    base = {kind: patterns[0][0] for kind, patterns in common.items()}
    yield base
    for kind, patterns in common.items():
        for pattern, _ in patterns[1:]:
            yield base | {kind: pattern}


def _improved(
    periods: Periods, start: _Choice, cost: Cost, spent: Callable[[], float], deadline: float, bound: float
) -> _Choice:
    """Move one task of one pattern to another place as long as that helps and time is left."""
    us, patterns = start.us, start.patterns
    often = [kind for kind, _ in Counter(periods.kinds).most_common()]
    improved = True
    while improved:
        improved = False
        for kind in often:
            for moved in _moves(patterns[kind]):
                if us <= bound * (1 + 1e-9) or spent() >= deadline:
                    return _Choice(us, f"{start.method}, improved", patterns)
                made = periods.order(patterns | {kind: moved})
                if made is not None and (now := cost(made)) < us * (1 - 1e-9):
                    us, improved = now, True
                    patterns = {one: next(iter(seen)) for one, seen in periods.of(made).items()}
                    break
    return _Choice(us, f"{start.method}, improved", patterns)


def _moves(pattern: Pattern) -> Iterator[Pattern]:
    """The pattern with one task elsewhere."""
    for i, task in enumerate(pattern):
        rest = pattern[:i] + pattern[i + 1 :]
        for k in range(len(pattern)):
            if k != i:
                yield (*rest[:k], task, *rest[k:])


def _kind(graph: TaskGraph, layer: int) -> Hashable:
    """What two layers have in common if their regions share a graph: roles, needs, what they get in which state.

    A region's inputs in the forward are what its backward sends on.
    """
    own = [task for task in graph if task.layer == layer]
    needs = set()
    for task in own:
        inputs = graph.consumers(task.name) if graph.backward else graph.producers(task.name)
        for name in inputs:
            other = graph[name]
            needs.add((task.role, other.role, other.layer - layer, other.may_cross))
    return (frozenset((task.role, task.lane, task.may_cross) for task in own), frozenset(needs))


def has_roles(graph: TaskGraph) -> bool:
    """Whether every task has a role of its own in its layer."""
    roles = {(task.layer, task.role) for task in graph if task.role}
    return len(roles) == len(graph)


def _check_roles(graph: TaskGraph) -> None:
    seen: dict[tuple[int, str], Task] = {}
    for task in graph:
        other = seen.setdefault((task.layer, task.role), task)
        if not task.role or other is not task:
            raise ScheduleError(
                "solve",
                f"{task.name} has the role {task.role!r}"
                + ("" if other is task else f", as {other.name} has"),
                where=f"layer {task.layer}",
                hint="for a periodic order each task of a layer needs a role of its own, such as dispatch",
            )
