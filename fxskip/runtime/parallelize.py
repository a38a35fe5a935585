"""Spread a rewired model over the processes of a device mesh, in place, as its spec's `parallel` says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from fxskip.collectives.all_to_all import split_evenly
from fxskip.errors import PassError
from fxskip.leaves import holds_experts, make_leaf
from fxskip.parallel import ExpertStack, Ranks, RegionParallel
from fxskip.passes.shard import EXPERT
from fxskip.runtime.regions import Region
from fxskip.runtime.same_everywhere import require_same_everywhere
from fxskip.schedule.hardware import DEFAULT_HARDWARE, hardware_names, load_hardware
from fxskip.spec import Runtime, Schedule, Spec


def is_parallel(spec: Spec) -> bool:
    """Whether the spec spreads anything over more than one process."""
    axes = (spec.parallel.expert, spec.parallel.tensor) if spec.parallel else ()
    return any(axis is not None and axis.size > 1 for axis in axes)


def spread(model: nn.Module, layers: Mapping[str, nn.Module], spec: Spec, mesh: DeviceMesh) -> None:
    """Keep this rank's routed experts alone in each decoder layer, and have the layers exchange rows.

    Raises PassError where the processes do not hold the same model, and where a layer's experts cannot be cut.
    """
    require_same_everywhere(model, spec, mesh)
    found = {path: expert_paths(layer) for path, layer in layers.items()}
    for path, layer in layers.items():
        for inner in found[path]:
            _require_stacks(layer.get_submodule(inner), mesh[EXPERT].size(), f"module {path}.{inner}")
    common = _common(spec, mesh)
    following = [*list(layers.values())[1:], None]
    for (path, layer), after in zip(layers.items(), following, strict=True):
        assert isinstance(layer, Region)
        stacks = tuple(_cut(layer, inner, mesh[EXPERT]) for inner in found[path])
        defers = common.mode != "reference" and after is not None and _has_several_streams(after)
        layer.fxskip_ranks = Ranks(mesh)
        layer.fxskip_parallel = replace(common, experts=stacks, defers=defers)
    # DistributedDataParallel averages what all processes hold; each has experts of its own.
    sharded = [name for name, p in model.named_parameters() if isinstance(p, DTensor)]
    model._ddp_params_and_buffers_to_ignore = sharded  # type: ignore[assignment]


def _common(spec: Spec, mesh: DeviceMesh) -> RegionParallel:
    """What is the same for all layers."""
    schedule, mode = spec.schedule or Schedule(), (spec.runtime or Runtime()).mode
    if schedule.overlap == "none":
        mode = "reference"
    ranks, hardware = mesh[EXPERT].size(), _hardware_here()
    backend = dist.get_backend(mesh[EXPERT].get_group())
    transport: Literal["nccl", "nccl_network", "gloo"] = "gloo"
    if backend == "nccl":
        transport = "nccl" if ranks <= load_hardware(hardware).domain.gpus else "nccl_network"
    return RegionParallel((), ranks, mode, False, schedule, hardware, transport)


def _hardware_here() -> str:
    """The hardware file of this process's GPU; the default one where none is known or there is no GPU."""
    name = torch.cuda.get_device_name().lower() if torch.cuda.is_available() else ""
    return next((known for known in hardware_names() if known in name), DEFAULT_HARDWARE)


def expert_paths(layer: nn.Module) -> list[str]:
    """Paths of the modules in `layer` that hold all routed experts as stacks [experts, ...], outermost first."""
    found: list[str] = []
    for path, module in layer.named_modules():
        inside = any(path.startswith(f"{outer}.") for outer in found)
        stacks = [p.shape[0] for p in module.parameters(recurse=False) if p.dim() >= 2]
        if path and not inside and holds_experts(module) and stacks and len(set(stacks)) == 1:
            found.append(path)
    return found


