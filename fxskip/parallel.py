"""How one decoder layer runs on several ranks: plain data that decides, with the wiring, which graph runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from fxskip.errors import PassError
from fxskip.leaves import running_layer
from fxskip.spec import Schedule
from fxskip.transport import Moves

Mode = Literal["scheduled", "reference", "eager_wait"]
Exchange = Literal["all_to_all", "all_reduce"]

EXPERT = "expert"
"""Name of the mesh axis that experts are spread over."""
TENSOR = "tensor"
"""Name of the mesh axis that matrices are cut over."""


@dataclass(frozen=True)
class ExpertStack:
    """A module of routed experts whose parameters are stacks of one matrix an expert."""

    path: str
    """In the decoder layer."""
    experts: int
    """On all ranks."""
    parameters_each: int
    """Elements of one expert."""


@dataclass(frozen=True)
class GradientSum:
    """An all-reduce of gradients over processes with other tokens, on one rank."""

    role: str
    """Of the task in its layer, such as "gradients", "expert_gradients.2", "head_gradients"."""
    lane: str
    bytes: int
    ranks: int
    """That add up."""


@dataclass(frozen=True)
class TaskCosts:
    """Measured costs of a layer's tasks: they can be hashed, for equal layers share their graphs."""

    tokens: int
    """Of one rank, that the costs are of."""
    us: tuple[tuple[str, float], ...]
    """Role and microseconds of each task, in the order of roles."""

    @staticmethod
    def of(tokens: int, us: Mapping[str, float]) -> TaskCosts:
        """Those of a table, by role."""
        return TaskCosts(tokens, tuple(sorted(us.items())))


@dataclass(frozen=True)
class RegionParallel:
    """What is spread over ranks in a layer, and what decides when its collectives run."""

    experts: tuple[ExpertStack, ...]
    ranks: int
    """That share one set of experts."""
    mode: Mode
    defers: bool
    """Whether the layer's last exchange may arrive in the next layer."""
    schedule: Schedule
    hardware: str
    """Name or path of the hardware file that costs are taken from."""
    transport: Moves
    """What moves the rows; the cost of contention follows from it."""
    exchange: Exchange = "all_to_all"
    expert_axis: str = EXPERT
    """Axis of the mesh that the experts are spread over."""
    tensor_size: int = 1
    """Ranks that matrices are cut over, on the axis "tensor"."""
    gradients: tuple[GradientSum, ...] = ()
    """All-reduces of the layer's gradients in its backward pass, in the order in which they start."""
    measured: TaskCosts | None = None
    """What the table says that `schedule.costs` names; None where costs are estimated."""


class LayerMesh:
    """The mesh that a layer runs on. A copy of the layer runs on the same; a pickle cannot hold it."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self._mesh = mesh
        self._lanes: dict[tuple[str, ...], Any] = {}

    @property
    def mesh(self) -> DeviceMesh:
        """All of it."""
        return self._mesh

    def axis(self, name: str) -> DeviceMesh:
        """One axis of the mesh."""
        return self._mesh[name]

    def lane(self, axes: tuple[str, ...]) -> Any:
        """A process group over the ranks that differ from this one along `axes` alone; None for this one alone.

        Nothing else runs in it, so its collectives need an order among themselves only. It is made at the first call,
        which all its ranks make together.
        """
        spanned = tuple(axis for axis in axes if self._mesh[axis].size() > 1)
        if spanned and spanned not in self._lanes:
            backend = dist.get_backend(self._mesh[spanned[0]].get_group())
            self._lanes[spanned] = dist.new_group(
                self._ranks_along(spanned), backend=backend, use_local_synchronization=True
            )
        return self._lanes.get(spanned)

    def axes_to_meet(self, axes: tuple[str, ...]) -> tuple[str, ...]:
        """The axes over which all ranks of that lane have to meet before it is made; none where it is there."""
        spanned = tuple(axis for axis in axes if self._mesh[axis].size() > 1)
        return () if spanned in self._lanes else spanned

    def _ranks_along(self, axes: tuple[str, ...]) -> list[int]:
        names, own = self._mesh.mesh_dim_names or (), self._mesh.get_coordinate()
        assert own is not None
        at = tuple(slice(None) if name in axes else place for name, place in zip(names, own, strict=True))
        found: list[int] = self._mesh.mesh[at].flatten().tolist()
        return found

    def __deepcopy__(self, memo: Any) -> LayerMesh:
        return self

    def __reduce__(self) -> Any:
        raise PassError(
            "pickle",
            "a model that is spread over processes cannot be pickled: its experts lie on several",
            hint="save_pretrained gathers them; torch.distributed.checkpoint saves each process's part",
        )


def running_axis(name: str) -> DeviceMesh:
    """One axis of the mesh that the layer which runs now is spread over."""
    layer_mesh = running_layer().fxskip_mesh
    assert isinstance(layer_mesh, LayerMesh)
    return layer_mesh.axis(name)


def running_number() -> int:
    """Number of the decoder layer that runs now."""
    return int(running_layer().fxskip_layer)  # type: ignore[arg-type]
