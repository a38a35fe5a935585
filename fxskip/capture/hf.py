"""The decoder layers of a Hugging Face causal language model, each as a graph, without computing anything."""

from __future__ import annotations

import torch
from torch import nn
from transformers import PreTrainedModel

from fxskip.capture.twin import LayerCapture, capture_chain, meta_twin, require_own_class_forward
from fxskip.errors import CaptureError, first_line

BATCH, LENGTH = 2, 8
"""Sizes of the twin's input: any but 0 and 1, which Dynamo would treat as constants."""


def decoder_layers(model: nn.Module) -> tuple[str, nn.ModuleList]:
    """The path and the list of the decoder layers; those of the text model where images or sounds are read too.

    Raises CaptureError for what is no decoder-only language model of transformers.
    """
    if not isinstance(model, PreTrainedModel) or model.get_output_embeddings() is None:
        raise CaptureError(
            "decoder_layers",
            f"{type(model).__name__} is no causal language model of transformers",
            hint="pass a model made by AutoModelForCausalLM or AutoModelForImageTextToText",
        )
    if model.config.is_encoder_decoder:
        raise CaptureError(
            "decoder_layers",
            f"{type(model).__name__} has an encoder and a decoder",
            hint="only decoder-only language models are supported: rules count the writes of one stream",
        )
    decoder = model.get_decoder()
    prefix = next(path for path, module in model.named_modules() if module is decoder)
    lists = [(path, m) for path, m in decoder.named_modules() if isinstance(m, nn.ModuleList) and len(m)]
    outermost = [
        (path, m) for path, m in lists if not any(path.startswith(f"{outer}.") for outer, _ in lists)
    ]
    if not outermost:
        raise CaptureError(
            "decoder_layers",
            f"{type(decoder).__name__} holds no list of decoder layers",
            where=type(model).__name__,
            hint="this architecture is not supported",
        )
    # Beside its layers a decoder may keep small lists (norms, gates); capture checks that the layers form a chain.
    path, layers = max(outermost, key=lambda found: sum(p.numel() for p in found[1].parameters()))
    return ".".join(filter(None, (prefix, path))), layers


def layers_by_path(model: nn.Module) -> dict[str, nn.Module]:
    """The decoder layers by their paths, in order. Raises what `decoder_layers` raises."""
    path, layers = decoder_layers(model)
    return {f"{path}.{index}": layer for index, layer in enumerate(layers)}


def capture_layers(model: PreTrainedModel) -> list[LayerCapture]:
    """Capture every decoder layer of `model`, in the order in which they run. `model` is left alone.

    Raises CaptureError where a layer cannot be captured as one graph, or where the model does something
    to the stream between two layers.
    """
    for index, layer in enumerate(layers_by_path(model).values()):
        require_own_class_forward(layer, index)
    twin = meta_twin(model).eval()
    # The native grouped matrix product has a meta kernel for bfloat16 only; the structure does not depend on it.
    twin.to(torch.bfloat16)
    return capture_chain(layers_by_path(twin), lambda: _call(twin), model=type(model).__name__)


def _call(twin: PreTrainedModel) -> None:
    ids = torch.zeros(BATCH, LENGTH, dtype=torch.long, device="meta")
    # A finished mask keeps the model from looking at mask values, which a meta tensor does not have.
    mask = torch.zeros(BATCH, 1, LENGTH, LENGTH, dtype=torch.bfloat16, device="meta")
    try:
        with torch.no_grad():  # the decoder alone: losses look at values
            twin.get_decoder()(input_ids=ids, attention_mask=mask, use_cache=False)
    except (RuntimeError, NotImplementedError, TypeError, ValueError) as error:
        raise CaptureError(
            "capture_layers",
            f"the model's code around the decoder layers does not run without values: {first_line(error)}",
            where=type(twin).__name__,
            hint="this architecture, or its configuration (quantisation, attention implementation), is not supported",
        ) from error
