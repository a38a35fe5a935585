"""Check, before the first collectives, that all processes are about to do the same."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fxskip.collectives.comparison import Comparison
from fxskip.collectives.measuring import Place, Sent
from fxskip.errors import CollectiveError, PassError
from fxskip.spec import Spec

T = TypeVar("T")


def require_same_everywhere(model: nn.Module, spec: Spec, mesh: DeviceMesh) -> None:
    """Raise PassError on every process where the processes differ in spec, wiring, parameters or their values.

    The message names the first difference and what each process has. One small exchange of hashes; weights are read
    once.
    """
    require_same_lines(
        list(_description(model, spec, mesh)),
        mesh,
        "parallelize",
        "the processes hold different models",
        hint="load the same checkpoint, or set the same seed, and use one spec in all processes",
    )


def require_same_lines(mine: list[str], mesh: DeviceMesh, who: str, found: str, *, hint: str) -> None:
    """Raise PassError on every process of the mesh where their lines differ, with the first difference."""
    digest = hashlib.sha256("\n".join(mine).encode()).hexdigest()
    if len(set(gather(digest, mesh).values())) == 1:
        return
    everyone = gather(mine, mesh)
    for at in range(max(map(len, everyone.values()))):
        at_rank = {rank: lines[at] if at < len(lines) else "nothing" for rank, lines in everyone.items()}
        if len(set(at_rank.values())) > 1:
            where = "\n".join(f"rank {rank}: {line}" for rank, line in at_rank.items())
            raise PassError(who, found, where=where, hint=hint)


def _description(model: nn.Module, spec: Spec, mesh: DeviceMesh) -> Iterator[str]:
    yield f"torch {torch.__version__}"
    yield f"mesh {mesh.mesh_dim_names} {tuple(mesh.shape)}"
    yield f"spec {spec.to_dict()}"
    for name, parameter in model.named_parameters():
        kind = str(parameter.dtype).removeprefix("torch.")
        trains = "trains" if parameter.requires_grad else "frozen"
        yield f"{name} {kind}{list(parameter.shape)} {trains}, values {_fingerprint(parameter)}"


def require_same_tokens(stream: torch.Tensor, mesh: DeviceMesh, axes: Iterable[str]) -> None:
    """Raise CollectiveError on all ranks of an axis that add up over it, where what enters the first layer differs.

    stream   [..., D], compared bit by bit

    Of different tokens their sums would make numbers that belong to none; of different lengths, transports break down.
    """
    mine = torch.tensor([*_size(stream), int(_fingerprint(stream), 16) >> 1], device=stream.device)
    for axis in axes:
        group = mesh[axis].get_group()
        sent = Sent("comparison of tokens of decoder layer 0", Place(0, "comparison of tokens", axis))
        everyone = Comparison(sent, group, mine).get()
        if any(one != everyone[0] for one in everyone):
            ranks = dist.get_process_group_ranks(group)
            raise CollectiveError(
                "decoder layer 0",
                f"the ranks of the axis {axis} have different tokens, and add up what they make of them",
                where="\n".join(
                    f"rank {rank}: {tokens} tokens of width {width}, values {values:x}"
                    for rank, (tokens, width, values) in zip(ranks, everyone, strict=True)
                ),
                hint='give these ranks the same batch: a sampler by data rank, mesh["data"].get_local_rank()',
            )


def _size(stream: torch.Tensor) -> tuple[int, int]:
    return stream.shape[:-1].numel(), stream.shape[-1]


_CHUNK = 1 << 22
"""Numbers of a parameter that are widened at once."""
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _fingerprint(parameter: torch.Tensor) -> str:
    """A number that differs where values, or their places, do: their bits as integers, each times its place, added up
    modulo 2**64."""
    if parameter.is_meta:
        return "none"
    bits = parameter.detach().contiguous().flatten().view(_BITS[parameter.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for number, chunk in enumerate(bits.split(_CHUNK)):
        begin = number * _CHUNK + 1
        total += (chunk.long() * torch.arange(begin, begin + len(chunk), device=bits.device)).sum()
    return format(int(total) % 2**64, "x")


def gather(mine: T, mesh: DeviceMesh) -> dict[int, T]:
    """That of each process of the mesh, by its rank, in order: one exchange an axis."""
    found = {dist.get_rank(): mine}
    for axis in range(mesh.ndim):
        group = mesh.get_group(axis)
        others: list[dict[int, T]] = [{}] * dist.get_world_size(group)
        dist.all_gather_object(others, found, group=group)
        found = {rank: value for other in others for rank, value in other.items()}
    return dict(sorted(found.items()))
