"""Spread a rewired model over the processes of a device mesh, in place, as its spec's `parallel` says."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from inspect import signature
from math import prod

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from fxskip.collectives.all_to_all import split_evenly
from fxskip.collectives.copy_engine import connect_devices
from fxskip.collectives.cut_linear import Cut, cut_linear
from fxskip.collectives.peer_memory import require_device_mesh
from fxskip.errors import PassError
from fxskip.leaves import holds_experts, make_leaf
from fxskip.parallel import EXPERT, TENSOR, ExpertStack, LayerMesh, RegionParallel, TaskCosts
from fxskip.runtime.gradients_in_backward import GradientsInBackward
from fxskip.runtime.measured_costs import cost_key
from fxskip.runtime.measured_transport import load_of, measured
from fxskip.runtime.regions import Region
from fxskip.runtime.same_everywhere import require_same_everywhere
from fxskip.schedule.cost_table import CostTable
from fxskip.schedule.costs import ModelCosts
from fxskip.schedule.hardware import DEFAULT_HARDWARE, hardware_names, load_hardware
from fxskip.spec import Runtime, Schedule, Spec
from fxskip.transport import Asked, Moves, TransportChoice, as_asked


def is_parallel(spec: Spec) -> bool:
    """Whether the spec spreads anything over more than one process."""
    axes = (spec.parallel.expert, spec.parallel.tensor) if spec.parallel else ()
    return any(axis is not None and axis.size > 1 for axis in axes)


Plan = Mapping[str, Cut]
"""How the matrices of a layer are cut, by the paths of their modules in it."""


def refuse_spread(layers: Mapping[str, nn.Module]) -> None:
    """Raise PassError where layers are spread over processes already."""
    if any(getattr(layer, "fxskip_parallel", None) is not None for layer in layers.values()):
        raise PassError(
            "parallelize",
            "the model is spread already",
            hint="parallelize(student) once, or transform with parallel:",
        )


def spread(
    model: nn.Module,
    layers: Mapping[str, nn.Module],
    spec: Spec,
    mesh: DeviceMesh,
    plans: Mapping[str, Plan],
    costs: Callable[[], ModelCosts],
    table: CostTable | None,
) -> None:
    """Keep this rank's experts and parts of matrices alone in each decoder layer, and have the layers exchange values.

    plans   by the path of the layer; of use where the mesh has the axis "tensor"
    costs   called where a transport is to be measured
    table   measured costs of tasks; None where schedules are made by the roofline

    Raises PassError where the processes do not hold the same model, and where experts or matrices cannot be cut,
    ScheduleError where costs were measured for another student.
    """
    require_same_everywhere(model, spec, mesh)
    common = _common(spec, mesh)
    experts = {path: expert_paths(layer) if expert_axis(spec) else [] for path, layer in layers.items()}
    if expert_axis(spec):
        _require_experts(model, layers, experts, common.ranks)
    first = next((layers[path].get_submodule(one) for path, inner in experts.items() for one in inner), None)
    choice = _choice(spec, mesh, common, first, costs)
    if choice.chosen == "copy_engine":
        connect_devices(mesh[common.expert_axis], warns=choice.asked == "copy_engine")
    common = replace(common, transport=choice.chosen)
    if table is not None:
        table.require_fit(
            cost_key(model, layers, common, torch.device(mesh.device_type)), common.schedule.costs
        )
        common = replace(common, measured=TaskCosts.of(table.tokens, table.costs_us))
    following = [*list(layers.values())[1:], None]
    layer_mesh = LayerMesh(mesh)
    for (path, layer), after in zip(layers.items(), following, strict=True):
        assert isinstance(layer, Region)
        stacks = tuple(_cut(layer, inner, mesh[common.expert_axis]) for inner in experts[path])
        if common.tensor_size > 1:
            for inner, how in plans[path].items():
                cut_linear(layer, inner, how, mesh[TENSOR])
        defers = common.mode != "reference" and after is not None and _has_several_streams(after)
        layer.fxskip_mesh = layer_mesh
        layer.fxskip_transport = choice
        layer.fxskip_parallel = replace(common, experts=stacks, defers=defers)
    # DistributedDataParallel averages what all processes hold; each has experts of its own.
    sharded = [name for name, p in model.named_parameters() if isinstance(p, DTensor)]
    model._ddp_params_and_buffers_to_ignore = sharded  # type: ignore[assignment]
    if common.schedule.gradients == "in_backward":
        _average_in_backward(model, layers, common)


def _require_experts(
    model: nn.Module, layers: Mapping[str, nn.Module], experts: Mapping[str, Sequence[str]], ranks: int
) -> None:
    """Raise PassError where no layer has experts that `ranks` could share, or one has some that they cannot.

    experts   paths of their modules, by that of the layer
    """
    if not any(experts.values()):
        raise PassError(
            "parallelize",
            f"no layer of {type(model).__name__} has its routed experts as stacks, so parallel.expert spreads nothing",
            where=f"layers {', '.join(layers)}",
            hint="experts can be spread where one module holds parameters [experts, ...] of all of them, not a "
            "module for each; leave parallel.expert out for this architecture",
        )
    for path, layer in layers.items():
        for inner in experts[path]:
            _require_stacks(layer.get_submodule(inner), ranks, f"module {path}.{inner}")


def _average_in_backward(model: nn.Module, layers: Mapping[str, nn.Module], parallel: RegionParallel) -> None:
    gradients = GradientsInBackward(model)
    gradients.prepare(parallel)
    lanes = gradients.plan.lanes  # none where nothing trains yet
    if lanes and all(lane.group is None for lane in lanes):
        raise PassError(
            "schedule.gradients: in_backward",
            "all processes have the same tokens, so their gradients are equal",
            hint="leave schedule.gradients out, or add processes with tokens of their own to the mesh",
        )
    for layer in layers.values():
        layer.fxskip_gradients = gradients  # type: ignore[assignment]


def _common(spec: Spec, mesh: DeviceMesh) -> RegionParallel:
    """What is the same for all layers. The transport is the process group's, whatever the spec says."""
    schedule, mode = spec.schedule or Schedule(), (spec.runtime or Runtime()).mode
    if schedule.overlap == "none":
        if mode == "eager_wait":
            raise PassError(
                "parallelize",
                "schedule.overlap: none runs in program order, and runtime.mode: eager_wait in that of the schedule",
                hint="leave one of the two out",
            )
        mode = "reference"
    sizes, axis, hardware = axes(spec), expert_axis(spec), _hardware_here()
    ranks = sizes[axis] if axis else 1
    transport: Moves = "gloo"
    if dist.get_backend(mesh[next(iter(sizes))].get_group()) == "nccl":
        transport = "nccl" if _in_one_domain(max(sizes.values()), hardware) else "nccl_network"
    return RegionParallel(
        (),
        ranks,
        mode,
        False,
        schedule,
        hardware,
        transport,
        exchange=spec.parallel.expert.exchange if spec.parallel and spec.parallel.expert else "all_to_all",
        expert_axis=axis or EXPERT,
        tensor_size=sizes.get(TENSOR, 1),
    )


