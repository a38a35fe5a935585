"""Gradients of a model whose experts are spread over processes: their mean over the batch of all, and their norm.

Every process has the gradients of its own loss. Autograd leaves those of weights that all processes hold apart; those
of an expert are summed already over the processes that sent it tokens. The mean loss of all processes wants both
divided by the number of processes with batches of their own, and the first summed, too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import prod
from typing import TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from fxskip.capture.wrappers import inner_model
from fxskip.errors import PassError
from fxskip.parallel import TENSOR, Ranks, RegionParallel

Kind = TypeVar("Kind", bound=Tensor)

_BUCKET_NUMBERS = 1 << 24
"""At most so many numbers are copied together for one all-reduce, unless one gradient has more."""


def average_gradients(model: nn.Module, *, dense: bool = True) -> None:
    """Make the gradients, in place, those of the mean of all processes' losses: call it before `optimizer.step()`.

    Then a step is that of one process with the batches of all, where each has equally many tokens that count.

    Args:
        model: a model that `transform` or `parallelize` spread, wrapped or not.
        dense: also average the gradients of what every process holds. False where DistributedDataParallel has done
            so. Parameters that `fully_shard` manages are left alone in either case: FSDP2 has averaged them.

    A parameter that has a gradient on some processes only counts as zero on the others.

    Raises PassError for a model that is not spread.
    """
    model = inner_model(model)
    mesh, parallel = _spread(model)
    expert_axis = parallel.expert_axis
    same_tokens = {TENSOR} if parallel.exchange == "all_to_all" else {TENSOR, expert_axis}
    axes = [name for name in mesh.mesh_dim_names or () if name not in same_tokens]
    share = 1 / prod(mesh[name].size() for name in axes)
    experts, others = _parameters(model)
    _add_up(experts, [mesh[name] for name in axes if name != expert_axis], share)
    if dense:
        _add_up(others, [mesh[name] for name in axes], share)


def clip_grad_norm_(parameters: Iterable[nn.Parameter], max_norm: float, norm_type: float = 2.0) -> Tensor:
    """torch.nn.utils.clip_grad_norm_ for parameters of which some are spread over processes and some are not.

    torch's own refuses the mixture. All processes call it; each gets the norm of the whole gradient, a scalar.

    Args:
        parameters: such as `model.parameters()`; those without a gradient are left out.
        max_norm: gradients are scaled down to this norm where theirs is larger.
        norm_type: the p of the p-norm; float("inf") for the largest absolute value.
    """
    gradients = [p.grad for p in parameters if p.grad is not None]
    norms = [_whole(torch.nn.utils.get_total_norm(group, norm_type)) for group in _by_mesh(gradients)]
    if not norms:
        return torch.tensor(0.0)
    total = torch.linalg.vector_norm(torch.stack([norm.to(norms[0].device) for norm in norms]), norm_type)
    scale = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    for gradient in gradients:
        own = _own(gradient)
        own.mul_(scale.to(own.device, own.dtype))
    return cast(Tensor, total)


def parameter_groups(model: nn.Module) -> list[dict[str, list[nn.Parameter]]]:
    """The parameters in groups for an optimizer with `foreach=True` or `fused=True`, which takes no mixture in one.

    One group of what each process holds, and one for each mesh that others are spread over.
    """
    return [{"params": group} for group in _by_mesh(p for p in model.parameters() if p.requires_grad)]


def _spread(model: nn.Module) -> tuple[DeviceMesh, RegionParallel]:
    for module in model.modules():
        parallel, ranks = getattr(module, "fxskip_parallel", None), getattr(module, "fxskip_ranks", None)
        if isinstance(parallel, RegionParallel) and isinstance(ranks, Ranks):
            return ranks.mesh, parallel
    raise PassError(
        "average_gradients",
        f"{type(model).__name__} is not spread over processes",
        hint="transform it with a spec that says, for example, parallel: {expert: {size: 2}}",
    )


def _parameters(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Those that train: of experts that are spread, and those with whole gradients of this process's loss.

    The second are what every process holds, and parts of matrices cut over the ranks that share their tokens.
    """
    experts: dict[nn.Parameter, None] = {}
    for module in model.modules():
        parallel = getattr(module, "fxskip_parallel", None)
        for stack in parallel.experts if isinstance(parallel, RegionParallel) else ():
            experts |= dict.fromkeys(module.get_submodule(stack.path).parameters())
    others = [p for p in model.parameters() if p not in experts and p.requires_grad]
    return (
        [p for p in experts if p.requires_grad],
        [p for p in others if not isinstance(p, DTensor) or p.device_mesh.mesh_dim_names == (TENSOR,)],
    )


def _add_up(parameters: Sequence[nn.Parameter], axes: Sequence[DeviceMesh], share: float) -> None:
    """Multiply the gradients by `share` and add them up over the ranks of each of the axes."""
    groups = [axis.get_group() for axis in axes if axis.size() > 1]
    present = torch.tensor([p.grad is not None for p in parameters], dtype=torch.uint8)
    present = present.to(_own(parameters[0]).device) if parameters else present
    for group in groups if parameters else ():
        dist.all_reduce(present, dist.ReduceOp.MAX, group)
    for parameter, has in zip(parameters, present.tolist(), strict=True):
        if has and parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    for bucket in _buckets([_own(p.grad) for p in parameters if p.grad is not None]):
        numbers = torch.cat([gradient.reshape(-1) for gradient in bucket]).mul_(share)
        for group in groups:
            dist.all_reduce(numbers, group=group)
        sizes = [gradient.numel() for gradient in bucket]
        for gradient, part in zip(bucket, numbers.split(sizes), strict=True):
            gradient.copy_(part.view_as(gradient))


def _buckets(gradients: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """In order, of one dtype and device each."""
    bucket: list[Tensor] = []
    for gradient in gradients:
        full = sum(g.numel() for g in bucket) + gradient.numel() > _BUCKET_NUMBERS
        if bucket and (full or (gradient.dtype, gradient.device) != (bucket[0].dtype, bucket[0].device)):
            yield bucket
            bucket = []
        bucket.append(gradient)
    if bucket:
        yield bucket


def _by_mesh(tensors: Iterable[Kind]) -> list[list[Kind]]:
    groups: dict[DeviceMesh | None, list[Kind]] = {}
    for tensor in tensors:
        groups.setdefault(tensor.device_mesh if isinstance(tensor, DTensor) else None, []).append(tensor)
    return list(groups.values())


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _own(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
