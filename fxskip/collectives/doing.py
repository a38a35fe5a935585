"""What a rank is about to do in a layer of experts, in one number that travels with the counts of rows.

Ranks that disagree would pair exchanges that do not belong together, or wait for ever in the backward pass.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass, fields
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from fxskip.errors import CollectiveError
from fxskip.leaves import running_layer

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_BITS = {
    "layer": 16,
    "width": 24,
    "dtype": 4,
    "hidden_gradients": 1,
    "expert_gradients": 1,
    "again": 1,
    "averages": 16,
}


@dataclass(frozen=True)
class Doing:
    """What has to be alike on all ranks that exchange rows."""

    layer: int
    width: int
    """Numbers in a row."""
    dtype: int
    """Their type, as its number in a list."""
    hidden_gradients: int
    """1 where the hidden states will have a gradient, which travels back."""
    expert_gradients: int
    """1 where the experts' own weights will have one."""
    again: int
    """1 in a recomputation, during a backward pass."""
    averages: int
    """A hash of the names of the parameters whose gradients the backward pass averages; 0 where it averages none."""

    @staticmethod
    def now(hidden: Tensor, path: str) -> Doing:
        """That of the layer that runs, whose experts are at `path` and get `hidden` [T, D]."""
        layer, grad = running_layer(), torch.is_grad_enabled()
        averages: Any = layer.fxskip_gradients
        return Doing(
            layer.fxskip_layer,  # type: ignore[arg-type]
            hidden.shape[1],
            _DTYPES.index(hidden.dtype) if hidden.dtype in _DTYPES else len(_DTYPES),
            int(grad and hidden.requires_grad),
            int(grad and any(p.requires_grad for p in layer.get_submodule(path).parameters())),
            int(torch._C._current_graph_task_id() != -1),
            averages.names_hash if averages is not None else 0,
        )

    def encoded(self) -> int:
        """All of it as one number."""
        number = 0
        for value, bits in zip(astuple(self), _BITS.values(), strict=True):
            number = number << bits | value
        return number

    @staticmethod
    def decoded(number: int) -> Doing:
        """What `encoded` made a number of."""
        values = []
        for bits in reversed(_BITS.values()):
            values.append(number & (1 << bits) - 1)
            number >>= bits
        return Doing(*reversed(values))

    def __str__(self) -> str:
        dtype = (
            str(_DTYPES[self.dtype]).removeprefix("torch.") if self.dtype < len(_DTYPES) else "another type"
        )
        return (
            f"decoder layer {self.layer}{' again, in a backward pass' if self.again else ''}, "
            f"hidden states {dtype}[..., {self.width}] with{'' if self.hidden_gradients else 'out'} gradients, "
            f"experts {'that train' if self.expert_gradients else 'without gradients'}"
            f"{f', averages gradients of set {self.averages:04x}' if self.averages else ''}"
        )


assert tuple(_BITS) == tuple(field.name for field in fields(Doing))


def require_same_doing(mesh: DeviceMesh, everyone: list[int]) -> None:
    """Raise CollectiveError where the ranks of `mesh` are not about to do the same; it names all ranks."""
    if len(set(everyone)) == 1:
        return
    ranks = dist.get_process_group_ranks(mesh.get_group())
    raise CollectiveError(
        f"experts of decoder layer {Doing.decoded(everyone[mesh.get_local_rank()]).layer}",
        "the processes do not do the same",
        where="\n".join(f"rank {r}: {Doing.decoded(n)}" for r, n in zip(ranks, everyone, strict=True)),
        hint="all processes call the model equally often, in one dtype, all with gradients or all without, and with "
        "the same parameters frozen",
    )
