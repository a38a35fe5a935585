"""A parallel region whose backward pass runs in an order of its own.

The part of the graph that computes becomes a program, one step a task; around it stay the borders of the layer:

    in       placeholders, what arrives under way, this rank's parts of the parameters of routed experts
    program  steps in the order of the forward schedule; backward in that of its own
    out      stand-ins, what the next layer finishes, and what the layer returns

Where no gradients are recorded the graph itself runs.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import fx, nn
from torch.utils.checkpoint import _StopRecomputationError

from fxskip.backward.module_calls import ModuleParameters, expose_parameters
from fxskip.backward.program import Part, Program
from fxskip.backward.program_of import attribute_values, program_of
from fxskip.backward.scheduled_region import ScheduledRegion
from fxskip.backward.site import Site
from fxskip.collectives.border import arrived_value, leave_pending, stand_in
from fxskip.collectives.failures import tell
from fxskip.collectives.landing import drain, one_backward_pass
from fxskip.collectives.measuring import Place, watcher
from fxskip.errors import PassError
from fxskip.ir import copy_graph, is_tensor, storage, writers
from fxskip.parallel import RegionParallel, running_number
from fxskip.passes.split_collectives import is_start, is_wait, sends_back
from fxskip.schedule.order_backward import complete_events, order_backward
from fxskip.schedule.order_region import RegionSchedule
from fxskip.schedule.region_tasks import TASK, WAITS_FOR, wait_step

_OUTSIDE = (stand_in, leave_pending)
"""What the layer leaves at its border: it has no gradient of its own."""


class ExplicitRegion:
    """What runs in the place of the graph of a captured layer, with the same arguments and results."""

    def __init__(
        self,
        plain: Callable[..., Any],
        schedule: RegionSchedule,
        region: ScheduledRegion,
        arriving: tuple[int, ...],
        modules: tuple[ModuleParameters, ...],
        constants: tuple[Any, ...],
        finish: Callable[..., Any],
    ) -> None:
        """
        plain     the graph as it is
        schedule  what its tasks are ordered by
        region    takes its arguments, what arrives, the parameters of modules, and the constants
        arriving  numbers of the values that arrive
        finish    makes the graph's results of those of the region
        """
        self.region = region
        self._plain = plain
        self._schedule = schedule
        self._arriving = arriving
        self._modules = modules
        self._constants = constants
        self._finish = finish

    def __call__(self, *arguments: Any) -> Any:
        """Run the layer."""
        if not torch.is_grad_enabled():
            return self._plain(*arguments)
        arrived = [arrived_value(index) for index in self._arriving]
        parameters = [p for module in self._modules for p in module.of_running_layer()]
        somebody = watcher()
        if somebody is not None:
            somebody.enter_region(running_number(), self._schedule, arguments)
        try:
            made = self.region(*arguments, *arrived, *parameters, *self._constants)
        finally:
            if somebody is not None:
                somebody.enter(None)
        return self._finish(*made)


class _LayerSite(Site):
    """The layer that runs. Who watches is told of its tasks."""

    def __init__(self, lanes: Mapping[str, str]) -> None:
        """`lanes` are those of the tasks, by the names of their steps."""
        self._lanes = lanes
        self._layer = running_number()

    def __str__(self) -> str:
        return f"decoder layer {self._layer}"

    def forward(self, step: str) -> None:
        """Tell of the task; a step that waits belongs to none."""
        if (somebody := watcher()) is not None:
            somebody.enter(self._place(step))

    def backward(self, step: str, part: Part) -> None:
        """Tell of the task's backward."""
        if (somebody := watcher()) is not None:
            somebody.enter(self._place(step), "bwd" if part == "both" else part)

    def failed(self, error: BaseException, where: str) -> None:
        """Tell the other ranks, before this one waits for what is in flight: they may wait for it until they know."""
        if not isinstance(
            error, _StopRecomputationError
        ):  # how torch's checkpoint ends a run that has gone far enough
            tell(error, where)

    def _place(self, step: str) -> Place | None:
        lane = self._lanes.get(step)
        return None if lane is None else Place(self._layer, step, lane)


def is_explicit(parallel: RegionParallel) -> bool:
    """Whether the spec asks for it. The mode `reference` runs in program order, forward and backward."""
    return parallel.schedule.backward == "explicit" and parallel.mode != "reference"


def has_flights(graph: fx.Graph) -> bool:
    """Whether anything is in flight in the region: without it an order of its own gains nothing."""
    return any(is_start(node) or is_wait(node) for node in graph.nodes)


def explicit_region(
    module: fx.GraphModule,
    graph: fx.Graph,
    schedule: RegionSchedule,
    parallel: RegionParallel,
    plain: Callable[..., Any],
) -> ExplicitRegion:
    """The region of `graph`, ordered forward, with a backward pass in an order of its own, noted in `schedule`.

    module   what the graph's attributes belong to
    plain    runs the graph as it is

    Raises PassError where the graph cannot be taken apart into steps, ScheduleError where no order keeps to the
    spec's `max_in_flight_mib`.
    """
    inner = copy_graph(graph)
    arriving = _take_arrivals(inner)
    modules, weights = _take_parameters(inner)
    finish = _cut_border(inner)
    program = program_of(inner, _steps(inner))
    split = {record.step for record in program.weight_gradients if record.deferred}
    found = order_backward(schedule.tasks, parallel, split)
    readers = _readers(program)
    sending = {wait_step(n.meta[WAITS_FOR]) for n in inner.nodes if is_wait(n) and sends_back(n)}
    _keep_order_of_exchanges([s.name for s in program.steps if s.name in sending], readers)
    events = complete_events(found.events, [s.name for s in program.steps], split, readers)
    schedule.backward = replace(found, events=events)
    region = ScheduledRegion(
        program,
        backward=events,
        drain=drain,
        weights=weights,
        around_backward=one_backward_pass,
        site=partial(_LayerSite, schedule.tasks.lanes),
    )
    constants = attribute_values(program, module)
    finishing = fx.GraphModule(nn.Module(), finish).forward
    return ExplicitRegion(plain, schedule, region, arriving, modules, constants, finishing)


