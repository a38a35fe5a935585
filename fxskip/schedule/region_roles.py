"""Which task each unit of a region's graph belongs to: the part of a sub-block between two matrix products, or between
two collectives; or a collective."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import fx

from fxskip.collectives.border import arrived_value, leave_pending, stand_in
from fxskip.collectives.expert_parallel import start_counts, wait_counts
from fxskip.ir import info, stream_inputs, stream_outputs
from fxskip.passes.dependencies import Unit
from fxskip.passes.split_collectives import (
    flight_kind,
    flight_of,
    is_start,
    is_wait,
    sends_forward,
    take_off,
    take_off_sum,
)
from fxskip.schedule.node_costs import is_heavy

_ROUTES: dict[object, str] = {start_counts: "counts", wait_counts: "routing"}


class RegionRoles:
    """The roles of a region's units."""

    def __init__(self, units: Sequence[Unit]) -> None:
        """`units` in program order, with the stream markers, and collectives that are split."""
        self.role: dict[Unit, str] = {}
        """Of each unit but those by which values enter or leave, and those that wait for what is sent forward."""
        self.back: dict[Unit, str] = {}
        """Of units of sums of gradients, which run with a task of compute, the role of the sum."""
        self.collective: dict[fx.Node, str] = {}
        """Of each flight."""
        self.units = units
        self._unit_of = {node: unit for unit in units for node in unit.nodes}
        graph = units[0].nodes[0].graph
        self._inputs, self._outputs = stream_inputs(graph), stream_outputs(graph)
        self._leaving = next((n for n in graph.nodes if n.target is leave_pending), None)
        self._position = {unit: i for i, unit in enumerate(units)}
        self._blocks: dict[Unit, str] = {}
        self._name_roles()

    def _name_roles(self) -> None:
        """A role for each unit but those that enter, wait, or leave."""
        ahead, behind = self._collectives_before(), self._collectives_after()
        level: dict[Unit, int] = {}
        names: dict[tuple[object, ...], str] = {}
        for unit in self.units:
            heavy = any(map(is_heavy, unit.nodes))
            level[unit] = max((level[b] for b in unit.before), default=0) + heavy
            if self.enters(unit) or self._leaves(unit) or has(unit, waits_forward):
                continue
            if (collective := self._collective(unit)) is not None:
                self.role[unit] = collective
                continue
            issued = next((n for n in unit.nodes if sends_only_back(n) and not is_wait(n)), None)
            if issued is not None:
                self.back[unit] = self._numbered_flight(issued)
            block = self._blocks[unit] = self._block(unit)
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
                return self._numbered_flight(node) if sends_forward(node) else None
        return None

    def _numbered(self, node: fx.Node, name: str) -> str:
        if node not in self.collective:
            number = 1 + sum(one.partition(".")[0] == name for one in self.collective.values())
            self.collective[node] = name if number == 1 else f"{name}.{number}"
        return self.collective[node]

    def _numbered_flight(self, node: fx.Node) -> str:
        """The role of a collective, of whose flight, start or wait the node is."""
        return self._numbered(flight_of(node), flight_kind(node)[0])

    def _block(self, unit: Unit) -> str:
        """The sub-block that a unit belongs to; what no pass annotated belongs to its producer's."""
        about = next((a for n in unit.nodes if (a := info(n)) is not None), None)
        if about is None:
            return next(
                (self._blocks[p] for p in reversed(self._units_before(unit)) if p in self._blocks), "stream"
            )
        return "stream" if about.role in ("residual", "variant") else f"{about.kind}{about.write}"

    def _units_before(self, unit: Unit) -> list[Unit]:
        """What a unit needs, in program order."""
        return sorted(unit.before, key=self._position.__getitem__)

    def enters(self, unit: Unit) -> bool:
        """Whether values enter the region by the unit."""
        return any(n.target is arrived_value or n in self._inputs.values() for n in unit.nodes)

    def _leaves(self, unit: Unit) -> bool:
        out = self._outputs.values()
        return any(n.target in (leave_pending, stand_in) or n in out for n in unit.nodes)

    def _collectives_before(self) -> dict[Unit, frozenset[Unit]]:
        found: dict[Unit, frozenset[Unit]] = {}
        for unit in self.units:
            # Those that only gradients go through, too: else a task could stand on both sides of one.
            own = frozenset({unit}) if has(unit, is_wait) else frozenset()
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

    def left_for(self, node: fx.Node) -> Unit | None:
        """The unit that leaves, in a region of this kind, what enters the next one by `node`."""
        if node.target is arrived_value:
            left = self._leaving.args[1 + int(str(node.args[0]))] if self._leaving is not None else None
        else:
            number = next(i for i, marker in self._inputs.items() if marker is node)
            left = self._outputs[number].args[0] if number in self._outputs else None
        return self._unit_of.get(left) if isinstance(left, fx.Node) else None


def has(unit: Unit, question: Callable[[fx.Node], bool]) -> bool:
    """Whether a node of the unit answers the question with yes."""
    return any(map(question, unit.nodes))


def waits_forward(node: fx.Node) -> bool:
    """Whether the node waits for something that is sent in the forward pass."""
    return is_wait(node) and sends_forward(node)


def sends_only_back(node: fx.Node) -> bool:
    """Whether the node is of a collective that only gradients go through."""
    return (is_start(node) or is_wait(node) or node.target is take_off_sum) and not sends_forward(node)
