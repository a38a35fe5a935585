"""`fxskip.tune`: run a student by several orders in turn, and leave it with the fastest.

No estimate decides which one that is. Orders by measured costs are better than those by the roofline where the machine
is not what its hardware file says, and worse where what counts is the cost of no task, such as the host's own time. A
backward pass in an order of its own hides more, and costs the host more. So each combination is timed.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from os import PathLike
from pathlib import Path
from typing import Any, Literal

import torch.distributed as dist
from torch import nn

from fxskip.capture.wrappers import inner_model
from fxskip.checkpoint.family import change_spec, require_record, rewired_layers
from fxskip.errors import PassError, ScheduleError, first_line
from fxskip.parallel import RegionParallel, TaskCosts
from fxskip.runtime.regions import Region
from fxskip.schedule.cost_table import CostTable, save_costs
from fxskip.spec import Spec, load_spec
from fxskip.tracing.runs import Stepper, gathered, kept_gradients, median_over_ranks
from fxskip.tracing.trace import require_folder, require_traceable, trace, why_no_gradients

Backward = Literal["mirrored", "explicit"]
_TRACED_STEPS = 2
"""Of each kind, for the costs of tasks."""


@dataclass(frozen=True)
class Order:
    """What decides in which order the tasks of a layer run."""

    costs: str
    """As in a spec: "roofline", or the path of a table."""
    backward: Backward
    is_new: bool = False
    """Whether the table is the one that was measured for this choice, and not one that the student ran by before."""

    @property
    def in_spec(self) -> dict[str, str]:
        """What a spec says of it under `schedule`."""
        return {"costs": self.costs, "backward": self.backward}


@dataclass(frozen=True)
class Timed:
    """An order, and how long steps by it take."""

    order: Order
    samples_ms: tuple[tuple[float, ...], ...] = ()
    """Of each rank, one a round."""
    why_not: str = ""
    """Where there is no such order."""

    @property
    def ms(self) -> float:
        """The median over rounds of the slowest rank's time; infinite where there is no such order."""
        return median_over_ranks(self.samples_ms) if self.samples_ms else float("inf")


@dataclass(frozen=True)
class Tuning:
    """What `fxskip.tune` timed, and what it chose. It is the same on all ranks."""

    timed: tuple[Timed, ...]
    """The first is the order that the student had."""
    chosen: Order
    costs: CostTable
    """Measured, of the tasks of a layer."""
    phases: str
    """What a step was: "forward and backward", or forward alone, and why."""

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def as_data(self) -> dict[str, Any]:
        """For JSON: orders with their samples and medians in milliseconds (null where there is no such order)."""
        return {
            "timed": [asdict(one) | {"ms": one.ms if one.samples_ms else None} for one in self.timed],
            "chosen": asdict(self.chosen),
            "costs": self.costs.model_dump(mode="json"),
            "phases": self.phases,
        }

    def _lines(self) -> Iterator[str]:
        rounds = max(len(one.samples_ms[0]) for one in self.timed if one.samples_ms)
        yield f"a step, {self.phases}: median of {rounds} rounds on the slowest rank"
        width = max(len("costs"), *(len(one.order.costs) for one in self.timed))
        yield f"  {'costs':<{width}}  backward  {'ms':>10}"
        for number, one in enumerate(self.timed):
            time = f"{one.ms:>10,.2f}" if one.samples_ms else f"{'none':>10}"
            remarks = [
                *(["as it was"] if number == 0 else ["measured now"] if one.order.is_new else []),
                *(["chosen"] if one.order == self.chosen else []),
                *([one.why_not] if one.why_not else []),
            ]
            line = f"  {one.order.costs:<{width}}  {one.order.backward:<8}  {time}  {', '.join(remarks)}"
            yield line.rstrip()
        yield f"schedule: {{costs: {self.chosen.costs}, backward: {self.chosen.backward}}}"