def _take_arrivals(graph: fx.Graph) -> tuple[int, ...]:
    """Make placeholders of what arrives under way, behind the others; returns their numbers."""
    nodes = [node for node in graph.nodes if node.target is arrived_value]
    for node in nodes:
        _add_placeholder(graph, node)
    return tuple(int(str(node.args[0])) for node in nodes)


def _add_placeholder(graph: fx.Graph, node: fx.Node) -> None:
    with graph.inserting_before(_first_operation(graph)):
        placeholder = graph.placeholder(f"crossing_{node.args[0]}")
    placeholder.meta.update(node.meta)
    node.replace_all_uses_with(placeholder)
    graph.erase_node(node)


def _first_operation(graph: fx.Graph) -> fx.Node:
    found: fx.Node = next(node for node in graph.nodes if node.op != "placeholder")
    return found


def _take_parameters(graph: fx.Graph) -> tuple[tuple[ModuleParameters, ...], list[str]]:
    """Make placeholders of the parameters of modules that the graph runs; returns these, and their names."""
    exposed = expose_parameters(graph, _first_operation(graph))
    return tuple(held for held, _ in exposed), [node.name for _, nodes in exposed for node in nodes]


def _cut_border(graph: fx.Graph) -> fx.Graph:
    """Cut off what the layer leaves and returns, as a graph of its own, whose arguments `graph` returns instead."""
    output = next(node for node in graph.nodes if node.op == "output")
    border = [node for node in graph.nodes if node.target in _OUTSIDE]
    reads = dict.fromkeys(n for one in (*border, output) for n in one.all_input_nodes if n not in border)
    finish = fx.Graph()
    made = {node: finish.placeholder(node.name) for node in reads}
    for node in border:
        made[node] = finish.node_copy(node, made.__getitem__)
    finish.output(fx.map_arg(output.args[0], made.__getitem__))
    output.args = (tuple(reads),)
    for node in reversed(border):
        graph.erase_node(node)
    graph.lint()
    return finish


def _steps(graph: fx.Graph) -> dict[fx.Node, str]:
    """The step of each operation: that of its task. What takes one of several results belongs to what made them."""
    steps: dict[fx.Node, str] = {}
    for node in graph.nodes:
        if node.op in ("placeholder", "get_attr", "output"):
            continue
        source = node.all_input_nodes[0] if node.all_input_nodes else None
        if node.target is operator.getitem and source in steps and not is_tensor(source):
            steps[node] = steps[source]
        elif WAITS_FOR in node.meta:
            steps[node] = wait_step(node.meta[WAITS_FOR])
        elif TASK in node.meta:
            steps[node] = node.meta[TASK][0]
        else:  # a pass that finishes graphs put it in the place of another
            near = next((n for n in reversed(node.all_input_nodes) if n in steps), None)
            if near is None:
                raise PassError(
                    "schedule.backward",
                    f"{node.name!r} belongs to no task of the schedule",
                    hint="this is a defect in fxskip: please report it; backward: mirrored does without",
                )
            steps[node] = steps[near]
    _write_in_one_step(graph, steps)
    # Views and casts of a weight go where the product is, so that it can be split off.
    for node in reversed(list(steps)):
        if all(n.op == "placeholder" and "_parameters_" in n.name for n in node.all_input_nodes):
            readers = {steps.get(user, "") for user in node.users}
            if node.all_input_nodes and len(readers) == 1 and "" not in readers:
                steps[node] = readers.pop()
    return steps


def _write_in_one_step(graph: fx.Graph, steps: dict[fx.Node, str]) -> None:
    """Memory that is written in place, from its making to its last write, goes into the step of that write: two steps
    must not see it change. A sum over ranks can stand between two writes, such as those of a key's two parts."""
    for memory, writes in writers(graph).items():
        last = writes[-1]
        for node in itertools.takewhile(partial(operator.is_not, last), graph.nodes):
            if node in steps and (node in writes or storage(node) == memory):
                steps[node] = steps[last]


def _keep_order_of_exchanges(waits: list[str], readers: dict[str, set[str]]) -> None:
    """A wait issues the reverse of its collective. All ranks issue them in one order, whatever each takes its tasks to
    cost: against that of the forward waits, which is the same on all."""
    for earlier, later in itertools.pairwise(waits):
        readers[earlier].add(later)


def _readers(program: Program) -> dict[str, set[str]]:
    """For each step those that read what it makes."""
    makers = {name: step.name for step in program.steps for name in step.outputs}
    found: dict[str, set[str]] = {step.name: set() for step in program.steps}
    for step in program.steps:
        for name in step.inputs:
            if name in makers:
                found[makers[name]].add(step.name)
    return found
