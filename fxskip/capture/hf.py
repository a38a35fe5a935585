"""The decoder layers of a Hugging Face causal language model, each as a graph, without computing anything.

The model is copied in structure only, with its parameters on the meta device. One forward of that twin
captures each kind of layer once, whatever the model's size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, fx, nn
from transformers import PreTrainedModel

from fxskip.capture.region import compile_region, first_line
from fxskip.capture.sharding import copy_without_sharding, own_class
from fxskip.errors import CaptureError
from fxskip.ir import remove_markers

BATCH, LENGTH = 2, 8
"""Sizes of the twin's input: any but 0 and 1, which Dynamo would treat as constants."""


@dataclass(frozen=True)
class LayerCapture:
    """One decoder layer: its path in the model and its captured graph, shared by all layers of its kind."""

    path: str
    graph: fx.Graph


def decoder_layers(model: nn.Module) -> tuple[str, nn.ModuleList]:
    """The path and the list of the decoder layers.

    Raises CaptureError for what is not a causal language model of transformers.
    """
    if not isinstance(model, PreTrainedModel) or model.get_output_embeddings() is None:
        raise CaptureError(
            "decoder_layers",
            f"{type(model).__name__} is no causal language model of transformers",
            hint="pass a model made by AutoModelForCausalLM; other modules are not supported by this version",
        )
    expected = model.config.get_text_config().num_hidden_layers
    lists = [(path, m) for path, m in model.named_modules() if isinstance(m, nn.ModuleList)]
    for path, module in lists:
        inside_a_list = any(path.startswith(f"{outer}.") for outer, _ in lists)
        if len(module) == expected and not inside_a_list:
            return path, module
    raise CaptureError(
        "decoder_layers",
        f"{type(model).__name__} holds no list of {expected} decoder layers",
        where="lists of modules: " + (", ".join(f"{path} ({len(m)})" for path, m in lists) or "none"),
        hint="this architecture is not supported",
    )


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


def meta_twin(model: PreTrainedModel) -> PreTrainedModel:
    """A copy of the model's structure with all tensors on the meta device; allocates no memory for them."""
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        memo[id(parameter)] = nn.Parameter(_meta_like(parameter), parameter.requires_grad)
    for buffer in model.buffers():
        memo[id(buffer)] = _meta_like(buffer)
    return cast(PreTrainedModel, copy_without_sharding(model, memo))


def _meta_like(tensor: Tensor) -> Tensor:
    """An empty tensor of the same shape, a sharded one's whole, and dtype on the meta device."""
    if type(tensor) in (Tensor, nn.Parameter):
        return torch.empty_like(tensor, device="meta")
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


def capture_layers(model: PreTrainedModel) -> list[LayerCapture]:
    """Capture every decoder layer of `model`, in the order in which they run. `model` is left alone.

    Raises CaptureError where a layer cannot be captured as one graph, or where the model does something
    to the stream between two layers.
    """
    path, originals = decoder_layers(model)
    for index, layer in enumerate(originals):
        require_own_class_forward(layer, index)
    twin = meta_twin(model).eval()
    # The native grouped matrix product has a meta kernel for bfloat16 only; the structure does not depend on it.
    twin.to(torch.bfloat16)
    recorder = _Recorder()
    _, layers = decoder_layers(twin)
    for index, layer in enumerate(layers):
        recorder.watch(layer, index, f"{type(model).__name__}, {path}.{index}")
    ids = torch.zeros(BATCH, LENGTH, dtype=torch.long, device="meta")
    # A finished mask keeps the model from looking at mask values, which a meta tensor does not have.
    mask = torch.zeros(BATCH, 1, LENGTH, LENGTH, dtype=torch.bfloat16, device="meta")
    try:
        with torch.no_grad():  # the decoder alone: losses look at values
            twin.get_decoder()(input_ids=ids, attention_mask=mask, use_cache=False)
    except (RuntimeError, NotImplementedError, TypeError, ValueError) as error:
        raise CaptureError(
            "capture_layers",
            f"the model's code around the decoder layers does not run without values: {first_line(str(error))}",
            where=type(model).__name__,
            hint="this architecture, or its configuration (quantisation, attention implementation), is not supported",
        ) from error
    if recorder.order != list(range(len(layers))):
        raise CaptureError(
            "capture_layers",
            f"the decoder layers ran in the order {recorder.order}, and there are {len(layers)}",
            where=path,
            hint="only models that run each decoder layer once, one after the other, are supported",
        )
    return [LayerCapture(f"{path}.{i}", graph) for i, graph in enumerate(recorder.graphs)]


class _Recorder:
    """Notes which graph runs in each layer, and that the layers form one chain."""

    def __init__(self) -> None:
        self.graphs: list[fx.Graph] = []
        self.order: list[int] = []
        self._output: Tensor | None = None
        self._region = compile_region(self._build, n_outputs=1, name="observed")

    def _build(self, module: fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        stock = fx.GraphModule(module, remove_markers(module.graph)).forward

        def run(*args: Any) -> Any:
            self.graphs.append(module.graph)
            return stock(*args)

        return run

    def watch(self, layer: nn.Module, index: int, place: str) -> None:
        """Make the twin's layer number `index` run through the recorder; `place` names it in errors."""
        base = layer_class(layer)

        def forward(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
            self.order.append(index)
            if self._output is not None and hidden_states is not self._output:
                raise CaptureError(
                    "capture_layers",
                    f"the input of decoder layer {index} is not the output of the layer that ran before it",
                    hint="models that change the stream between decoder layers are not supported",
                )
            try:
                out, _ = self._region(layer, base, (hidden_states,), args, kwargs)
            except CaptureError as error:
                raise error.within(place) from error.__cause__
            self._output = out[0] if isinstance(out, tuple) else out
            return out

        layer.__class__ = base
        layer.forward = forward
