"""The backward of a task graph: the same tasks against the direction of the data."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from fxskip.errors import ScheduleError
from fxskip.schedule.tasks import COMPUTE, HOST, Crossing, FirstKernel, Task, TaskGraph
from fxskip.strict_model import did_you_mean

_MIRRORED: dict[Crossing, Crossing] = {"next": "previous", "previous": "next", "": ""}


def derive_backward(
    forward: TaskGraph,
    *,
    compute_factor: float = 2.0,
    costs: Mapping[str, float] | None = None,
    split_weights: bool = False,
    weight_share: float = 0.5,
    defer_weights: bool = False,
    reductions: Mapping[Task, Collection[str]] | None = None,
) -> TaskGraph:
    """The tasks that backpropagate through `forward`, with every need reversed.

    A compute task `x` becomes `x.bwd`, or `x.dgrad` and `x.wgrad` where it is split; a collective becomes
    `x.bwd` at the same cost, since the reverse of an all-to-all moves the same bytes. What the host read in the
    forward it knows in the backward, so host tasks have none; they carry no gradient.

    compute_factor      cost of a compute task's backward, in forwards; 2 for matrix products
    costs               costs in microseconds that are known better, by name in the backward graph
    split_weights       take the weight gradient of tasks that have weights out: nobody waits for it but its reduction
    weight_share        part of such a task's backward that is the weight gradient
    defer_weights       where layers run in order, a weight gradient may run in the next layer's region
    reductions          data-parallel all-reduces of weight gradients, as tasks, with the names of the forward tasks
                        whose gradients each adds up; nobody waits for them but the end of the pass

    Raises ScheduleError for a factor or share out of range and for names that do not exist.
    """
    waiting = {task: set(names) for task, names in (reductions or {}).items()}
    _check(forward, compute_factor, weight_share, waiting)
    tasks: list[Task] = [task for task, names in waiting.items() if not names]
    needs: dict[str, list[str]] = {}
    gradient: dict[str, str] = {}
    for task in reversed(list(forward)):
        if task.lane == HOST:
            continue
        is_split = split_weights and task.has_weights and task.lane == COMPUTE
        whole = task.cost_us * (compute_factor if task.lane == COMPUTE else 1.0)
        first = _mirror(forward, task, ".dgrad" if is_split else ".bwd")
        last = first = replace(first, cost_us=whole * (1 - weight_share if is_split else 1.0))
        tasks.append(first)
        gradient[task.name] = first.name
        if is_split:
            crossing: Crossing = "next" if defer_weights else ""
            last = replace(_renamed(task, ".wgrad"), cost_us=whole * weight_share, may_cross=crossing)
            last = replace(last, kernel="long")  # a weight gradient is one matrix product
            tasks.append(last)
            needs[last.name] = [first.name]
        for reduction, names in waiting.items():
            if task.name in names:
                names.discard(task.name)
                needs.setdefault(reduction.name, []).append(last.name)
                tasks += [reduction] if not names else []
    for consumer, producers in forward.needs.items():
        for producer in producers:
            if producer in gradient and consumer in gradient:
                needs.setdefault(gradient[producer], []).append(gradient[consumer])
    return TaskGraph(tasks, needs, backward=not forward.backward).with_costs(costs or {})


def _mirror(forward: TaskGraph, task: Task, ending: str) -> Task:
    """Its backward, in the mirrored region. A collective is issued where the gradient that it sends is made."""
    crossing = _MIRRORED[task.may_cross]
    readers = {forward[name].may_cross for name in forward.consumers(task.name)}
    if task.is_collective and len(readers) == 1:
        crossing = _MIRRORED[readers.pop()]
    # The backward of a block begins with that of its last kernel, in all but elementwise blocks a product.
    kernel: FirstKernel = "short" if task.work == "elementwise" else "long"
    return replace(_renamed(task, ending), may_cross=crossing, kernel=kernel)


def _renamed(task: Task, ending: str) -> Task:
    role = task.role and task.role + ending
    return replace(task, name=task.name + ending, role=role, phase="backward", has_weights=False)


def _check(
    forward: TaskGraph, factor: float, share: float, reductions: Mapping[Task, Collection[str]]
) -> None:
    if not factor > 0:
        raise ScheduleError("derive_backward", f"compute_factor is {factor!r}", hint="write a number above 0")
    if not 0 < share < 1:
        raise ScheduleError(
            "derive_backward", f"weight_share is {share!r}", hint="write a part of 1, such as 0.5"
        )
    computing = [task.name for task in forward if task.lane == COMPUTE]
    for reduction, names in reductions.items():
        for name in names:
            if name not in computing:
                raise ScheduleError(
                    "derive_backward",
                    f"{reduction.name} adds up gradients of {name!r}, which is no compute task",
                    hint=did_you_mean(name, computing),
                )
