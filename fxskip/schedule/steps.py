"""What the host does, one step after another: the form in which an order is run and simulated."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from fxskip.schedule.tasks import HOST, TaskGraph


@dataclass(frozen=True, slots=True)
class Step:
    """One thing that the host does.

    run    a task of compute is enqueued, or a task of the host is done
    start  a collective is issued
    wait   the compute stream waits for a collective
    """

    action: Literal["run", "start", "wait"]
    task: str

    def __str__(self) -> str:
        return f"{self.action} {self.task}"


def steps_of(graph: TaskGraph, order: Iterable[str]) -> tuple[Step, ...]:
    """Each collective is waited for just before its first consumer in the order, or at the end if it has none.

    A task of the host waits by itself for what it reads, and leaves the compute stream alone.
    """
    pending: dict[str, None] = {}
    steps: list[Step] = []
    for name in order:
        task = graph[name]
        if task.lane != HOST:
            for producer in graph.producers(name):
                if producer in pending:
                    del pending[producer]
                    steps.append(Step("wait", producer))
        steps.append(Step("start" if task.is_collective else "run", name))
        if task.is_collective:
            pending[name] = None
    return (*steps, *(Step("wait", name) for name in pending))


def blocking(steps: Sequence[Step]) -> tuple[Step, ...]:
    """The same order with every collective waited for right after its start."""
    found: list[Step] = []
    for step in steps:
        if step.action != "wait":
            found.append(step)
        if step.action == "start":
            found.append(Step("wait", step.task))
    return tuple(found)
