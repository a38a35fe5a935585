"""Put the nodes of a region into the order in which the host issues them.

A start goes right behind its last producer, for a collective waits for all that is enqueued before it. A wait goes
in front of its first reader, whatever that is. In between goes what needs neither.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import fx

from fxskip.errors import PassError
from fxskip.ir import copy_graph
from fxskip.passes.dependencies import Unit, units

Choose = Callable[[list[Unit]], list[Unit]]
"""Puts units into an order."""


def place(graph: fx.Graph, choose: Choose) -> fx.Graph:
    """Return a copy of `graph` in the order that `choose` gives its units.

    Changes  the order of nodes, nothing else
    Leaves   `graph` itself
    Raises   PassError for an order that leaves a unit out or puts it before what it needs
    """
    new = copy_graph(graph)
    found = units(new)
    order = choose(found)
    _require_valid(order, found)
    output = next(n for n in new.nodes if n.op == "output")
    for unit in order:
        for node in unit.nodes:
            output.prepend(node)
    new.lint()
    return new


def _require_valid(order: list[Unit], all_units: list[Unit]) -> None:
    placed: set[Unit] = set()
    for unit in order:
        early = unit.before - placed
        if early:
            raise PassError(
                "place",
                f"{unit.nodes[0].name!r} would run before {next(iter(early)).nodes[0].name!r}, which it needs",
                hint="this is a defect in the scheduler: please report it",
            )
        placed.add(unit)
    if len(placed) != len(all_units) or len(order) != len(all_units):
        raise PassError(
            "place",
            f"an order of {len(order)} units for a graph of {len(all_units)}",
            hint="this is a defect in the scheduler: please report it",
        )