def _choice(
    spec: Spec,
    mesh: DeviceMesh,
    common: RegionParallel,
    experts: nn.Module | None,
    costs: Callable[[], ModelCosts],
) -> TransportChoice:
    """What moves the rows: the same on all ranks of the mesh, for schedules follow from it.

    experts   the first layer's module of routed experts, still whole; None where they are not spread
    """
    asked = _transport(spec)
    if asked == "measured":
        assert experts is not None  # `make_mesh` refuses it where no rows are exchanged
        return measured(
            mesh, common.expert_axis, common.transport, lambda: load_of(costs(), experts, common.ranks)
        )
    return as_asked(asked, "copy_engine" if asked == "copy_engine" else common.transport)


def _in_one_domain(ranks: int, hardware: str) -> bool:
    """Whether neighbouring ranks share fast links, by what the launcher and NCCL are told; nothing is measured."""
    if os.environ.get("NCCL_P2P_DISABLE") == "1":
        return False
    on_host = int(os.environ.get("LOCAL_WORLD_SIZE", ranks))  # torchrun sets it
    return ranks <= min(on_host, load_hardware(hardware).domain.gpus)


def _hardware_here() -> str:
    """The hardware file of this process's GPU; the default without a GPU and, with a warning, for an unknown one."""
    if not torch.cuda.is_available():
        return DEFAULT_HARDWARE
    name = torch.cuda.get_device_name()
    for known in hardware_names():
        if known in name.lower():
            return known
    warnings.warn(
        f"fxskip: no file of specs/hardware is of {name}: schedules are made with the figures of {DEFAULT_HARDWARE}; "
        "measure with fxskip trace, and name its table in schedule.costs",
        stacklevel=2,
    )
    return DEFAULT_HARDWARE