def make_mesh(spec: Spec, mesh: DeviceMesh | None = None) -> DeviceMesh:
    """The mesh that the spec speaks of: the one given, checked, or one over all processes of the default group.

    Raises PassError where there is no process group, or where sizes or the transport do not fit.
    """
    assert spec.parallel is not None and spec.parallel.expert is not None
    size = spec.parallel.expert.size
    if not (dist.is_available() and dist.is_initialized()):
        raise PassError(
            "parallelize",
            f"parallel.expert.size is {size}, and this process belongs to no process group",
            hint="start it with torchrun and call torch.distributed.init_process_group(); or leave parallel out of the "
            "spec to run in one process",
        )
    if mesh is None:
        mesh = _mesh_over_all(size)
    names = mesh.mesh_dim_names or ()
    if EXPERT not in names or mesh[EXPERT].size() != size:
        found = ", ".join(f"{name}: {mesh[name].size()}" for name in names) or "no named axis"
        raise PassError(
            "parallelize",
            f"the spec says parallel.expert.size: {size}, and the mesh has {found}",
            hint=f'init_device_mesh(device, (..., {size}), mesh_dim_names=(..., "{EXPERT}"))',
        )
    transport = (spec.runtime or Runtime()).transport
    backend = dist.get_backend(mesh[EXPERT].get_group())
    if transport not in ("auto", backend):
        raise PassError(
            "parallelize",
            f"runtime.transport: {transport}, and the process group runs over {backend}",
            hint=f"init_process_group({transport!r}), or leave runtime.transport out",
        )
    return mesh


def _mesh_over_all(size: int) -> DeviceMesh:
    world = dist.get_world_size()
    if world % size:
        raise PassError(
            "parallelize",
            f"parallel.expert.size is {size}, and there are {world} processes",
            hint="start a multiple of parallel.expert.size processes, or pass mesh=",
        )
    device = torch.accelerator.current_accelerator() if dist.get_backend() != "gloo" else None
    kind = device.type if device is not None else "cpu"
    return init_device_mesh(kind, (world // size, size), mesh_dim_names=("data", EXPERT))


def _has_several_streams(layer: nn.Module) -> bool:
    assert isinstance(layer, Region)
    return len(layer.fxskip_wiring.inputs) > 1


def _cut(layer: nn.Module, inner: str, mesh: DeviceMesh) -> ExpertStack:
    """Keep this rank's experts of the module at `inner`."""
    module = layer.get_submodule(inner)
    total = _number_of_experts(module)
    each = sum(p.numel() for p in module.parameters()) // total
    sizes, rank = split_evenly(total, mesh.size()), mesh.get_local_rank()
    begin = sum(sizes[:rank])
    for name, parameter in list(module.named_parameters()):
        path, _, own_name = name.rpartition(".")
        part = parameter.detach()[begin : begin + sizes[rank]].clone()
        sharded = DTensor.from_local(
            part, mesh, [Shard(0)], run_check=False, shape=parameter.shape, stride=parameter.stride()
        )
        setattr(module.get_submodule(path), own_name, nn.Parameter(sharded, parameter.requires_grad))
    for name, held in list(vars(module).items()):
        if "expert" in name and type(held) is int and held == total:
            setattr(module, name, sizes[rank])
    make_leaf(layer, inner)
    return ExpertStack(inner, total, each)


def _number_of_experts(module: nn.Module) -> int:
    return next(p.shape[0] for p in module.parameters() if p.dim() >= 2)


def _require_stacks(module: nn.Module, ranks: int, where: str) -> None:
    total = _number_of_experts(module)
    for name, parameter in module.named_parameters():
        if isinstance(parameter, DTensor):
            raise PassError(
                "parallelize",
                f"{name} is a DTensor already",
                where=where,
                hint="parallelize a model once, and before anything else shards it",
            )
        if parameter.shape[0] != total:
            raise PassError(
                "parallelize",
                f"{name} {list(parameter.shape)} is no stack of {total} experts",
                where=where,
                hint="experts are cut along their first dimension; leave parallel.expert out for this architecture",
            )
    if split_evenly(total, ranks)[-1] == 0:
        raise PassError(
            "parallelize",
            f"{total} experts spread over {ranks} processes leave the last without one",
            where=where,
            hint=f"parallel: {{expert: {{size: {total}}}}} at most",
        )