def tune(
    student: nn.Module,
    batch: Mapping[str, Any],
    out: str | PathLike[str] = "costs.json",
    *,
    steps: int = 5,
) -> Tuning:
    """Measure the costs of a student's tasks, time steps by several orders, and leave it with the fastest.

    Orders are those by the roofline and by the costs that are measured now, each with a mirrored and with an explicit
    backward, and the one that the student has; on equal times that one stays. Logits and gradients are the same by all
    of them, bit for bit.

    Args:
        student: a rewired model that is spread over processes, on its device, perhaps inside DistributedDataParallel.
            All processes call this, each with a batch of its own.
        batch: what the model is called with, by name, of the size that it trains with; see `fxskip.trace`.
        out: where rank 0 writes the table of costs, if the order that is chosen is by it. The student's spec then names
            this file, so a saved student finds it again: keep it, and copy it to each host.
        steps: rounds; in each, every order runs once.

    Each order is captured anew, which takes seconds a kind of layer. Gradients that parameters hold stay as they are.
    In eval mode, or where gradients are off, steps are forward alone, and the backward's order stays.

    Raises PassError for a model that is not rewired, runs in one process or schedules nothing, and where nothing has a
    gradient; SpecError where `out` is no path. The student is then as it was.
    """
    model = inner_model(student)
    spec = load_spec(require_record("tune", model).spec)
    require_traceable("tune", model, batch, steps)
    layers = [layer for layer in rewired_layers(model).values() if isinstance(layer, Region)]
    parallel = _scheduled(layers)
    path = gathered(str(out))[0]
    _with_order(spec, Order(path, parallel.schedule.backward))  # what is no path shows before the work
    require_folder("tune", Path(path).parent, together=True)
    why = why_no_gradients(model)
    stepper = Stepper(student, batch, next(model.parameters()).device, not why, together=True)
    with _as_they_were(layers) as was:
        table = trace(student, batch, steps=_TRACED_STEPS).costs()
        found = _in_turn(stepper, layers, _orders(parallel, path, bool(why)), was, table, steps)
    chosen = min(found, key=lambda one: one.ms).order  # the first of equals
    if chosen != found[0].order:
        _set(layers, chosen, was, table)
        change_spec(model, _with_order(spec, chosen))
        if chosen.is_new and dist.get_rank() == 0:
            save_costs(table, path)
    dist.barrier()
    return Tuning(tuple(found), chosen, table, f"forward alone ({why})" if why else "forward and backward")


def _scheduled(layers: Sequence[Region]) -> RegionParallel:
    """How the first layer is spread. Raises PassError where no order is to be chosen."""
    parallel = layers[0].fxskip_parallel
    if parallel is None:
        found = "the model runs in one process, where nothing is in flight"
        hint = "transform with parallel: {expert: {size: 2}}, or fxskip.parallelize(student)"
    elif parallel.mode != "scheduled" or parallel.schedule.overlap == "none":
        found = f"runtime.mode is {parallel.mode}, schedule.overlap {parallel.schedule.overlap}: nothing is scheduled"
        hint = "transform with runtime: {mode: scheduled} and schedule: {overlap: full}, the defaults"
    else:
        return parallel
    raise PassError("tune", found, hint=hint)


def _orders(parallel: RegionParallel, path: str, forward_alone: bool) -> list[Order]:
    """The one that is, then the others."""
    now = parallel.schedule
    backwards: tuple[Backward, ...] = (now.backward,) if forward_alone else ("mirrored", "explicit")
    others = [Order("roofline", backward) for backward in backwards]
    others += [Order(path, backward, is_new=True) for backward in backwards]
    return list(dict.fromkeys([Order(now.costs, now.backward), *others]))


def _in_turn(
    stepper: Stepper,
    layers: Sequence[Region],
    orders: Sequence[Order],
    was: Mapping[Region, RegionParallel],
    table: CostTable,
    steps: int,
) -> list[Timed]:
    """Each order once a round, in an order that changes; a first round, in which layers are captured, is dropped."""
    times: dict[Order, list[float]] = {order: [] for order in orders}
    why_not: dict[Order, str] = {}
    shuffler, shuffled = random.Random(0), list(orders)  # the same on all ranks
    with kept_gradients(stepper.model):
        for number in range(-1, steps):
            for order in shuffled:
                if order in why_not:
                    continue
                _set(layers, order, was, table)
                try:
                    took = stepper.timed(behind_another=number < 0 or stepper.device.type == "cuda")
                except ScheduleError as error:  # of every rank: they have the same tasks and costs
                    why_not[order] = first_line(error)
                    stepper.forget_gradients()
                else:
                    if number >= 0:
                        times[order].append(took.step_us / 1e3)
            shuffler.shuffle(shuffled)
    everyone = gathered(times)
    return [
        Timed(order, why_not=why_not[order])
        if order in why_not
        else Timed(order, tuple(tuple(own[order]) for own in everyone))
        for order in orders
    ]


def _set(
    layers: Sequence[Region], order: Order, was: Mapping[Region, RegionParallel], table: CostTable
) -> None:
    """Have the layers run by that order: captured anew at their next call, unless they ran by it before."""
    for layer in layers:
        before, now = was[layer], layer.fxskip_parallel
        assert now is not None
        measured = TaskCosts.of(table.tokens, table.costs_us) if order.is_new else before.measured
        if order.costs == "roofline":
            measured = None
        schedule = now.schedule.model_copy(update=order.in_spec)
        layer.fxskip_parallel = replace(now, schedule=schedule, measured=measured)


@contextmanager
def _as_they_were(layers: Sequence[Region]) -> Iterator[Mapping[Region, RegionParallel]]:
    """How the layers are spread; in the end they are so again."""
    was = {layer: layer.fxskip_parallel for layer in layers if layer.fxskip_parallel is not None}
    try:
        yield was
    finally:
        for layer, parallel in was.items():
            layer.fxskip_parallel = parallel


def _with_order(spec: Spec, order: Order) -> Spec:
    data = spec.to_dict()
    return load_spec(data | {"schedule": data.get("schedule", {}) | order.in_spec})
