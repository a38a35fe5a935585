"""Which gradients are averaged by one all-reduce, over which processes, and in which order.

    backward   head | layer n-1 | ... | layer 0 | embedding          buckets are started in this order
    bucket     gradients of one section, one dtype, one group; at most `schedule.bucket_mib`

The plan follows from the model's parameters alone, so it is the same on all processes. It is that of
`average_gradients` and of averages in the backward pass, which so give the same bits.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fxskip.collectives.all_reduce import reduce_in_place
from fxskip.collectives.failures import join, meet
from fxskip.collectives.landing import Landing, launch
from fxskip.collectives.measuring import Place, Sent
from fxskip.errors import PassError
from fxskip.parallel import TENSOR, GradientSum, LayerMesh, RegionParallel
from fxskip.schedule.gradient_sums import EMBEDDING, HEAD
from fxskip.schedule.tasks import DATA, EXPERT_DATA


@dataclass(frozen=True, eq=False)
class Lane:
    """Where one kind of gradients is averaged."""

    name: str
    group: Any
    """None where this process holds the only copy."""
    ranks: int
    """Of `group`."""
    share: float
    """What a gradient is multiplied by before it is added up."""
    arrival: float = 1.0
    """What a gradient was multiplied by when it arrived, so that a mean can be added to: it is one of `ranks` again."""


@dataclass(frozen=True, eq=False)
class Bucket:
    """Parameters whose gradients are averaged together."""

    layer: int
    """Decoder layer that the all-reduce is counted to."""
    role: str
    """Of the all-reduce among the layer's tasks, such as "gradients", "gradients.2", "head_gradients"."""
    lane: Lane
    parameters: tuple[nn.Parameter, ...]
    names: tuple[str, ...]

    @property
    def name(self) -> str:
        return f"{self.role} ({self.lane.name}) of decoder layer {self.layer}"

    @property
    def sends(self) -> bool:
        """Whether other processes have the same parameters."""
        return self.lane.group is not None

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Numbers in the gradient of each parameter on this process."""
        return tuple(own(p).numel() for p in self.parameters)

    @property
    def bytes(self) -> int:
        return sum(self.sizes) * self.parameters[0].element_size()

    @property
    def in_schedule(self) -> GradientSum:
        """What the scheduler knows of it."""
        return GradientSum(self.role, self.lane.name, self.bytes, self.lane.ranks)

    def start(self) -> Landing | None:
        """Start the mean of the gradients as they are now; None where nothing has to be sent, and it is done.

        A parameter without a gradient counts as zero. Behind the gradients one number a parameter says who has one.
        """
        if not self.sends:
            for parameter in self.parameters:
                if parameter.grad is not None:
                    own(parameter.grad).mul_(self.lane.share)
            return None
        sent = Sent(self.name, Place(self.layer, self.role, self.lane.name))
        return launch(sent, self.lane.group, partial(reduce_in_place, group=self.lane.group), self._packed())

    def finish(self, landing: Landing | None) -> None:
        """Wait for the mean, and make it the gradient; no gradient stays none where no process has one."""
        if landing is None:
            return
        landing.land()
        *parts, present = landing.buffer.split([*self.sizes, len(self.sizes)])
        somewhere: list[bool] | None = None
        for number, (parameter, part) in enumerate(zip(self.parameters, parts, strict=True)):
            if parameter.grad is None:
                somewhere = somewhere or (present > 0).tolist()
                if not somewhere[number]:
                    continue
                parameter.grad = torch.zeros_like(parameter)
            gradient = own(parameter.grad)
            gradient.copy_(part.view_as(gradient))

    def _packed(self) -> Tensor:
        numbers = own(self.parameters[0]).new_empty(sum(self.sizes) + len(self.sizes))
        *parts, present = numbers.split([*self.sizes, len(self.sizes)])
        for name, parameter, part in zip(self.names, self.parameters, parts, strict=True):
            if parameter.grad is None:
                part.zero_()
            else:
                gradient = own(parameter.grad)
                _require_plain(name, gradient, parameter)
                torch.mul(gradient.reshape(-1), self.lane.share, out=part)
        present.fill_(1)
        for number, parameter in enumerate(self.parameters):
            if parameter.grad is None:
                present[number] = 0
        return numbers


@dataclass(frozen=True)
class GradientPlan:
    """The buckets of a model in the order in which they are started."""

    buckets: tuple[Bucket, ...]
    parallel: RegionParallel
    """What is the same for all layers."""
    experts: frozenset[nn.Parameter] = field(repr=False)
    """Whose gradients are sums over the expert axis."""
    everyone: Any
    """The group of all processes of the mesh."""
    device: torch.device
    """Where numbers are compared."""
    counts_reach_everyone: bool
    """Whether all of them exchange counts of rows with each other in each layer of experts."""

    @property
    def lanes(self) -> tuple[Lane, ...]:
        """Of the buckets."""
        return tuple(dict.fromkeys(bucket.lane for bucket in self.buckets))

    def of_layer(self, layer: int) -> tuple[GradientSum, ...]:
        """What is sent in the backward pass of a decoder layer, without head and embedding."""
        return tuple(
            bucket.in_schedule
            for bucket in self.buckets
            if bucket.layer == layer and bucket.sends and not bucket.role.startswith((HEAD, EMBEDDING))
        )

    @cached_property
    def lines(self) -> tuple[str, ...]:
        """What is averaged, in order: the same on all processes of the mesh, for shapes are those of all together."""
        return tuple(
            f"{name} {str(p.dtype).removeprefix('torch.')}{list(p.shape)}"
            for bucket in self.buckets
            for name, p in zip(bucket.names, bucket.parameters, strict=True)
        )

    @cached_property
    def number(self) -> int:
        """A hash of `lines` in 60 bits."""
        return int(hashlib.sha256("\n".join(self.lines).encode()).hexdigest()[:15], 16)


def gradient_plan(
    who: str, model: nn.Module, *, arrive_scaled: bool = False, leave_out: Collection[nn.Parameter] = ()
) -> GradientPlan:
    """The plan of a model that is spread over processes; its process groups are made at the first call.

    arrive_scaled   gradients of experts come with the factor `Lane.arrival` already
    leave_out       parameters that something else averages

    Raises PassError, in the name of `who`, for a model that is not spread.
    """
    layers = spread_layers(model)
    if not layers:
        raise PassError(
            who,
            f"{type(model).__name__} is not spread over processes",
            hint="transform it with a spec that says, for example, parallel: {expert: {size: 2}}",
        )
    first = next(iter(layers.values()))
    parallel = parallel_of(first)
    data, expert_data = _lanes(first.fxskip_mesh, parallel)  # type: ignore[arg-type]
    if arrive_scaled:
        expert_data = replace(
            expert_data, share=1 / expert_data.ranks, arrival=expert_data.share * expert_data.ranks
        )
    experts = frozenset(p for layer in layers.values() for p in _experts(layer))
    found: Sections = {}
    for section, name, parameter in _sections(model, layers):
        if parameter in leave_out or not parameter.requires_grad:
            continue
        if parameter in experts or _is_whole(parameter):
            found.setdefault(section, []).append((name, parameter))
    buckets = tuple(_buckets(found, data, expert_data, experts, parallel.schedule.bucket_mib << 20))
    everyone, counts_reach = _everyone(first.fxskip_mesh, parallel)  # type: ignore[arg-type]
    return GradientPlan(buckets, parallel, experts, everyone, next(model.parameters()).device, counts_reach)


Sections = dict[tuple[int, str], list[tuple[str, nn.Parameter]]]
"""Parameters with their names, in the order of the forward pass, by layer and place."""


def _buckets(
    sections: Sections, data: Lane, expert_data: Lane, experts: Collection[nn.Parameter], most_bytes: int
) -> Iterator[Bucket]:
    """In the order of the backward pass."""
    in_order = sorted(sections.items(), key=lambda item: (_PLACES.index(item[0][1]), -item[0][0]))
    for (layer, where), members in in_order:
        for lane, kind in ((expert_data, "expert_gradients"), (data, "gradients")):
            of_lane = [(n, p) for n, p in reversed(members) if (p in experts) == (lane is expert_data)]
            for number, group in enumerate(_cut(of_lane, most_bytes), 1):
                role = f"{where}{kind}" + (f".{number}" if number > 1 else "")
                names, parameters = zip(*group, strict=True)
                yield Bucket(layer, role, lane, parameters, names)


_LAYER = ""
_PLACES = (HEAD, _LAYER, EMBEDDING)
"""In the order of the backward pass: what follows the layers, the layers from the last to the first, what stands
before them. The beginning of a role."""


def spread_layers(model: nn.Module) -> dict[str, nn.Module]:
    """The decoder layers that are spread, by path, in order."""
    return {
        path: module
        for path, module in model.named_modules()
        if isinstance(getattr(module, "fxskip_parallel", None), RegionParallel)
    }


def parallel_of(layer: nn.Module) -> RegionParallel:
    """How a layer is spread."""
    found = layer.fxskip_parallel
    assert isinstance(found, RegionParallel)
    return found


def _lanes(layer_mesh: LayerMesh, parallel: RegionParallel) -> tuple[Lane, Lane]:
    """Of what every process holds, or cuts among ranks with the same tokens, and of experts."""
    same_tokens = {TENSOR} if parallel.exchange == "all_to_all" else {TENSOR, parallel.expert_axis}
    axes = tuple(name for name in layer_mesh.mesh.mesh_dim_names or () if name not in same_tokens)
    share = 1 / prod(layer_mesh.mesh[name].size() for name in axes)
    found = []
    for name, own_axes in ((DATA, axes), (EXPERT_DATA, tuple(a for a in axes if a != parallel.expert_axis))):
        size = prod(layer_mesh.mesh[axis].size() for axis in own_axes)
        group = _lane_group(layer_mesh, own_axes)
        if group is not None:
            join(group)
        found.append(Lane(name, group, size, share))
    return found[0], found[1]


def _lane_group(layer_mesh: LayerMesh, axes: tuple[str, ...]) -> Any:
    """`layer_mesh.lane(axes)`. Where a rank leaves out the call that makes it, torch would wait for it in silence."""
    for axis in layer_mesh.axes_to_meet(axes):  # then ranks know of each other over all of them
        meet(f"making of a group for gradients ({axis})", layer_mesh.axis(axis).get_group())
    return layer_mesh.lane(axes)


def _everyone(layer_mesh: LayerMesh, parallel: RegionParallel) -> tuple[Any, bool]:
    """The group of the whole mesh, and whether the exchanges of counts are among all of it."""
    names = layer_mesh.mesh.mesh_dim_names or ()
    group = _lane_group(layer_mesh, names)
    join(group)
    wide = {name for name in names if layer_mesh.mesh[name].size() > 1}
    return group, parallel.exchange == "all_to_all" and wide == {parallel.expert_axis}


def _experts(layer: nn.Module) -> Iterator[nn.Parameter]:
    for stack in parallel_of(layer).experts:
        yield from layer.get_submodule(stack.path).parameters()


def _is_whole(parameter: nn.Parameter) -> bool:
    """Whether the gradient is that of this process's loss: not of what FSDP2 manages, which has averaged it."""
    return not isinstance(parameter, DTensor) or parameter.device_mesh.mesh_dim_names == (TENSOR,)


