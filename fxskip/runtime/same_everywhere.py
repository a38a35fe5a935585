"""Check, before the first collective, that all processes are about to do the same."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fxskip.errors import PassError
from fxskip.spec import Spec

T = TypeVar("T")


def require_same_everywhere(model: nn.Module, spec: Spec, mesh: DeviceMesh) -> None:
    """Raise PassError on every process where the processes differ in spec, wiring, parameters or their values.

    The message names the first difference and what each process has. One small exchange of hashes; weights are read
    once.
    """
    lines = list(_description(model, spec, mesh))
    digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()
    digests = _gather(digest)
    if len(set(digests)) == 1:
        return
    everyone = _gather(lines)
    longest = max(map(len, everyone))
    for at in range(longest):
        found = [lines[at] if at < len(lines) else "nothing" for lines in everyone]
        if len(set(found)) > 1:
            raise PassError(
                "parallelize",
                "the processes hold different models",
                where="\n".join(f"rank {rank}: {line}" for rank, line in enumerate(found)),
                hint="load the same checkpoint, or set the same seed, and use one spec in all processes",
            )


def _description(model: nn.Module, spec: Spec, mesh: DeviceMesh) -> Iterator[str]:
    yield f"torch {torch.__version__}"
    yield f"mesh {mesh.mesh_dim_names} {tuple(mesh.shape)}"
    yield f"spec {spec.to_dict()}"
    for name, parameter in model.named_parameters():
        kind = str(parameter.dtype).removeprefix("torch.")
        trains = "trains" if parameter.requires_grad else "frozen"
        yield f"{name} {kind}{list(parameter.shape)} {trains}, values {_fingerprint(parameter)}"


def _fingerprint(parameter: torch.Tensor) -> str:
    """A number that differs where values differ: their bits as integers, added up, which rounds nothing."""
    if parameter.is_meta:
        return "none"
    bits = parameter.detach().contiguous().view(torch.uint8)
    return format(int(bits.sum(dtype=torch.int64)), "x")


def _gather(mine: T) -> list[T]:
    everyone: list[T] = [mine] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return everyone
