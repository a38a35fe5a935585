"""What the tasks of a region need from each other, in one region or in several in a row."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import fx

from fxskip.passes.dependencies import Unit
from fxskip.schedule.tasks import Task, TaskGraph

Units = Mapping[Unit, Collection[Unit]]


def data_needs(units: Sequence[Unit]) -> dict[Unit, set[Unit]]:
    """For each unit those whose values it reads. `Unit.before` also has what must be in order for other reasons."""
    of = {node: unit for unit in units for node in unit.nodes}
    return {u: {of[n] for node in u.nodes for n in node.all_input_nodes if n in of} - {u} for u in units}


@dataclass(frozen=True)
class RegionGraph:
    """A region's tasks, and who reads whom."""

    tasks: Mapping[str, Task]
    """By role, in program order."""
    role: Mapping[Unit, str]
    """Of the units that belong to a task."""
    before: Units
    """What each unit needs."""
    waits: Collection[Unit]
    """Units that only hand on what another one has started."""
    entering: Collection[Unit]
    """Units by which values enter the region."""
    left_for: Callable[[fx.Node], Unit | None]
    """For a node by which a value enters: the unit that leaves this value, in a region of the same kind before."""

    def joined(self, copies: int, arrival: Task | None) -> TaskGraph:
        """The graph of `copies` regions in a row, in which a task is called `copy.role`.

        arrival   stands, in front of a region that is looked at alone, for what arrives there under way; None where
                  nothing does, or where a region of this kind leaves it
        """
        groups: dict[str, list[Unit]] = {role: [] for role in self.tasks}
        for unit, role in self.role.items():
            groups[role].append(unit)
        tasks: list[Task] = []
        needs: dict[str, set[str]] = {}
        for copy in range(copies):
            for role, group in groups.items():
                name = f"{copy}.{role}"
                tasks.append(replace(self.tasks[role], name=name, layer=copy))
                needs[name] = {f"{copy}.{r}" for r in self._read(group) - {role}}
                if copy:
                    needs[name] |= {f"{copy - 1}.{r}" for r in self._crossing(group)}
        readers = [role for role, group in groups.items() if self._reads_arrival(group)]
        if arrival is not None and readers:
            first = f"0.{arrival.role}"
            for role in readers:
                needs[f"0.{role}"].add(first)
            tasks.insert(0, replace(arrival, name=first))
        return TaskGraph(tasks, needs)

    def _read(self, group: Sequence[Unit]) -> set[str]:
        """The roles whose results a task reads; a wait stands for what it waits for."""
        return {self.role[s] for unit in group for s in self._sources(unit) if s in self.role}

    def _sources(self, unit: Unit) -> set[Unit]:
        found: set[Unit] = set()
        for before in self.before[unit]:
            found |= set(self.before[before]) if before in self.waits else {before}
        return found

    def _crossing(self, group: Sequence[Unit]) -> set[str]:
        """The roles of the region before whose results a task reads."""
        entered = {one for unit in group for one in self._sources(unit) if one in self.entering}
        sources = {self.left_for(node) for one in entered for node in one.nodes}
        return {self.role[s] for s in sources if s is not None and s in self.role}

    def _reads_arrival(self, group: Sequence[Unit]) -> bool:
        return any(
            before in self.waits and any(b in self.entering for b in self.before[before])
            for unit in group
            for before in self.before[unit]
        )