def _sections(
    model: nn.Module, layers: Mapping[str, nn.Module]
) -> Iterator[tuple[tuple[int, str], str, nn.Parameter]]:
    """Each parameter once, in the order of registration, with its layer and its place before, in or behind them."""
    last, seen = len(layers) - 1, False
    numbers = {f"{path}.": number for number, path in enumerate(layers)}
    for name, parameter in model.named_parameters():
        number = next((k for path, k in numbers.items() if name.startswith(path)), None)
        seen = seen or number is not None
        if number is not None:
            yield (number, _LAYER), name, parameter
        else:
            yield ((last, HEAD) if seen else (0, EMBEDDING)), name, parameter


def _cut(
    members: Iterable[tuple[str, nn.Parameter]], most_bytes: int
) -> Iterator[list[tuple[str, nn.Parameter]]]:
    """Buckets of at most `most_bytes`, of one dtype and device each; a larger parameter has one of its own."""
    by_kind: dict[tuple[torch.dtype, torch.device], list[tuple[str, nn.Parameter]]] = {}
    for name, parameter in members:
        by_kind.setdefault((parameter.dtype, parameter.device), []).append((name, parameter))
    for group in by_kind.values():
        bucket: list[tuple[str, nn.Parameter]] = []
        held = 0
        for name, parameter in group:
            size = own(parameter).numel() * parameter.element_size()
            if bucket and held + size > most_bytes:
                yield bucket
                bucket, held = [], 0
            bucket.append((name, parameter))
            held += size
        yield bucket


def _require_plain(name: str, gradient: Tensor, parameter: nn.Parameter) -> None:
    if gradient.layout != torch.strided or gradient.dtype != parameter.dtype:
        kind = f"{gradient.dtype} {gradient.layout}".replace("torch.", "")
        raise PassError(
            "average_gradients",
            f"the gradient of {name} is {kind}, the parameter {parameter.dtype}".replace("torch.", ""),
            hint="gradients are averaged that are dense and of their parameter's dtype: make an embedding with "
            "sparse=False",
        )


def own(tensor: Tensor) -> Tensor:
    """This process's part of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