def axes(spec: Spec) -> dict[str, int]:
    """The axes of the mesh that the spec asks for, and their sizes; those of size 1 are left out.

    Experts whose tokens are replicated lie on the ranks that share matrices, where the spec has both: these ranks
    have the same tokens anyway.

    Raises PassError where the two sizes then differ.
    """
    expert, tensor = (spec.parallel.expert, spec.parallel.tensor) if spec.parallel else (None, None)
    sizes = {TENSOR: tensor.size if tensor else 1, EXPERT: expert.size if expert else 1}
    if expert and expert.exchange == "all_reduce" and min(sizes.values()) > 1:
        if sizes[TENSOR] != sizes[EXPERT]:
            raise PassError(
                "parallelize",
                f"parallel.expert.size is {sizes[EXPERT]} with exchange: all_reduce, and parallel.tensor.size is "
                f"{sizes[TENSOR]}",
                hint="both have the same tokens on all their ranks, so they are the same ranks: write equal sizes, or "
                "exchange: all_to_all",
            )
        del sizes[EXPERT]
    return {axis: size for axis, size in sizes.items() if size > 1}


def expert_axis(spec: Spec) -> str | None:
    """The axis that experts are spread over; None where they are not."""
    if spec.parallel is None or spec.parallel.expert is None or spec.parallel.expert.size == 1:
        return None
    return EXPERT if EXPERT in axes(spec) else TENSOR


def expert_paths(layer: nn.Module) -> list[str]:
    """Paths of the modules in `layer` that hold all routed experts as stacks [experts, ...], outermost first."""
    found: list[str] = []
    for path, module in layer.named_modules():
        inside = any(path.startswith(f"{outer}.") for outer in found)
        stacks = [p.shape[0] for p in module.parameters(recurse=False) if p.dim() >= 2]
        if path and not inside and holds_experts(module) and stacks and len(set(stacks)) == 1:
            found.append(path)
    return found


