"""The graphs of a model's decoder layers, from one forward of a copy that has no memory and computes nothing.

The model is copied in structure only, with its tensors on the meta device. Each kind of layer is captured
once, whatever the model's size; the captured graphs are not run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, fx, nn

from fxskip.capture.region import compile_region, failed_module, is_data_dependent
from fxskip.errors import CaptureError
from fxskip.leaves import (
    Leaf,
    declared_leaves,
    holds_experts,
    leaf_paths,
    make_leaf,
    paths_of_class,
    running,
)
from fxskip.sharding import copy_without_sharding, own_class

Model = TypeVar("Model", bound=nn.Module)


@dataclass(frozen=True)
class LayerCapture:
    """One decoder layer: its path in the model and its captured graph, shared by all layers of its kind."""

    path: str
    graph: fx.Graph
    leaves: tuple[str, ...]
    """Paths, in the layer, of the modules that run as they are."""
    result: Any
    """What the layer returned to the twin, tensors without values."""


def layer_class(layer: nn.Module) -> type[nn.Module]:
    """The class whose forward is the layer's original body, also where the layer has been transformed."""
    found: type[nn.Module] = getattr(type(layer), "fxskip_base", own_class(layer))
    return found


def require_own_class_forward(layer: nn.Module, index: int) -> None:
    """Refuse a layer whose instance carries a `forward`: it would go on running the original body."""
    if "forward" not in vars(layer):
        return
    raise CaptureError(
        f"layer {index}",
        "the layer has a forward of its own, set on the instance",
        where=f"{type(layer).__name__}.forward = {vars(layer)['forward']!r}"[:200],
        hint="transform the model before anything wraps its layers (accelerate's dispatch or device_map, "
        "monkey patches); accelerate.hooks.remove_hook_from_module(model, recurse=True) takes its wrappers off",
    )


def meta_twin(model: Model) -> Model:
    """A copy of the model's structure with all tensors on the meta device; allocates no memory for them."""
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        memo[id(parameter)] = nn.Parameter(_meta_like(parameter), parameter.requires_grad)
    for module in model.modules():
        for held in (*module.buffers(recurse=False), *vars(module).values()):
            if isinstance(held, Tensor):
                memo.setdefault(id(held), _meta_like(held))
    return cast(Model, copy_without_sharding(model, memo))


def _meta_like(tensor: Tensor) -> Tensor:
    """An empty tensor of the same shape, a sharded one's whole, and dtype on the meta device."""
    if type(tensor) in (Tensor, nn.Parameter):
        return torch.empty_like(tensor, device="meta")
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


def capture_chain(
    layers: Mapping[str, nn.Module], run: Callable[[], Any], *, model: str
) -> list[LayerCapture]:
    """Capture the layers of a twin, by path and in their order, while `run` calls the twin.

    Modules that Dynamo cannot follow become leaves of the twin's layers.

    Raises CaptureError where a layer cannot be captured as one graph, and where the layers are no chain: not
    each called once, in this order, with the output of the one before.
    """
    recorder = _Recorder()
    for index, (path, layer) in enumerate(layers.items()):
        recorder.watch(layer, index, f"{model}, {path}")
    run()
    if recorder.order != list(range(len(layers))):
        raise CaptureError(
            "capture_layers",
            f"the decoder layers ran in the order {recorder.order}, and there are {len(layers)}",
            where=next(iter(layers)).rpartition(".")[0],
            hint="only models that run each decoder layer once, one after the other, are supported",
        )
    return [
        LayerCapture(path, graph, leaf_paths(layer), result)
        for (path, layer), graph, result in zip(
            layers.items(), recorder.graphs, recorder.results, strict=True
        )
    ]


class _Recorder:
    """Notes which graph runs in each layer, and that the layers form one chain."""

    def __init__(self) -> None:
        self.graphs: list[fx.Graph] = []
        self.results: list[Any] = []
        self.order: list[int] = []
        self._output: Tensor | None = None
        self._layers: list[nn.Module] = []
        self._region = compile_region(self._build, n_outputs=1, name="observed")

    def _build(self, module: fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            self.graphs.append(module.graph)
            return _empty_results(module.graph, args)

        return run

    def watch(self, layer: nn.Module, index: int, place: str) -> None:
        """Make the twin's layer number `index` run through the recorder; `place` names it in errors."""
        base = layer_class(layer)
        self._layers.append(layer)
        for path in declared_leaves(layer):
            make_leaf(layer, path)

        def forward(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
            self.order.append(index)
            if self._output is not None and hidden_states is not self._output:
                raise CaptureError(
                    "capture_layers",
                    f"the input of decoder layer {index} is not the output of the layer that ran before it",
                    hint="models that change the stream between decoder layers are not supported",
                )
            try:
                out = self._call(layer, base, hidden_states, args, kwargs)
            except CaptureError as error:
                raise error.within(place) from error.__cause__
            self.results.append(out)
            self._output = out[0] if isinstance(out, tuple) else out
            return out

        layer.__class__ = base
        layer.forward = forward

    def _call(self, layer: nn.Module, base: type[nn.Module], stream: Tensor, args: Any, kwargs: Any) -> Any:
        """Run the layer through the region; again after each module that Dynamo stumbles over became a leaf."""
        while True:
            try:
                with running(layer):
                    return self._region(layer, base, (stream,), args, kwargs)[0]
            except CaptureError as error:
                kind = _leaf_class_after(layer, error)
                if kind is None:
                    raise
            for other in self._layers[len(self.order) - 1 :]:
                for path in paths_of_class(other, kind):
                    make_leaf(other, path)


def _leaf_class_after(layer: nn.Module, error: CaptureError) -> type[nn.Module] | None:
    """The class of the innermost module that Dynamo could not follow; None where a leaf would not help."""
    failed = failed_module(layer, error.__cause__)
    if failed is None or isinstance(failed, Leaf):
        return None
    return type(failed) if is_data_dependent(error.__cause__) or holds_experts(failed) else None


def _empty_results(graph: fx.Graph, inputs: tuple[Any, ...]) -> Any:
    """What the graph returns, as tensors without values: code that needs values would not run on a twin."""
    given = dict(zip((n for n in graph.nodes if n.op == "placeholder"), inputs, strict=True))
    output = next(n for n in graph.nodes if n.op == "output")
    return fx.map_arg(output.args[0], lambda n: given[n] if n in given else _empty(n))


def _empty(node: fx.Node) -> Any:
    value = node.meta["example_value"]
    if not isinstance(value, Tensor):
        return _hint(value)
    return torch.empty([_hint(size) for size in value.shape], dtype=value.dtype, device="meta")


def _hint(value: Any) -> Any:
    return value.node.hint if isinstance(value, torch.SymInt) else value
