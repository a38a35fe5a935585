"""What a step does, as tasks on lanes and the data that they need from each other.

A lane is a queue of the machine: "compute" and "host", and one for the collectives of each process group ("expert",
"tensor", "data", ...). A collective is one task. It is issued by the host, runs on its lane, and is waited for where
its first consumer needs it. Nothing here imports torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, get_args

import networkx as nx

from fxskip.errors import ScheduleError
from fxskip.strict_model import did_you_mean

COMPUTE = "compute"
"""The lane of kernels that compute: one CUDA stream."""
HOST = "host"
"""The lane of what the host must do itself and waits for, such as reading split sizes."""
DATA, EXPERT_DATA = "data", "expert_data"
"""Lanes of gradients that are added up: of what processes with other tokens hold alike, of copies of their experts."""

FirstKernel = Literal["short", "long"]
WorkKind = Literal["matrix", "attention", "elementwise"]
Crossing = Literal["", "next", "previous"]


@dataclass(frozen=True, slots=True)
class Task:
    """One unit that the scheduler orders. Times are microseconds on one rank."""

    name: str
    """Unique in its graph, such as "layers.3.dispatch"."""
    lane: str
    cost_us: float
    """Alone on the machine."""
    layer: int = 0
    """Index of the decoder layer."""
    role: str = ""
    """What it is in its layer ("dispatch"): layers of one kind have the same roles. Needed for a periodic order."""
    phase: str = ""
    """For people: "forward", "backward"."""
    bytes_in_flight: int = 0
    """Of a collective: memory that it holds from its issue until its last consumer is done."""
    kernel: FirstKernel = "long"
    """Of a compute task: whether its first kernel has short thread blocks (residual add, norm, activation), behind
    which a collective gets its SMs at once, or long ones (GEMM, attention)."""
    work: WorkKind = "matrix"
    """Of a compute task: what most of it is. Says how much a collective beside it slows it."""
    has_weights: bool = False
    """Whether its backward can be split into input gradient and weight gradient."""
    host_us: float = 0.0
    """Time that the host takes to launch it. A task on the host lane takes `cost_us` there as well."""
    may_cross: Crossing = ""
    """Where layers run in order, the neighbouring region that it may run in too: "next" for what finishes a value
    that is pending at the end of its layer, "previous" for the gradient of such a task."""

    @property
    def is_collective(self) -> bool:
        return self.lane not in (COMPUTE, HOST)


class TaskGraph:
    """Tasks, in program order, and what each needs. Immutable.

    tasks     in program order: the order breaks ties, and is the reference that a schedule is compared with
    needs     for a task, the tasks whose results it reads
    backward  layers run from the last to the first

    Raises ScheduleError for names that are unknown or given twice, costs that are not positive and finite, and
    needs that form a cycle.
    """

    def __init__(
        self, tasks: Iterable[Task], needs: Mapping[str, Iterable[str]], *, backward: bool = False
    ) -> None:
        self.backward = backward
        self._graph = nx.DiGraph()
        for task in tasks:
            _check(task)
            if task.name in self._graph:
                raise ScheduleError(
                    "TaskGraph", "two tasks have one name", where=task.name, hint="give each its own"
                )
            self._graph.add_node(task.name, task=task)
        for name, producers in needs.items():
            for producer in producers:
                self._require(name)
                self._require(producer, reader=name)
                self._graph.add_edge(producer, name)
        if not nx.is_directed_acyclic_graph(self._graph):
            cycle = [edge[0] for edge in nx.find_cycle(self._graph)]
            raise ScheduleError(
                "TaskGraph",
                "the tasks of a cycle wait for each other",
                where=" -> ".join([*cycle, cycle[0]]),
                hint="drop one of these needs",
            )
        nx.freeze(self._graph)

    def _require(self, name: str, reader: str | None = None) -> None:
        if name not in self._graph:
            raise ScheduleError(
                "TaskGraph",
                f"no task is called {name!r}",
                where=None if reader is None else f"needs of {reader}",
                hint=did_you_mean(name, self._graph),
            )

    def __len__(self) -> int:
        return len(self._graph)

    def __iter__(self) -> Iterator[Task]:
        return (task for _, task in self._graph.nodes(data="task"))

    def __contains__(self, name: str) -> bool:
        return name in self._graph

    def __getitem__(self, name: str) -> Task:
        self._require(name)
        task: Task = self._graph.nodes[name]["task"]
        return task

    def producers(self, name: str) -> tuple[str, ...]:
        """What the task reads, in program order."""
        return tuple(sorted(self._graph.pred[name], key=self._position.__getitem__))

    def consumers(self, name: str) -> tuple[str, ...]:
        """Who reads the task's result, in program order."""
        return tuple(sorted(self._graph.succ[name], key=self._position.__getitem__))

    @cached_property
    def needs(self) -> dict[str, tuple[str, ...]]:
        """For each task that reads others, whom."""
        return {name: self.producers(name) for name in self._graph if self._graph.pred[name]}

    @cached_property
    def _position(self) -> dict[str, int]:
        return {name: i for i, name in enumerate(self._graph)}

    @cached_property
    def program_order(self) -> tuple[str, ...]:
        """The order given, with a task after all that it needs."""
        order = nx.lexicographical_topological_sort(self._graph, key=self._position.__getitem__)
        return tuple(order)

    @cached_property
    def lanes(self) -> tuple[str, ...]:
        """Compute, host where it has a task, then the others by name."""
        own = {task.lane for task in self} - {COMPUTE, HOST}
        host = any(task.lane == HOST for task in self)
        return (COMPUTE, *((HOST,) if host else ()), *sorted(own))

    @cached_property
    def layers(self) -> tuple[int, ...]:
        """In the order in which they run."""
        return tuple(sorted({task.layer for task in self}, reverse=self.backward))

    def with_costs(self, costs: Mapping[str, float]) -> TaskGraph:
        """The same graph with other costs, by name; tasks that `costs` does not name keep theirs.

        Raises ScheduleError for a name that no task has.
        """
        for name in costs:
            self._require(name, reader="the costs")
        tasks = [replace(task, cost_us=costs.get(task.name, task.cost_us)) for task in self]
        return TaskGraph(tasks, self.needs, backward=self.backward)


