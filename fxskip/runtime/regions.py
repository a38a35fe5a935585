"""Rewired decoder layers: a layer's class is swapped for a subclass that takes and returns the streams.

The swap keeps the module, its parameters and its place in the model, so hooks, optimizers, DDP, FSDP2,
deepcopy and state_dict see nothing new. No function is stored on the layer; the wiring is plain data.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from types import FrameType
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, fx, nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import _StopRecomputationError

from fxskip.backward.explicit_region import explicit_region, has_flights, is_explicit
from fxskip.capture.region import CompiledRegion, Streams, compile_region
from fxskip.capture.twin import layer_class, require_own_class_forward
from fxskip.collectives.border import Pending, Tail, at_border
from fxskip.collectives.failures import begin_pass, tell
from fxskip.collectives.landing import backward_pass, drain
from fxskip.collectives.measuring import sends_nothing
from fxskip.errors import CaptureError, CollectiveError, PassError
from fxskip.leaves import make_leaf, running
from fxskip.parallel import TENSOR, LayerMesh, RegionParallel
from fxskip.pipeline import parallelise, rewire
from fxskip.runtime.gradients_in_backward import GradientsInBackward
from fxskip.runtime.layer_cache import layer_caches, on_device, uses_one_part
from fxskip.runtime.lowering import lowered
from fxskip.runtime.measured_costs import warn_of_other_tokens
from fxskip.runtime.observed import Observed
from fxskip.runtime.recompute import recomputed, recomputes, reentrant_refusal
from fxskip.runtime.same_everywhere import require_same_tokens
from fxskip.runtime.watched import arguments_are_watched, result_is_watched
from fxskip.schedule.order_region import schedules_of
from fxskip.sharding import set_own_class
from fxskip.spec import Runtime
from fxskip.swapped import Swapped, swapped_class
from fxskip.transport import TransportChoice
from fxskip.wiring import RegionWiring

Method = TypeVar("Method", bound=Callable[..., Any])


def _not_compiled_by_others(method: Method) -> Method:
    """A graph break inside somebody else's torch.compile: Dynamo would follow the call into the original body.

    What lies around the layers is compiled, the regions run as they are; fullgraph=True fails.
    """
    disabled = torch.compiler.disable(method, reason="fxskip captures its layers itself")
    return cast(Method, disabled)


class Region(Swapped):
    """Mixin of every rewired decoder layer. Streams between layers are [B, S, D] tensors of one dtype.

    A layer that is wired to one stream takes and returns a tensor like the original; with more, a tuple
    of tensors, the full stream first.
    """

    fxskip_wiring: RegionWiring
    fxskip_layer: int
    fxskip_one_part: bool
    fxskip_recompute: str
    fxskip_lower: str
    fxskip_parallel: RegionParallel | None = None
    fxskip_mesh: LayerMesh
    fxskip_transport: TransportChoice
    """What `fxskip_parallel.transport` was before anybody changed it, and why."""
    fxskip_gradients: GradientsInBackward | None = None
    fxskip_compared: bool = False
    """Whether ranks with the same tokens have been seen to have them."""
    fxskip_tokens: int = 0
    """Of the first layer: of this rank in the last forward pass."""
    fxskip_costs_fit: bool = False
    """Whether the number of tokens of a training pass has been held against that of measured costs."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Of a copy. torch copies parameters without their gradients, but DTensors with them: a copy would add its
        first gradients of experts to those of the original, and of nothing else."""
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        for parameter in self.parameters():
            if isinstance(parameter, DTensor):
                parameter.grad = None

    @_not_compiled_by_others
    def __call__(self, hidden_states: Tensor | Streams, *args: Any, **kwargs: Any) -> Any:
        """Call the layer, with the hooks on it. Hooks on what it is called with find finished streams."""
        if self.fxskip_parallel is None:
            return super().__call__(hidden_states, *args, **kwargs)
        try:
            if self.fxskip_layer == 0 and backward_pass() == -1:
                begin_pass()
                self._count_tokens(hidden_states)
                self._compare_tokens(hidden_states)
                if self.fxskip_gradients is not None and torch.is_grad_enabled():
                    self.fxskip_gradients.prepare(self.fxskip_parallel)
                    self.fxskip_gradients.begin_to_agree()
            if self.fxskip_gradients is not None:
                self.fxskip_gradients.agree_before(self.fxskip_layer)
            return super().__call__(_entering(self, hidden_states), *args, **kwargs)
        except _StopRecomputationError:  # how torch's checkpoint ends a second run that has gone far enough
            drain()
            raise
        except BaseException as error:
            self._leave_nothing_in_flight(error)
            raise

    @_not_compiled_by_others
    def forward(self, hidden_states: Tensor | Streams, *args: Any, **kwargs: Any) -> Any:
        """Run the layer's original body, rewired. Arguments and result are the original layer's."""
        _refuse_reentrant_checkpointing(self.fxskip_wiring, self)
        streams, arrived = _incoming(self, hidden_states)
        try:
            if recomputes(self, self.fxskip_recompute):
                out, others = recomputed(self.fxskip_recompute, self._run, streams, arrived, *args, **kwargs)
            else:
                out, others = self._run(streams, arrived, *args, **kwargs)
        except (CaptureError, PassError, CollectiveError) as error:
            raise error.within(f"decoder layer {self.fxskip_layer}") from error.__cause__
        if not others:
            return out
        if isinstance(out, tuple):
            return ((out[0], *others), *out[1:])
        return (out, *others)

    @_not_compiled_by_others
    def _run(self, streams: Streams, arrived: Pending | None, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """What the layer returns, and what crosses its border beside the full stream."""
        parallel = self.fxskip_parallel
        if parallel is not None and parallel.defers and result_is_watched(self):
            parallel = replace(parallel, defers=False)
        arriving = arrived.tail if arrived is not None else None
        region = _compiled(self.fxskip_wiring, self.fxskip_lower, parallel, arriving)
        alone = kwargs if self.fxskip_one_part else {}
        own = kwargs | layer_caches(alone, self.fxskip_layer)
        with (
            running(self),
            on_device(alone, self.fxskip_layer, streams[0].device),
            at_border(arrived) as border,
        ):
            out, others = region(self, self.fxskip_base, streams, args, own)
        if border.left is None:
            return out, others
        return out, (*others, *border.left.watched(), border.left)

    def _compare_tokens(self, hidden_states: Tensor | Streams) -> None:
        """In the first pass, between ranks that must have the same tokens."""
        parallel = self.fxskip_parallel
        if parallel is None or self.fxskip_compared or sends_nothing():
            return
        axes = [TENSOR] if parallel.tensor_size > 1 else []
        axes += [parallel.expert_axis] if parallel.ranks > 1 and parallel.exchange == "all_reduce" else []
        require_same_tokens(_full_stream(hidden_states), self.fxskip_mesh.mesh, axes)
        self.fxskip_compared = True

    def _count_tokens(self, hidden_states: Tensor | Streams) -> None:
        self.fxskip_tokens = _full_stream(hidden_states).shape[:-1].numel()
        if self.fxskip_parallel is not None and torch.is_grad_enabled() and not self.fxskip_costs_fit:
            self.fxskip_costs_fit = True
            warn_of_other_tokens(self.fxskip_tokens, self.fxskip_parallel)

    def _leave_nothing_in_flight(self, error: BaseException) -> None:
        """After an error: tell the other ranks, and wait for what is under way."""
        place = f"decoder layer {self.fxskip_layer}"
        tell(error, place)
        if landed := drain():
            error.add_note(f"fxskip: {place}: waited for what was in flight: {', '.join(landed)}")


def install(
    layers: Mapping[str, nn.Module],
    wirings: Sequence[RegionWiring],
    leaves: Iterable[str] = (),
    runtime: Runtime | None = None,
) -> None:
    """Turn each layer, by its path, in place into a region with its wiring, and the modules at `leaves` into leaves.

    `runtime` says how the regions run.
    """
    runtime = runtime or Runtime()
    for index, ((path, layer), wiring) in enumerate(zip(layers.items(), wirings, strict=True)):
        require_own_class_forward(layer, index)
        for inner in leaves:
            if inner.startswith(f"{path}."):
                make_leaf(layer, inner.removeprefix(f"{path}."))
        set_own_class(layer, swapped_class(Region, layer_class(layer)))
        layer.fxskip_wiring = wiring  # type: ignore[assignment]
        layer.fxskip_layer = index  # type: ignore[assignment]
        layer.fxskip_one_part = uses_one_part(layer, index)  # type: ignore[assignment]
        layer.fxskip_recompute = runtime.recompute  # type: ignore[assignment]
        layer.fxskip_lower = runtime.lower  # type: ignore[assignment]


@cache
def _compiled(
    wiring: RegionWiring, lower: str, parallel: RegionParallel | None, arriving: Tail | None
) -> CompiledRegion:
    """The region function of a wiring: all layers of all models that run alike share its captures."""
    name = region_name(wiring, lower, parallel, arriving)
    return compile_region(partial(_build, wiring, lower, parallel, arriving), len(wiring.outputs), name)


def region_name(
    wiring: RegionWiring, lower: str, parallel: RegionParallel | None, arriving: Tail | None
) -> str:
    """A name that regions have in common if, and only if, they run alike."""
    name = f"{wiring.digest()}_{lower}"
    if parallel is None:
        return name
    kind = f"{parallel} {arriving.digest if arriving else None}"
    return f"{name}_{hashlib.sha256(kind.encode()).hexdigest()[:16]}"


def _build(
    wiring: RegionWiring,
    lower: str,
    parallel: RegionParallel | None,
    arriving: Tail | None,
    module: fx.GraphModule,
    example_inputs: list[Any],
) -> Any:
    schedule = None
    if parallel is None:
        graph = rewire(module.graph, wiring, eager=lower == "none")
    else:
        name = region_name(wiring, lower, parallel, arriving)
        graph = parallelise(module.graph, wiring, parallel, arriving, name)
        schedule = next(reversed(schedules_of(name)), None)
    rewired = fx.GraphModule(module, graph)
    run = lowered(lower, rewired, example_inputs)
    if lower != "none":
        return run
    plain = Observed(rewired, run, schedule)
    if parallel is None or schedule is None or not is_explicit(parallel):
        return plain
    if not torch.is_grad_enabled() or not has_flights(graph):
        return plain
    return explicit_region(module, graph, schedule, parallel, plain)


def _full_stream(hidden_states: Tensor | Streams) -> Tensor:
    return hidden_states[0] if isinstance(hidden_states, tuple) else hidden_states


def _entering(layer: Region, hidden_states: Any) -> Any:
    """What the layer is called with: what is pending beside the streams, or finished where a hook looks at it."""
    if not isinstance(hidden_states, tuple) or not isinstance(hidden_states[-1], Pending):
        return hidden_states
    pending, streams = hidden_states[-1], hidden_states[: len(layer.fxskip_wiring.inputs)]
    return pending.finish(streams) if arguments_are_watched(layer) else (*streams, pending)


def _incoming(layer: Region, hidden_states: Any) -> tuple[Streams, Pending | None]:
    """The streams that arrive, and what is still pending of them."""
    arrived = hidden_states if isinstance(hidden_states, tuple) else (hidden_states,)
    wanted = len(layer.fxskip_wiring.inputs)
    pending = arrived[-1] if isinstance(arrived[-1], Pending) else None
    if pending is not None:  # whoever calls `forward` itself has not taken the watched values off
        arrived = arrived[:wanted]
    if len(arrived) != wanted:
        raise CaptureError(
            f"layer {layer.fxskip_layer}",
            f"{len(arrived)} streams arrive where the wiring needs {wanted}",
            where=type(layer).__name__,
            hint="call the model, not single layers; layers must not be removed or reordered after the transform",
        )
    return arrived, pending


def _refuse_reentrant_checkpointing(wiring: RegionWiring, layer: nn.Module) -> None:
    """Reentrant checkpointing sees no tensors inside a tuple, so it would lose the gradient of the stream."""
    if torch.is_grad_enabled() or len(wiring.inputs) == len(wiring.outputs) == 1:
        return
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        # torch, DeepSpeed and Megatron call it so; it runs the layer without gradients, inside an autograd function.
        if frame.f_code.co_qualname == "CheckpointFunction.forward":
            raise reentrant_refusal(layer)
        frame = frame.f_back