def make_mesh(spec: Spec, model: nn.Module, mesh: DeviceMesh | None = None) -> DeviceMesh:
    """The mesh that the spec speaks of: the one given, checked, or one over all processes of the default group.

    Raises PassError where there is no process group, or where sizes, devices or the transport do not fit.
    """
    sizes = axes(spec)
    wanted = ", ".join(f"{axis}: {size}" for axis, size in sizes.items())
    if not (dist.is_available() and dist.is_initialized()):
        raise PassError(
            "parallelize",
            f"the spec spreads the model over {wanted}, and this process belongs to no process group",
            hint="start it with torchrun and call torch.distributed.init_process_group(); or leave parallel out of the "
            "spec to run in one process",
        )
    if mesh is None:
        mesh = _mesh_over_all(sizes, _device_type(model))
    names = mesh.mesh_dim_names or ()
    if any(axis not in names or mesh[axis].size() != size for axis, size in sizes.items()):
        found = ", ".join(f"{name}: {mesh[name].size()}" for name in names) or "no named axis"
        raise PassError(
            "parallelize",
            f"the spec asks for the axes {wanted}, and the mesh has {found}",
            hint=f"init_device_mesh(device, {(..., *sizes.values())}, mesh_dim_names={(..., *sizes)})".replace(
                "Ellipsis", "..."
            ),
        )
    if _device_type(model) == "cuda" and mesh.device_type == "cpu":
        raise PassError(
            "parallelize",
            "the model is on cuda, and the mesh is one of cpu devices: experts would leave the others' device",
            hint='init_device_mesh("cuda", ...), or leave mesh= out',
        )
    transport = _transport(spec)
    backends = {dist.get_backend(mesh[axis].get_group()) for axis in sizes}
    if transport in ("copy_engine", "measured"):
        _require_rows_to_copy(spec)
        if transport == "copy_engine":
            require_device_mesh(mesh)
    elif transport != "auto" and backends != {transport}:
        raise PassError(
            "parallelize",
            f"runtime.transport: {transport}, and the process group runs over {', '.join(sorted(backends))}",
            hint=f"init_process_group({transport!r}), or leave runtime.transport out",
        )
    return mesh


def _transport(spec: Spec) -> Asked:
    """What the spec says that moves the bytes. "auto" is the process group's backend."""
    return (spec.runtime or Runtime()).transport


def _require_rows_to_copy(spec: Spec) -> None:
    expert = spec.parallel.expert if spec.parallel else None
    if expert is None or expert.size == 1 or expert.exchange != "all_to_all":
        raise PassError(
            "parallelize",
            f"runtime.transport: {_transport(spec)} moves rows between experts, and this spec only adds up over ranks",
            hint="parallel: {expert: {size: 2, exchange: all_to_all}}, or leave runtime.transport out",
        )


def _device_type(model: nn.Module) -> str:
    """Of the model's parameters; "meta" where none has memory."""
    return next((p.device.type for p in model.parameters() if not p.is_meta), "meta")


def _mesh_over_all(sizes: Mapping[str, int], model_on: str) -> DeviceMesh:
    """Neighbours share matrices, then experts; what is left over is data parallel. The devices are the backend's, which
    may have the model before it is moved there; gloo has those of the model."""
    world, needed = dist.get_world_size(), prod(sizes.values())
    if world % needed:
        raise PassError(
            "parallelize",
            f"the spec needs a multiple of {needed} processes, and there are {world}",
            where="parallel: " + " x ".join(f"{axis} {size}" for axis, size in sizes.items()),
            hint=f"start {needed} processes, or a multiple, or pass mesh=",
        )
    device = torch.accelerator.current_accelerator() if dist.get_backend() != "gloo" else None
    kind = device.type if device is not None else "cuda" if model_on == "cuda" else "cpu"
    inner = sorted(sizes, key=[EXPERT, TENSOR].index)
    shape = (world // needed, *(sizes[axis] for axis in inner))
    return init_device_mesh(kind, shape, mesh_dim_names=("data", *inner))


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
    needed = [p.name for p in signature(module.forward).parameters.values() if p.default is p.empty]
    if len(needed) != 3:
        raise PassError(
            "parallelize",
            f"{type(module).__name__} is called with ({', '.join(needed)})",
            where=where,
            hint="experts can be spread where their module takes tokens [T, D], the experts of each [T, K] and their "
            "weights [T, K]; leave parallel.expert out for this architecture",
        )
    if split_evenly(total, ranks)[-1] == 0:
        raise PassError(
            "parallelize",
            f"{total} experts spread over {ranks} processes leave the last without one",
            where=where,
            hint=f"parallel: {{expert: {{size: {total}}}}} at most",
        )
