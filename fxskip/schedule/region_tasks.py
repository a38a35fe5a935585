"""The tasks of a region's graph, and its nodes in the order that a schedule gives the tasks.

A task is a part of a sub-block between two matrix products, or between two collectives. Layers of one kind follow each
other, so the order is sought for several copies of the region in a row, each of which reads what the one before leaves:

    copy 0   ... start combine        copy 1   wait combine, router ...        copy 2 ...
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from torch import fx

from fxskip.collectives.border import arrived_value, leave_pending, stand_in
from fxskip.collectives.expert_parallel import run_own_experts, start_counts, wait_counts
from fxskip.collectives.in_flight import start_of_next
from fxskip.ir import info, stream_inputs, stream_outputs
from fxskip.parallel import EXPERT
from fxskip.passes.dependencies import Unit
from fxskip.passes.split_collectives import is_start, is_wait, sends_forward, take_off, take_off_sum
from fxskip.schedule.node_costs import NodeCosts, is_attention, is_heavy
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

_ROUTES: dict[object, str] = {start_counts: "counts", wait_counts: "routing"}


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
    roles: dict[str, tuple[Unit, ...]]
    """The units of one region that a task stands for, by its role, in program order."""
    waits: dict[str, tuple[Unit, ...]]
    """What a task waits for, by its role."""
    first: tuple[Unit, ...]
    """Units before all tasks: what enters the region."""
    copies: int
    counts: frozenset[str]
    """Roles of exchanges that no gradient comes back through."""
    leaving: frozenset[str]
    """Roles of collectives that the next layer waits for."""
    collectives: dict[fx.Node, str]
    """The role of each flight."""

    @property
    def copy(self) -> int:
        """Number of the region in the graph that stands for one between others."""
        return max(0, self.copies - 2)

    def gradients_of(self, lane: str) -> tuple[str, ...]:
        """Roles whose backward makes the gradients that are added up on `lane`: of experts, or of all parameters."""
        computing = {task.role for task in self.graph if task.lane == COMPUTE} & self.roles.keys()
        if lane == EXPERT_DATA:
            computing = {
                r for r in computing if any(_runs_experts(n) for u in self.roles[r] for n in u.nodes)
            }
        return tuple(role for role in self.roles if role in computing)

    def mark(self) -> None:
        """Note in the metadata of the units' nodes which task each belongs to, or waits for."""
        for role, group in self.roles.items():
            place = role, self.graph[f"{self.copy}.{role}"].lane
            for node in (n for unit in group for n in unit.nodes):
                node.meta[TASK] = place
        for node in (n for group in self.waits.values() for unit in group for n in unit.nodes):
            node.meta[WAITS_FOR] = self.collectives.get(node.all_input_nodes[-1], ARRIVAL)

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
        self.unit_of = {node: unit for unit in units for node in unit.nodes}
        graph = units[0].nodes[0].graph
        self.inputs, self.outputs = stream_inputs(graph), stream_outputs(graph)
        self.leaving = next((n for n in graph.nodes if n.target is leave_pending), None)
        self.position = {unit: i for i, unit in enumerate(units)}
        self.block: dict[Unit, str] = {}
        self.role: dict[Unit, str] = {}
        self.collective: dict[fx.Node, str] = {}
        self._name_roles()

    def build(self, copies: int) -> RegionTasks:
        roles: dict[str, list[Unit]] = {}
        for unit, role in self.role.items():
            roles.setdefault(role, []).append(unit)
        tasks: list[Task] = []
        needs: dict[str, set[str]] = {}
        own = {role: self._needs(group) for role, group in roles.items()}
        for copy in range(copies):
            for role, group in roles.items():
                name = f"{copy}.{role}"
                tasks.append(replace(self._task(role, group), name=name, layer=copy))
                needs[name] = {f"{copy}.{r}" for r in own[role] if r in roles}
                if copy:
                    needs[name] |= {f"{copy - 1}.{r}" for r in self._crossing(group) if r in roles}
        self._add_arrival(tasks, needs, roles, copies)
        waits = {
            role: tuple(u for u in self.units if self._is(u, _waits) and any(u in g.before for g in group))
            for role, group in roles.items()
        }
        return RegionTasks(
            TaskGraph(tasks, needs),
            {r: tuple(group) for r, group in roles.items()},
            waits,
            tuple(u for u in self.units if self._enters(u)),
            copies,
            frozenset(
                r for r, group in roles.items() if self._any(group, lambda n: n.target is start_counts)
            ),
            frozenset(
                r for r, group in roles.items() if self._any(group, lambda n: n.target is start_of_next)
            ),
            self.collective,
        )

    def _any(self, group: Sequence[Unit], question: Callable[[fx.Node], bool]) -> bool:
        return any(self._is(unit, question) for unit in group)

    def _add_arrival(
        self, tasks: list[Task], needs: dict[str, set[str]], roles: dict[str, list[Unit]], copies: int
    ) -> None:
        """A region that is looked at alone finds what arrives under way: it has to wait as if it had just started."""
        arriving = [u for u in self.units if self._is(u, _waits) and any(self._enters(b) for b in u.before)]
        if copies > 1 or not arriving:
            return
        node = next(n for n in arriving[0].nodes if _waits(n))
        tasks.insert(
            0, Task(f"0.{ARRIVAL}", EXPERT, self.costs.exchange_us(node), role=ARRIVAL, phase="forward")
        )
        for role, group in roles.items():
            if any(u in unit.before for unit in group for u in arriving):
                needs[f"0.{role}"].add(f"0.{ARRIVAL}")

    # --- which unit belongs to which task ---

    def _name_roles(self) -> None:
        """A role for each unit but those that enter, wait, or leave."""
        ahead, behind = self._collectives_before(), self._collectives_after()
        level: dict[Unit, int] = {}
        names: dict[tuple[object, ...], str] = {}
        for unit in self.units:
            heavy = any(map(is_heavy, unit.nodes))
            level[unit] = max((level[b] for b in unit.before), default=0) + heavy
            if self._enters(unit) or self._leaves(unit) or self._is(unit, _waits):
                continue
            if (collective := self._collective(unit)) is not None:
                self.role[unit] = collective
                continue
            block = self.block[unit] = self._block(unit)
            key = (block, ahead[unit], behind[unit], level[unit])
            if key not in names:
                names[key] = f"{block}.{sum(n.startswith(f'{block}.') for n in names.values())}"
            self.role[unit] = names[key]

    def _collective(self, unit: Unit) -> str | None:
        """The role of a unit that prepares, starts or, on the host, ends an exchange; a second one is dispatch.2."""
        for node in unit.nodes:
            if node.target in _ROUTES:
                return self._numbered(node, _ROUTES[node.target])
            if is_start(node) or node.target in (take_off, take_off_sum):
                flight = node.args[1] if is_start(node) else node
                assert isinstance(flight, fx.Node)
                if flight.target is take_off_sum and flight.args[0] == "enter":
                    return None  # sends nothing forward
                named = flight.args[1] if flight.target is take_off else flight.args[0]
                return self._numbered(flight, str(named))
        return None

    def _numbered(self, node: fx.Node, name: str) -> str:
        if node not in self.collective:
            number = 1 + sum(one.partition(".")[0] == name for one in self.collective.values())
            self.collective[node] = name if number == 1 else f"{name}.{number}"
        return self.collective[node]

    def _block(self, unit: Unit) -> str:
        """The sub-block that a unit belongs to; what no pass annotated belongs to its producer's."""
        about = next((a for n in unit.nodes if (a := info(n)) is not None), None)
        if about is None:
            return next(
                (self.block[p] for p in reversed(self.units_before(unit)) if p in self.block), "stream"
            )
        return "stream" if about.role in ("residual", "variant") else f"{about.kind}{about.write}"

    def units_before(self, unit: Unit) -> list[Unit]:
        """What a unit needs, in program order."""
        return sorted(unit.before, key=self.position.__getitem__)

    def _enters(self, unit: Unit) -> bool:
        return any(n.target is arrived_value or n in self.inputs.values() for n in unit.nodes)

    def _leaves(self, unit: Unit) -> bool:
        out = self.outputs.values()
        return any(n.target in (leave_pending, stand_in) or n in out for n in unit.nodes)

    def _is(self, unit: Unit, question: object) -> bool:
        return any(map(question, unit.nodes))  # type: ignore[call-overload]

    def _collectives_before(self) -> dict[Unit, frozenset[Unit]]:
        found: dict[Unit, frozenset[Unit]] = {}
        for unit in self.units:
            own = frozenset({unit}) if self._is(unit, _waits) else frozenset()
            found[unit] = own.union(*(found[b] for b in unit.before))
        return found

    def _collectives_after(self) -> dict[Unit, frozenset[Unit]]:
        found: dict[Unit, set[Unit]] = {unit: set() for unit in self.units}
        for unit in reversed(self.units):
            if self._collective(unit) is not None:
                found[unit].add(unit)
            for before in unit.before:
                found[before] |= found[unit]
        return {unit: frozenset(after) for unit, after in found.items()}

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
            return Task(role, _lane(start), us, role=role, phase="forward", bytes_in_flight=held)
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

    def _needs(self, group: Sequence[Unit]) -> set[str]:
        """The roles of the same region whose results a task reads; a wait stands for its collective."""
        found: set[str] = set()
        for unit in group:
            for before in unit.before:
                sources = before.before if self._is(before, _waits) else {before}
                found |= {self.role[s] for s in sources if s in self.role}
        return found - {self.role[group[0]]}

    def _crossing(self, group: Sequence[Unit]) -> set[str]:
        """The roles of the region before whose results a task reads."""
        found: set[str] = set()
        for unit in group:
            entered = {b for b in unit.before if self._enters(b)}
            for before in unit.before:
                if self._is(before, _waits):
                    entered |= {b for b in before.before if self._enters(b)}
            for node in (n for one in entered for n in one.nodes):
                left = self._left_for(node)
                source = self.unit_of.get(left) if left is not None else None
                if source is not None and source in self.role:
                    found.add(self.role[source])
        return found

    def _left_for(self, node: fx.Node) -> fx.Node | None:
        """What a region of this kind leaves for `node`, by which it enters the next."""
        if node.target is arrived_value:
            left = self.leaving.args[1 + int(str(node.args[0]))] if self.leaving is not None else None
        else:
            number = next(i for i, marker in self.inputs.items() if marker is node)
            left = self.outputs[number].args[0] if number in self.outputs else None
        return left if isinstance(left, fx.Node) else None


def _runs_experts(node: fx.Node) -> bool:
    return node.target is run_own_experts


def _starts(node: fx.Node) -> bool:
    return is_start(node) and sends_forward(node)


def _waits(node: fx.Node) -> bool:
    return is_wait(node) and sends_forward(node)


def _lane(start: fx.Node) -> str:
    """The queue of the group that a collective runs in."""
    flight = start.args[1]
    assert isinstance(flight, fx.Node)
    return str(flight.args[1]) if flight.target is take_off_sum else EXPERT