def _check(task: Task) -> None:
    """Raise ScheduleError for values that no task can have."""
    faults = [
        (not task.name, "it has no name", "give each task a name of its own"),
        (not task.lane, "it has no lane", f'write "{COMPUTE}", "{HOST}", or the name of a process group'),
        (not (math.isfinite(task.cost_us) and task.cost_us > 0), f"cost_us is {task.cost_us!r}", _POSITIVE),
        (not (math.isfinite(task.host_us) and task.host_us >= 0), f"host_us is {task.host_us!r}", "write 0 or more"),
        (task.layer < 0, f"layer is {task.layer}", "write the index of its decoder layer, 0 or more"),
        (task.bytes_in_flight < 0, f"bytes_in_flight is {task.bytes_in_flight}", "write 0 or more"),
        (
            bool(task.bytes_in_flight) and not task.is_collective,
            f"it holds {task.bytes_in_flight} bytes in flight on the lane {task.lane!r}",
            "only collectives have values in flight",
        ),
    ]  # fmt: skip
    for name, kinds in (("kernel", FirstKernel), ("work", WorkKind), ("may_cross", Crossing)):
        value, known = getattr(task, name), get_args(kinds)
        faults.append(
            (value not in known, f"{name} is {value!r}", f"write one of {', '.join(map(repr, known))}")
        )
    for is_wrong, found, hint in faults:
        if is_wrong:
            raise ScheduleError("TaskGraph", found, where=task.name or "a task", hint=hint)


_POSITIVE = "write microseconds, more than 0 and finite; leave out what costs nothing"
