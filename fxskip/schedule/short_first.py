"""Short kernels first after a start: behind a long one a collective gets its SMs only when that one drains."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from fxskip.schedule.problem import Problem
from fxskip.schedule.tasks import COMPUTE, TaskGraph

AHEAD = 8
"""How many compute tasks behind a start are looked at for one that begins with a short kernel."""


def short_first(
    graph: TaskGraph,
    problem: Problem,
    order: list[int],
    cost: Callable[[Sequence[int]], float],
    is_over: Callable[[], bool],
    accepts: Callable[[Sequence[int]], bool],
) -> list[int]:
    """The order with tasks that begin with a short kernel moved right behind the starts before them, where that pays.

    A move is made in all layers at once, for a pair of roles, and kept if the step gets shorter and `accepts` says so.
    """
    best = cost(order)
    for start_role, short_role in list(dict.fromkeys(_pairs(graph, problem, order))):
        if is_over():
            break
        moved = _moved(graph, problem, order, start_role, short_role)
        if moved != order and accepts(moved) and (us := cost(moved)) < best * (1 - 1e-9):
            best, order = us, moved
    return order


def _pairs(graph: TaskGraph, problem: Problem, order: Sequence[int]) -> Iterator[tuple[str, str]]:
    """Roles of a collective and of a task behind it that could go first."""
    for at, i in enumerate(order):
        if graph[problem.names[i]].is_collective:
            for k in _behind(graph, problem, order, at):
                yield _role(graph, problem, i), _role(graph, problem, order[k])


def _behind(graph: TaskGraph, problem: Problem, order: Sequence[int], at: int) -> Iterator[int]:
    """Positions of tasks that begin with a short kernel, behind one that does not, soon after the start."""
    compute = [
        k for k in range(at + 1, min(len(order), at + 4 * AHEAD)) if _is_compute(graph, problem, order[k])
    ]
    if compute and graph[problem.names[order[compute[0]]]].kernel == "long":
        yield from (k for k in compute[1:AHEAD] if graph[problem.names[order[k]]].kernel == "short")


def _moved(
    graph: TaskGraph, problem: Problem, order: Sequence[int], start_role: str, short_role: str
) -> list[int]:
    """The move wherever it is possible."""
    found = list(order)
    for at in range(len(found)):
        if _role(graph, problem, found[at]) != start_role:
            continue
        behind = _behind(graph, problem, found, at)
        source = next((k for k in behind if _role(graph, problem, found[k]) == short_role), None)
        if source is not None and _may_pass(problem, found[source], found[at + 1 : source]):
            found.insert(at + 1, found.pop(source))
    return found


def _may_pass(problem: Problem, i: int, others: Sequence[int]) -> bool:
    """Whether a compute task may go before the tasks that stand right before it. It takes no room in flight."""
    return all(j not in problem.producers[i] and problem.high[j] >= problem.low[i] for j in others)


def _is_compute(graph: TaskGraph, problem: Problem, i: int) -> bool:
    return graph[problem.names[i]].lane == COMPUTE


def _role(graph: TaskGraph, problem: Problem, i: int) -> str:
    task = graph[problem.names[i]]
    return task.role or task.name
