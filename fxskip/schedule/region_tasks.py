"""The tasks of a region's graph, and its nodes in the order that a schedule gives the tasks.

A task is a part of a sub-block between two matrix products, or between two collectives. Layers of one kind follow each
other, so the order is sought for several copies of the region in a row, each of which reads what the one before leaves:

    copy 0   ... start combine        copy 1   wait combine, router ...        copy 2 ...
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from torch import fx

from fxskip.collectives.expert_parallel import run_own_experts, start_counts, wait_counts
from fxskip.collectives.in_flight import start_of_next
from fxskip.parallel import EXPERT
from fxskip.passes.dependencies import Unit
from fxskip.passes.split_collectives import (
    flight_kind,
    flight_of,
    is_start,
    is_wait,
    sends_forward,
)
from fxskip.schedule.node_costs import NodeCosts, is_attention, is_heavy
from fxskip.schedule.region_graph import RegionGraph, Units, data_needs
from fxskip.schedule.region_roles import RegionRoles, has, sends_only_back, waits_forward
from fxskip.schedule.tasks import COMPUTE, EXPERT_DATA, HOST, Task, TaskGraph

_COPIES = 4
"""Regions in a row for which an order is sought: enough for what crosses a border to settle."""

_ALMOST_NOTHING_US = 0.01
"""Of a task that only takes views: times are positive."""


ARRIVAL = "arrival"
"""The role of the exchange that the layer before started."""


TASK = "fxskip_task"
"""Key in a node's metadata: role and lane of the task that the node belongs to."""
WAITS_FOR = "fxskip_waits_for"
"""Key in the metadata of a wait: role of the collective."""


def wait_step(role: str) -> str:
    """The name, in a region's program, of the step that waits for a collective."""
    return f"{role}.wait"


def is_wait_step(name: str) -> bool:
    """Whether a step's name is one that `wait_step` gives."""
    return name.endswith(".wait")


@dataclass(frozen=True)
class RegionTasks:
    """A region's units by task, and the task graph of one region or of several in a row."""

    graph: TaskGraph
    gradients: TaskGraph
    """Of the same regions, against whose direction gradients come back: without what has none; sums of values, which
    send nothing back, are compute of no time, and sums of gradients are collectives, `enter`."""
    roles: dict[str, tuple[Unit, ...]]
    """The units of one region that a task stands for, by its role, in program order."""
    waits: dict[str, tuple[Unit, ...]]
    """What a task waits for, by its role."""
    first: tuple[Unit, ...]
    """Units before all tasks: what enters the region."""
    copies: int
    leaving: frozenset[str]
    """Roles of collectives that the next layer waits for."""
    collectives: dict[fx.Node, str]
    """The role of each flight."""
    sums_back: tuple[fx.Node, ...]
    """Flights, starts and waits of sums of gradients; they send nothing forward, and run with a task of compute."""

    @property
    def copy(self) -> int:
        """Number of the region in the graph that stands for one between others."""
        return max(0, self.copies - 2)

    @property
    def lanes(self) -> dict[str, str]:
        """The lane of each task of a region, by its role; those of `gradients` alone are among them."""
        own = [task for graph in (self.gradients, self.graph) for task in graph if task.layer == self.copy]
        return {task.role: task.lane for task in own if task.role != ARRIVAL}

    def gradients_of(self, lane: str) -> tuple[str, ...]:
        """Roles whose backward makes the gradients that are added up on `lane`: of experts, or of all parameters."""
        computing = {task.role for task in self.graph if task.lane == COMPUTE}
        computing &= {task.role for task in self.gradients}
        if lane == EXPERT_DATA:
            computing = {
                r for r in computing if any(_runs_experts(n) for u in self.roles[r] for n in u.nodes)
            }
        return tuple(role for role in self.roles if role in computing)

    def mark(self) -> None:
        """Note in the metadata of the units' nodes which task each belongs to, or waits for."""
        lanes = self.lanes
        for role, group in self.roles.items():
            place = role, lanes[role]
            for node in (n for unit in group for n in unit.nodes):
                node.meta[TASK] = place
        for node in (n for group in self.waits.values() for unit in group for n in unit.nodes):
            node.meta[WAITS_FOR] = self.collectives.get(flight_of(node), ARRIVAL)
        for node in self.sums_back:  # marked above as of the task of compute that they run with
            role = self.collectives[flight_of(node)]
            if is_wait(node):
                node.meta[WAITS_FOR] = role
                del node.meta[TASK]
            else:
                node.meta[TASK] = role, lanes[role]

    def order(self, host_order: Sequence[str]) -> list[Unit]:
        """The units in the order that a schedule of `graph` gives a region between others."""
        found = dict.fromkeys(self.first)
        for name in host_order:
            task = self.graph[name]
            if task.layer == self.copy and task.role in self.roles:
                found |= dict.fromkeys((*self.waits[task.role], *self.roles[task.role]))
        return list(found)


def region_tasks(units: Sequence[Unit], costs: NodeCosts, *, repeats: bool) -> RegionTasks:
    """The tasks of a region that consists of `units`, in program order.

    repeats   the region before this one is of the same kind, and leaves what this one finds

    Needs the stream markers, and collectives that are split.
    """
    return _Builder(units, costs).build(_COPIES if repeats else 1)


