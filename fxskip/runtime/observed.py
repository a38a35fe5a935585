"""The graph of a region, with probes in it while somebody watches, and as it is otherwise."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import groupby
from typing import Any

from torch import fx

from fxskip.collectives.measuring import Place, watcher
from fxskip.ir import copy_graph, info
from fxskip.leaves import running_layer
from fxskip.passes.split_collectives import is_start, is_wait, take_off, take_off_sum
from fxskip.schedule.order_region import RegionSchedule
from fxskip.schedule.region_tasks import TASK
from fxskip.schedule.tasks import COMPUTE, HOST

Where = tuple[str, str]
"""Role and lane of a task."""


class Observed:
    """What Dynamo calls for a region that no compiler lowers."""

    def __init__(
        self, module: fx.GraphModule, run: Callable[..., Any], schedule: RegionSchedule | None = None
    ) -> None:
        """
        run       runs `module`
        schedule  what its nodes were ordered by, if they were
        """
        self._module, self._run, self._schedule = module, run, schedule
        self._probed: fx.GraphModule | None = None

    def __call__(self, *inputs: Any) -> Any:
        somebody = watcher()
        if somebody is None:
            return self._run(*inputs)
        if self._probed is None:
            self._probed = fx.GraphModule(self._module, with_probes(self._module.graph))
        somebody.enter_region(_layer(), self._schedule, inputs)
        try:
            return self._probed(*inputs)
        finally:
            somebody.enter(None)


def with_probes(graph: fx.Graph) -> fx.Graph:
    """Return a copy of `graph` that tells the watcher where each stretch of a task begins, and what it leaves behind.

    Leaves   `graph` itself; the order of its nodes
    """
    new = copy_graph(graph)
    for where, nodes in list(stretches(new)):
        inside = set(nodes)
        given = [node for node in nodes if any(user not in inside for user in node.users)]
        with new.inserting_before(nodes[0]):
            new.call_function(begin_stretch, (where,))
        with new.inserting_after(nodes[-1]):
            new.call_function(end_stretch, (where, given))
    new.lint()
    return new


def begin_stretch(where: Where | None) -> None:
    """Tell the watcher what begins; None for what no task has."""
    if (somebody := watcher()) is not None:
        somebody.enter(_place(where))


def end_stretch(where: Where | None, given: list[Any]) -> None:
    """Tell the watcher what the stretch gave to others."""
    if (somebody := watcher()) is not None:
        somebody.enter(None)
        somebody.made(_place(where), given)


def stretches(graph: fx.Graph) -> Iterator[tuple[Where | None, list[fx.Node]]]:
    """Nodes that follow each other and belong to one task; of a graph without a schedule, to one sub-block.

    A start belongs to its collective alone, a wait to none. What nothing is known of belongs to what ran before it.
    """
    places: dict[fx.Node, Where | None] = {}
    before: Where | None = None
    for node in graph.nodes:
        task: Where | None = node.meta.get(TASK)
        if node.op in ("placeholder", "output"):
            continue
        if is_start(node) or is_wait(node) or node.target in (take_off, take_off_sum):
            places[node] = task if task is not None and task[1] not in (COMPUTE, HOST) else None
            before = None
            continue
        if task is not None:
            before = task
        elif (about := info(node)) is not None:
            is_sum = about.role in ("residual", "variant")
            before = ("stream" if is_sum else f"{about.kind}{about.write}", COMPUTE)
        places[node] = before
    for where, nodes in groupby(places, key=places.__getitem__):
        yield where, list(nodes)


def _place(where: Where | None) -> Place | None:
    return Place(_layer(), *where) if where is not None else None


def _layer() -> int:
    return int(running_layer().fxskip_layer)  # type: ignore[arg-type]
