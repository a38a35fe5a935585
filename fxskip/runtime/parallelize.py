"""Spread a student over the processes of a device mesh, in place, as the spec's `parallel` says."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from fxskip.collectives.all_to_all import split_evenly
from fxskip.errors import PassError
from fxskip.leaves import holds_experts, make_leaf
from fxskip.parallel import RegionParallel
from fxskip.passes.shard import EXPERT
from fxskip.runtime.regions import Region
from fxskip.spec import Parallel, Runtime, Spec

_ROUTED = 3
"""Arguments of a module of routed experts: tokens, their experts, the weights of these."""


def parallelize(layers: Mapping[str, nn.Module], spec: Spec, mesh: DeviceMesh) -> None:
    """Keep this rank's routed experts alone in each decoder layer, and have the layers exchange rows.

    Every process must hold the same, whole model. Parameters of experts become DTensors, sharded by expert on the
    mesh's axis "expert".

    Raises PassError where a layer's experts are no stack that can be cut.
    """
    runtime = spec.runtime or Runtime()
    paths = list(layers)
    for index, (path, layer) in enumerate(layers.items()):
        assert isinstance(layer, Region)
        experts = {inner: _spread(layer, inner, path, mesh[EXPERT]) for inner in expert_paths(layer)}
        following = layers[paths[index + 1]] if index + 1 < len(paths) else None
        layer.fxskip_mesh = mesh  # type: ignore[assignment]
        layer.fxskip_parallel = RegionParallel(
            tuple(experts.items()),
            runtime.mode,
            defers=runtime.mode != "reference" and following is not None and _has_several_streams(following),
        )


def expert_paths(layer: nn.Module) -> list[str]:
    """Paths of the modules in `layer` that hold all routed experts as stacks [experts, ...], outermost first."""
    found: list[str] = []
    for path, module in layer.named_modules():
        inside = any(path.startswith(f"{outer}.") for outer in found)
        stacks = [p.shape[0] for p in module.parameters(recurse=False) if p.dim() >= 2]
        if path and not inside and holds_experts(module) and stacks and len(set(stacks)) == 1:
            found.append(path)
    return found


def make_mesh(parallel: Parallel, mesh: DeviceMesh | None) -> DeviceMesh:
    """The mesh that `parallel` speaks of: the one given, checked, or one over all processes.

    Without a mesh, neighbours share experts: ranks 0..size-1 are one group, and what is left over is data parallel.

    Raises PassError where there is no process group, or sizes do not fit.
    """
    size = parallel.expert.size if parallel.expert else 1
    if not (dist.is_available() and dist.is_initialized()):
        raise PassError(
            "parallelize",
            f"parallel.expert.size is {size}, and this process belongs to no process group",
            hint="start it with torchrun and call torch.distributed.init_process_group(); or leave parallel out of the "
            "spec to run in one process",
        )
    if mesh is None:
        world = dist.get_world_size()
        if world % size:
            raise PassError(
                "parallelize",
                f"parallel.expert.size is {size}, and there are {world} processes",
                hint="start a multiple of parallel.expert.size processes, or pass mesh=",
            )
        kind = torch.accelerator.current_accelerator() if dist.get_backend() == "nccl" else None
        return init_device_mesh(
            kind.type if kind else "cpu", (world // size, size), mesh_dim_names=("data", EXPERT)
        )
    names = mesh.mesh_dim_names or ()
    if EXPERT not in names or mesh[EXPERT].size() != size:
        found = ", ".join(f"{name}: {mesh[name].size()}" for name in names) or "no named axis"
        raise PassError(
            "parallelize",
            f"the spec says parallel.expert.size: {size}, and the mesh has {found}",
            hint=f'init_device_mesh(device, (..., {size}), mesh_dim_names=(..., "{EXPERT}"))',
        )
    return mesh


def _has_several_streams(layer: nn.Module) -> bool:
    assert isinstance(layer, Region)
    return len(layer.fxskip_wiring.inputs) > 1


def _spread(layer: nn.Module, inner: str, path: str, mesh: DeviceMesh) -> int:
    """Keep this rank's experts of one module; returns how many there are on all ranks."""
    module = layer.get_submodule(inner)
    total = next(p.shape[0] for p in module.parameters() if p.dim() >= 2)
    where = f"module {path}.{inner}"
    _require_stacks(module, total, mesh.size(), where)
    own = split_evenly(total, mesh.size())[mesh.get_local_rank()]
    begin = sum(split_evenly(total, mesh.size())[: mesh.get_local_rank()])
    for name, parameter in list(module.named_parameters()):
        holder = module.get_submodule(name.rpartition(".")[0])
        part = parameter.detach()[begin : begin + own].clone()
        sharded = DTensor.from_local(
            part, mesh, [Shard(0)], run_check=False, shape=parameter.shape, stride=parameter.stride()
        )
        setattr(holder, name.rpartition(".")[2], nn.Parameter(sharded, parameter.requires_grad))
    for name, held in vars(module).items():
        if "expert" in name and type(held) is int and held == total:
            setattr(module, name, own)
    make_leaf(layer, inner)
    return total


def _require_stacks(module: nn.Module, total: int, ranks: int, where: str) -> None:
    for name, parameter in module.named_parameters():
        if isinstance(parameter, DTensor):
            raise PassError(
                "parallelize",
                f"{name} is a DTensor already",
                where=where,
                hint="parallelize the model before anything else shards it, and once only",
            )
        if parameter.shape[0] != total:
            raise PassError(
                "parallelize",
                f"{name} {list(parameter.shape)} is no stack of {total} experts",
                where=where,
                hint="experts are cut along their first dimension; leave parallel.expert out for this architecture",
            )
    if total < ranks:
        raise PassError(
            "parallelize",
            f"{total} experts cannot be spread over {ranks} processes",
            where=where,
            hint=f"parallel: {{expert: {{size: {total}}}}} at most",
        )
