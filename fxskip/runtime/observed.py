"""The graph of a region, run node by node while somebody watches, and as it is otherwise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx

from fxskip.collectives.measuring import Place, Watcher, watcher
from fxskip.ir import info
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
        self._places: dict[fx.Node, Where | None] | None = None

    def __call__(self, *inputs: Any) -> Any:
        somebody = watcher()
        if somebody is None:
            return self._run(*inputs)
        if self._places is None:
            self._places = places(self._module.graph)
        layer = int(running_layer().fxskip_layer)  # type: ignore[arg-type]
        somebody.enter_region(layer, self._schedule, inputs)
        try:
            return _Walk(self._module, self._places, layer, somebody).run(*inputs)
        finally:
            somebody.enter(None)


class _Walk(fx.Interpreter):
    def __init__(
        self, module: fx.GraphModule, places: dict[fx.Node, Where | None], layer: int, somebody: Watcher
    ) -> None:
        super().__init__(module)
        self.extra_traceback = False  # errors pass as they are
        self._places, self._layer, self._watcher = places, layer, somebody

    def run_node(self, n: fx.Node) -> Any:
        """Run one node, with the watcher told where it belongs and what it gave."""
        if n.op in ("placeholder", "output"):
            return super().run_node(n)
        where = self._places[n]
        self._watcher.enter(Place(self._layer, *where) if where is not None else None)
        made = super().run_node(n)
        self._watcher.made(made)
        return made


def places(graph: fx.Graph) -> dict[fx.Node, Where | None]:
    """The task of each node; of a graph without a schedule, the sub-block. A start belongs to its collective alone.

    A node that nothing is known of belongs to what ran before it.
    """
    found: dict[fx.Node, Where | None] = {}
    before: Where | None = None
    for node in graph.nodes:
        if is_start(node) or is_wait(node) or node.target in (take_off, take_off_sum):
            task = node.meta.get(TASK)
            found[node] = task if task is not None and task[1] not in (COMPUTE, HOST) else None
            before = None
            continue
        if (task := node.meta.get(TASK)) is not None:
            before = task
        elif (about := info(node)) is not None:
            is_sum = about.role in ("residual", "variant")
            before = ("stream" if is_sum else f"{about.kind}{about.write}", COMPUTE)
        found[node] = before
    return found
