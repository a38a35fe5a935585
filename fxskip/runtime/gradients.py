"""Gradients of a model whose experts are spread over processes: their mean over the batch of all, and their norm.

Every process has the gradients of its own loss. Autograd leaves those of weights that all processes hold apart; those
of an expert are summed already over the processes that sent it tokens. The mean loss of all processes wants both
divided by the number of processes with batches of their own, and the first summed, too.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial, reduce
from typing import TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fxskip.collectives.all_reduce import reduce_in_place
from fxskip.collectives.landing import launch
from fxskip.collectives.measuring import Place, Sent
from fxskip.errors import PassError
from fxskip.runtime.gradient_buckets import gradient_plan, own
from fxskip.runtime.gradients_in_backward import Agreement, GradientsInBackward
from fxskip.schedule.tasks import EXPERT_DATA

Kind = TypeVar("Kind", bound=Tensor)


def average_gradients(model: nn.Module, *, dense: bool = True) -> None:
    """Make the gradients, in place, those of the mean of all processes' losses: call it before `optimizer.step()`.

    Then a step is that of one process with the batches of all, where each has equally many tokens that count.

    Args:
        model: a model that `transform` or `parallelize` spread, or any module around it, whose own parameters every
            process holds and has averaged, too.
        dense: also average the gradients of what every process holds. False where DistributedDataParallel has done
            so. Parameters that `fully_shard` manages are left alone in either case: FSDP2 has averaged them.

    A parameter that has a gradient on some processes only counts as zero on the others. Where the backward pass has
    averaged all (`schedule: {gradients: in_backward}`), nothing is left to do, and a warning says so.

    Raises PassError for a model that is not spread, CollectiveError where processes train different parameters.
    """
    students = _all_in_backward(model)
    done = {p for student in students for p in student.parameters()}
    if students:
        others = [p for p in model.parameters() if p.grad is not None and p not in done]
        left = [student for student in students if not student.is_done]
        for student in left:
            student.average()
        if not left and not others:
            warnings.warn(
                "fxskip.average_gradients: the backward pass has averaged the gradients (schedule.gradients: "
                "in_backward); nothing is left to do, and the call can go",
                stacklevel=2,
            )
    plan = gradient_plan("average_gradients", model, leave_out=done)
    Agreement(plan, "average_gradients").require()
    for bucket in plan.buckets:
        if dense or bucket.lane.name == EXPERT_DATA:
            with torch.no_grad():
                bucket.finish(bucket.start())


@contextmanager
def no_sync(model: nn.Module) -> Iterator[None]:
    """Accumulate gradients: while it is open, backward passes average nothing. As of DistributedDataParallel.

        with fxskip.no_sync(model):
            for batch in batches[:-1]:
                model(**batch).loss.backward()
        model(**batches[-1]).loss.backward()  # averages the sum

    Raises PassError for a model whose spec does not say `schedule: {gradients: in_backward}`.
    """
    found = _all_in_backward(model)
    if not found:
        raise PassError(
            "no_sync",
            f"no backward pass of {type(model).__name__} averages gradients",
            hint="leave no_sync out, and call fxskip.average_gradients once after the last backward pass; or transform "
            "with schedule: {gradients: in_backward}",
        )
    before = [one.accumulates for one in found]
    for one in found:
        one.accumulates = True
    try:
        yield
    finally:
        for one, was in zip(found, before, strict=True):
            one.accumulates = was


def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """torch.nn.utils.clip_grad_norm_ for parameters of which some are spread over processes and some are not.

    torch's own refuses the mixture. All processes call it; each gets the norm of the whole gradient, a scalar of
    float32 or float64.

    Args:
        parameters: such as `model.parameters()`, or one. Those without a gradient are left out; of what is spread, some
            processes may have gradients and others none.
        max_norm: gradients are scaled down to this norm where theirs is larger.
        norm_type: the p of the p-norm, above 0; float("inf") for the largest absolute value.
        error_if_nonfinite: as torch's: raise RuntimeError, on all processes, where the norm is infinite or NaN.

    Raises PassError for a norm of another order.
    """
    if not norm_type > 0:
        raise PassError("clip_grad_norm_", f"norm_type is {norm_type}", hint="write a number above 0, or inf")
    given = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    norms = [_norm(group, norm_type) for group in _by(lambda t: (t.device_mesh, t.placements), given)]
    if not norms:
        return torch.tensor(0.0)
    total = torch.linalg.vector_norm(torch.stack([norm.to(norms[0].device) for norm in norms]), norm_type)
    if error_if_nonfinite and not total.isfinite():
        raise RuntimeError(
            f"fxskip.clip_grad_norm_: the norm of order {norm_type} of the gradients is {total.item()}; with "
            "error_if_nonfinite=False they are scaled by it all the same"
        )
    scale = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    for parameter in given:
        if parameter.grad is not None:
            part = own(parameter.grad)
            part.mul_(scale.to(part.device, part.dtype))
    return cast(Tensor, total)


def _norm(group: Sequence[Tensor], norm_type: float) -> Tensor:
    """Of the gradients of tensors that are spread alike, where processes have parts, of all parts. Every process takes
    part in the sums, for another one may have gradients where this one has none."""
    first = group[0]
    gradients = [own(tensor.grad) for tensor in group if tensor.grad is not None]
    # The type that processes agree on is that of the tensors: of no gradients, torch's norm is always float32.
    dtype = reduce(torch.promote_types, (tensor.dtype for tensor in group), torch.float32)
    norm = torch.nn.utils.get_total_norm(gradients, norm_type).to(own(first).device, dtype)
    if not isinstance(first, DTensor):
        return norm
    largest = norm_type == float("inf")
    value = norm if largest else norm**norm_type
    for axis, placement in enumerate(first.placements):
        if placement.is_shard():
            over = first.device_mesh.get_group(axis)
            how = dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM
            sent = Sent("clip_grad_norm_", Place(0, "norm", over.group_desc))
            landing = launch(sent, over, partial(reduce_in_place, group=over, how=how), value)
            landing.land()
            value = landing.buffer
    return value if largest else value ** (1 / norm_type)


def parameter_groups(model: nn.Module) -> list[dict[str, list[nn.Parameter]]]:
    """The parameters in groups for an optimizer with `foreach=True` or `fused=True`, which takes no mixture in one.

    One group of what each process holds, and one for each mesh that others are spread over.
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    return [{"params": group} for group in _by(lambda p: p.device_mesh, trained)]


def _all_in_backward(model: nn.Module) -> list[GradientsInBackward]:
    """What averages gradients in the backward passes of the students in `model`, each once."""
    found = (getattr(module, "fxskip_gradients", None) for module in model.modules())
    return list(dict.fromkeys(one for one in found if isinstance(one, GradientsInBackward)))


def _by(kind: Callable[[DTensor], Hashable], tensors: Iterable[Kind]) -> list[list[Kind]]:
    """What each process holds, and DTensors by their kind, in groups in the order of their first members."""
    groups: dict[Hashable, list[Kind]] = {}
    for tensor in tensors:
        groups.setdefault(kind(tensor) if isinstance(tensor, DTensor) else None, []).append(tensor)
    return list(groups.values())