class _Builder:
    def __init__(self, units: Sequence[Unit], costs: NodeCosts) -> None:
        self.units = units
        self.costs = costs
        self.named = RegionRoles(units)

    def build(self, copies: int) -> RegionTasks:
        roles = _by_role(self.named.role)
        waiting = [u for u in self.units if has(u, waits_forward)]
        waits = {r: tuple(w for w in waiting if any(w in g.before for g in own)) for r, own in roles.items()}
        forward = {role: self._task(role, own) for role, own in roles.items()}
        return RegionTasks(
            self._graph(forward, self.named.role, {u: u.before for u in self.units}, waiting, copies),
            self._gradients(forward, copies),
            {role: tuple(own) for role, own in roles.items()},
            waits,
            tuple(u for u in self.units if self.named.enters(u)),
            copies,
            frozenset(r for r, own in roles.items() if self._any(own, lambda n: n.target is start_of_next)),
            self.named.collective,
            tuple(n for u in self.units for n in u.nodes if sends_only_back(n)),
        )

    def _graph(
        self,
        tasks: dict[str, Task],
        role: dict[Unit, str],
        before: Units,
        waits: list[Unit],
        copies: int,
        *,
        backward: bool = False,
    ) -> TaskGraph:
        entering = [u for u in self.units if self.named.enters(u)]
        graph = RegionGraph(tasks, role, before, waits, entering, self.named.left_for)
        return graph.joined(copies, self._arrival(waits, before, backward) if copies == 1 else None)

    def _gradients(self, forward: dict[str, Task], copies: int) -> TaskGraph:
        """The tasks that gradients come back through: collectives are those that have something to send back."""
        waits = [u for u in self.units if has(u, is_wait)]
        role = {unit: name for unit, name in (self.named.role | self.named.back).items() if unit not in waits}
        tasks: dict[str, Task] = {}
        for name, own in _by_role(role).items():
            start = next((n for u in own for n in u.nodes if is_start(n)), None)
            if start is not None:
                tasks[name] = self._sent_back(name, start)
            elif forward[name].lane == COMPUTE:  # the host reads counts, which have no gradients
                tasks[name] = forward[name]
        role = {unit: name for unit, name in role.items() if name in tasks}
        return self._graph(tasks, role, data_needs(self.units), waits, copies, backward=True)

    def _sent_back(self, role: str, node: fx.Node) -> Task:
        """Of the collective that `node` starts or waits for, as its gradient has to do with it."""
        kind, lane = flight_kind(node)
        if kind == "reduce":  # each rank has the gradient of its part already
            return Task(
                role,
                COMPUTE,
                _ALMOST_NOTHING_US,
                role=role,
                phase="forward",
                kernel="short",
                work="elementwise",
            )
        us = max(self.costs.exchange_us(node), _ALMOST_NOTHING_US)
        return Task(role, lane, us, role=role, phase="forward", bytes_in_flight=self.costs.bytes(node))

    def _arrival(self, waits: list[Unit], before: Units, backward: bool) -> Task | None:
        """Of what a region that is looked at alone finds under way: it has to wait as if it had just started."""
        arriving = [u for u in waits if any(self.named.enters(b) for b in before[u])]
        if not arriving:
            return None
        node = next(n for n in arriving[0].nodes if is_wait(n))
        if backward:
            return replace(self._sent_back(ARRIVAL, node), bytes_in_flight=0)
        return Task(
            ARRIVAL, flight_kind(node)[1], self.costs.exchange_us(node), role=ARRIVAL, phase="forward"
        )

    def _any(self, group: Sequence[Unit], question: Callable[[fx.Node], bool]) -> bool:
        return any(has(unit, question) for unit in group)

    # --- what a task costs and needs ---

    def _task(self, role: str, group: Sequence[Unit]) -> Task:
        nodes = [n for unit in group for n in unit.nodes]
        us = max(sum(map(self.costs.us, nodes)), _ALMOST_NOTHING_US)
        if any(n.target is wait_counts for n in nodes):
            return Task(role, HOST, us, role=role, phase="forward")
        if any(n.target is start_counts for n in nodes):
            return Task(role, EXPERT, us, role=role, phase="forward")
        if (start := next(filter(_starts, nodes), None)) is not None:
            held = self.costs.bytes(start)
            return Task(role, flight_kind(start)[1], us, role=role, phase="forward", bytes_in_flight=held)
        working = [n for n in nodes if self.costs.us(n)]
        heavy = [n for n in working if is_heavy(n)]
        attention = sum(self.costs.us(n) for n in heavy if is_attention(n)) > us / 2
        return Task(
            role,
            COMPUTE,
            us,
            role=role,
            phase="forward",
            kernel="long" if working and is_heavy(working[0]) else "short",
            work="attention" if attention else "matrix" if heavy else "elementwise",
            has_weights=any(not is_attention(n) for n in heavy),
        )


def _by_role(role: dict[Unit, str]) -> dict[str, list[Unit]]:
    found: dict[str, list[Unit]] = {}
    for unit, name in role.items():
        found.setdefault(name, []).append(unit)
    return found


def _runs_experts(node: fx.Node) -> bool:
    return node.target is run_own_experts


def _starts(node: fx.Node) -> bool:
    return is_start(node) and sends_forward(node)
