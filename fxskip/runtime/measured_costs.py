"""Tables of measured costs that a student is scheduled by: read, compared between processes, and held against it."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fxskip.errors import SpecError
from fxskip.parallel import RegionParallel
from fxskip.runtime.same_everywhere import require_same_lines
from fxskip.schedule.cost_table import CostKey, CostTable, load_costs
from fxskip.sharding import own_class
from fxskip.spec import Spec
from fxskip.version import __version__

_OTHER_TOKENS = 2.0
"""Costs are doubted where a rank has this many times more tokens than measured, or fewer: exchanges and products grow
with tokens, starts do not."""


def read_costs(spec: Spec, mesh: DeviceMesh) -> CostTable | None:
    """The table that `schedule.costs` names, read by each process of the mesh; None where it names none.

    Raises SpecError where no process can read it, PassError on all of them where they read different things.
    """
    path = spec.schedule.costs if spec.schedule is not None else "roofline"
    table, error = None, None
    lines = [f"costs: {path}"]
    if path != "roofline":
        try:
            table = load_costs(path)
            lines = [f"{name}: {value}" for name, value in _flat(table.model_dump())]
        except SpecError as found:
            error, lines = found, [str(found)]
    require_same_lines(
        lines,
        mesh,
        "schedule.costs",
        "the processes read different tables",
        hint="give all processes the same file: on a disk that all hosts see, or a copy on each",
    )
    if error is not None:
        raise error
    return table


def _flat(values: Mapping[str, object], before: str = "") -> Iterable[tuple[str, object]]:
    for name, value in sorted(values.items()):
        if isinstance(value, dict):
            yield from _flat(value, f"{before}{name}.")
        else:
            yield before + name, value


def cost_key(
    model: nn.Module, layers: Mapping[str, nn.Module], parallel: RegionParallel | None, device: torch.device
) -> CostKey:
    """What costs of a rewired model depend on.

    layers     its decoder layers, by path
    parallel   how they are spread; None in one process
    device     that they run on
    """
    on_gpu = device.type == "cuda"
    versions = {"torch": torch.__version__, "fxskip": __version__}
    if on_gpu and dist.is_nccl_available():
        versions["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return CostKey(
        model=own_class(model).__name__,
        shapes=_shapes(layers),
        parallel=_spread_over(parallel),
        dtype=str(next(model.parameters()).dtype).removeprefix("torch."),
        device=torch.cuda.get_device_name(device) if on_gpu else device.type,
        transport=parallel.transport if parallel is not None else "none",
        versions=versions,
    )


def warn_of_other_tokens(tokens: int, parallel: RegionParallel) -> None:
    """Say that costs were measured with far more tokens a rank, or far fewer, than a training pass has."""
    measured = parallel.measured
    if measured is None:
        return
    ratio = tokens / measured.tokens
    if not 1 / _OTHER_TOKENS < ratio < _OTHER_TOKENS:
        warnings.warn(
            f"fxskip: schedule.costs: {parallel.schedule.costs} was measured with {measured.tokens} tokens a rank, and "
            f"this pass has {tokens}; measure again with a batch of this size",
            stacklevel=2,
        )


def _shapes(layers: Mapping[str, nn.Module]) -> dict[str, list[int]]:
    """Of each parameter, once for layers in which it has the same shape: whole ones, also where ranks have parts."""
    found: dict[tuple[str, tuple[int, ...]], str] = {}
    for path, layer in layers.items():
        for name, parameter in layer.named_parameters():
            found.setdefault((name, tuple(parameter.shape)), f"{path}.{name}")
    return {name: list(shape) for (_, shape), name in found.items()}


def _spread_over(parallel: RegionParallel | None) -> dict[str, str]:
    if parallel is None:
        return {}
    return {"expert": f"{parallel.ranks}, {parallel.exchange}", "tensor": str(parallel.tensor_size)}
