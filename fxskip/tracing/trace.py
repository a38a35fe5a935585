"""`fxskip.trace`: run a few steps of a student, and show what was estimated beside what was measured."""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from fxskip.capture.wrappers import inner_model
from fxskip.checkpoint.family import require_record, rewired_layers
from fxskip.checkpoint.program import program_record
from fxskip.errors import PassError
from fxskip.parallel import RegionParallel
from fxskip.runtime.gradients_in_backward import GradientsInBackward
from fxskip.runtime.measured_costs import cost_key
from fxskip.runtime.regions import Region
from fxskip.schedule.cost_table import save_costs
from fxskip.schedule.gradient_sums import gradient_task
from fxskip.schedule.order_region import RegionSchedule
from fxskip.schedule.region_tasks import ARRIVAL
from fxskip.schedule.solve_region import gradient_us
from fxskip.schedule.tasks import Task
from fxskip.tracing.estimate import collective_behind, estimated
from fxskip.tracing.runs import MODES, Mode, Stepper, gathered, run_modes
from fxskip.tracing.timeline import About, Timeline

T = TypeVar("T")


def trace(
    student: nn.Module, batch: Mapping[str, Any], out: str | PathLike[str] | None = None, steps: int = 3
) -> Timeline:
    """Run a few steps of a rewired model, and say how much of its communication is hidden: estimated and measured.

    Args:
        student: a rewired model, on its device, perhaps inside DistributedDataParallel. All processes that share it
            call this, each with a batch of its own.
        batch: what the model is called with, by name. With labels, the loss is differentiated; else the first result,
            with a fixed gradient.
        out: a folder for timeline.txt, timeline.json, timeline.html, perfetto.json and costs.json, which rank 0 writes.
        steps: how many steps are measured of each kind: as it is, with each collective blocking, and with nothing sent;
            each of them timed alone, and once more with someone watching, on a GPU also under the profiler of PyTorch.

    A step is forward and backward; forward alone where the model is in eval mode, or gradients are off. Gradients that
    parameters hold stay as they are. With nothing sent the model computes nonsense, so a running statistic in a
    buffer, such as a router's load, is not to be trusted afterwards.

    Returns the same on every rank. Raises PassError for a model that is not rewired, and where nothing has a gradient.
    """
    model = inner_model(student)
    require_record("trace", model)
    require_traceable("trace", model, batch, steps)
    layers = list(rewired_layers(model).values())
    parallel = _parallel(layers[0])
    device = next(model.parameters()).device
    stepper = Stepper(student, batch, device, not why_no_gradients(model), parallel is not None)
    require_folder("trace", None if out is None else Path(out), together=parallel is not None)
    modes: tuple[Mode, ...] = tuple(MODES) if parallel is not None else ("as it is",)
    runs, found = run_modes(stepper, modes, steps)
    schedules = [found.get(number) for number in range(len(layers))]
    scheduled = [one for one in schedules if one is not None]
    if len(scheduled) < len(layers):
        scheduled = []
    sums = _gradient_sums(layers[0]) if stepper.gradients else []
    ranks = _gathered(runs, parallel)
    explicit = any(one.backward is not None for one in scheduled)
    timeline = Timeline(
        _gathered(_about(model, batch, len(ranks), "explicit" if explicit else "mirrored"), parallel)[0],
        estimated(scheduled, backward=stepper.gradients, reductions=sums) if scheduled else {},
        tuple(ranks),
        _roles(scheduled, sums),
    )
    if out is not None and (parallel is None or dist.get_rank() == 0):
        write(timeline, Path(out))
    return timeline


def write(timeline: Timeline, folder: Path) -> list[Path]:
    """Write all forms of it into a folder; costs where there are any. Returns the files."""
    folder.mkdir(parents=True, exist_ok=True)
    text, data, costs = folder / "timeline.txt", folder / "timeline.json", folder / "costs.json"
    text.write_text(f"{timeline}\n", encoding="utf-8")
    data.write_text(timeline.to_json(), encoding="utf-8")
    files = [text, data, timeline.to_html(folder / "timeline.html")]
    files.append(timeline.to_perfetto(folder / "perfetto.json"))
    if timeline.roles:
        save_costs(timeline.costs(), costs)
        files.append(costs)
    return files


def _parallel(layer: nn.Module) -> RegionParallel | None:
    """How a layer is spread; None in one process."""
    assert isinstance(layer, Region)
    return layer.fxskip_parallel


def require_traceable(who: str, model: nn.Module, batch: object, steps: int) -> None:
    """Raise PassError, from `who`, where no steps of `model` on `batch` can be measured."""
    if program_record(model) is not None:
        raise PassError(
            who,
            "a captured program has no decoder layers that could be watched",
            hint="take the model that the program was captured from, transformed with the same spec",
        )
    if not isinstance(batch, Mapping) or not all(isinstance(name, str) for name in batch):
        raise PassError(
            who,
            f"the batch is a {type(batch).__name__}",
            hint='pass what the model is called with, by name: {"input_ids": ids}',
        )
    if steps < 1:
        raise PassError(who, f"steps is {steps}", hint="write 1 or more")
    first = next(iter(rewired_layers(model).values()))
    if _parallel(first) is not None:
        _require_all_processes(who, first)


def require_folder(who: str, folder: Path | None, *, together: bool) -> None:
    """Make the folder that rank 0 will write to. Raises PassError, on all ranks, where that cannot be."""
    problem = ""
    if folder is not None and (not together or dist.get_rank() == 0):
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            problem = f"{folder}: {error.strerror}"
    if together:
        problem = gathered(problem)[0]
    if problem:
        raise PassError(who, problem, where="out", hint="name a place that is there or can be made")


def _require_all_processes(who: str, layer: nn.Module) -> None:
    """Raise PassError where some processes of the default group have no part of the model: they would be waited for."""
    assert isinstance(layer, Region)
    ranks, world = layer.fxskip_mesh.mesh.size(), dist.get_world_size()
    if ranks != world:
        raise PassError(
            who,
            f"the model is spread over {ranks} of {world} processes",
            hint="spread it over all processes of the default group, with an axis for what is data parallel",
        )


def why_no_gradients(model: nn.Module) -> str:
    """Why a step is forward alone; "" where it has a backward."""
    if not torch.is_grad_enabled():
        return "gradients are off"
    if not model.training:
        return "the model is in eval mode"
    if not any(p.requires_grad for p in model.parameters()):
        return "no parameter trains"
    return ""


def _exchange(parallel: RegionParallel | None) -> str:
    """What layers exchange values by: where matrices alone are cut, sums; "" in one process."""
    if parallel is None:
        return ""
    return parallel.exchange if parallel.ranks > 1 else "all_reduce"


def _about(model: nn.Module, batch: Mapping[str, Any], processes: int, backward: str) -> About:
    """What was traced, after the steps, as this rank sees it."""
    layers = rewired_layers(model)
    first = next(iter(layers.values()))
    assert isinstance(first, Region)
    parallel, why_not = first.fxskip_parallel, why_no_gradients(model)
    return About(
        model=type(model).__name__,
        layers=len(layers),
        processes=processes,
        mode=parallel.mode if parallel is not None else "one process",
        exchange=_exchange(parallel),
        transport=parallel.transport if parallel is not None else "",
        choice=first.fxskip_transport if _exchange(parallel) == "all_to_all" else None,
        backward=backward,
        gradients=not why_not,
        why_no_gradients=why_not,
        batch=_shapes(batch),
        tokens=first.fxskip_tokens,
        key=cost_key(model, layers, parallel, next(model.parameters()).device),
    )


def _gathered(mine: T, parallel: RegionParallel | None) -> list[T]:
    """What all ranks have, by rank; this one alone in one process."""
    return [mine] if parallel is None else gathered(mine)


def _gradient_sums(layer: nn.Module) -> list[Task]:
    """The all-reduces of gradients in the backward pass, in the order in which they start."""
    gradients, parallel = layer.fxskip_gradients, layer.fxskip_parallel
    if not isinstance(gradients, GradientsInBackward) or not isinstance(parallel, RegionParallel):
        return []
    sent = [bucket for bucket in gradients.plan.buckets if bucket.sends]
    return [gradient_task(b.in_schedule, b.layer, gradient_us(b.in_schedule, parallel)) for b in sent]


def _roles(layers: list[RegionSchedule], sums: list[Task]) -> dict[str, str | None]:
    """Of all tasks that a table of costs is to have; empty where no layer was scheduled."""
    if not layers:
        return {}
    graphs = [graph for region in layers for graph in (region.graph, region.gradients)]
    roles: dict[str, str | None] = {task.role: None for graph in graphs for task in graph}
    roles |= {task.role: None for task in sums}
    behind = collective_behind(layers)
    return roles | ({ARRIVAL: next(iter(behind.values()))} if behind else {})


def _shapes(batch: Mapping[str, Any]) -> dict[str, list[int]]:
    """Of the tensors in a batch, by name; by number where they lie deeper."""
    by_name = {name: list(value.shape) for name, value in batch.items() if isinstance(value, Tensor)}
    leaves = [leaf for leaf in pytree.tree_leaves(dict(batch)) if isinstance(leaf, Tensor)]
    return by_name or {f"tensor {number}": list(leaf.shape) for number, leaf in enumerate(leaves)}
