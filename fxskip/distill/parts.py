"""A causal LM as its decoder and its head, so that a loss can have the hidden states and never the logits."""

# B windows, L length, D width, V vocabulary

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from fxskip.capture.hf import decoder_layers
from fxskip.distill.data import Batch
from fxskip.errors import FxskipError


@dataclass(frozen=True)
class Parts:
    """`logits = last_hidden_state @ weight^T + bias` of `model`, checked by `split`.

    `probe` holds a few numbers of the hidden state that a fixed input leads to. They tell two wirings of the
    same weights apart, which no name, shape or weight does.
    """

    name: str
    model: PreTrainedModel
    decoder: nn.Module
    layers: nn.ModuleList
    head: nn.Module
    probe: tuple[float, ...] = ()

    @property
    def weight_VD(self) -> Tensor:
        weight: Any = self.head.weight
        assert isinstance(weight, Tensor)
        return weight

    @property
    def bias_V(self) -> Tensor | None:
        bias: Any = getattr(self.head, "bias", None)
        assert bias is None or isinstance(bias, Tensor)
        return bias

    @property
    def vocabulary(self) -> int:
        return self.weight_VD.shape[0]

    @property
    def device(self) -> torch.device:
        return self.weight_VD.device

    def hidden(self, batch: Batch) -> Tensor:
        """[B, L, D] after the final norm."""
        output = self.decoder(
            input_ids=batch.input_ids_BL,
            attention_mask=batch.attention_mask_BL,
            use_cache=False,
            return_dict=True,
        )
        hidden_BLD: Tensor = output.last_hidden_state
        return hidden_BLD


def split(who: str, name: str, model: Any) -> Parts:
    """Find decoder, layers and head of `model`, and prove on a few tokens that they make up its logits.

    A model that scales or caps its logits between head and output (Cohere, Granite, Gemma) would otherwise be
    trained towards the wrong distribution without any sign of it.
    """
    if not isinstance(model, PreTrainedModel):
        raise TypeError(
            f"{who}: {name} is a {type(model).__name__}; it must be a causal LM of transformers "
            "(a PreTrainedModel)"
        )
    head = model.get_output_embeddings()
    if not isinstance(getattr(head, "weight", None), Tensor):
        raise FxskipError(
            who,
            f"{name} has no output embedding with a weight",
            where=type(model).__name__,
            hint="give a model with a language-model head, such as AutoModelForCausalLM loads",
        )
    decoder = model.get_decoder()
    parts = Parts(name, model, decoder, decoder_layers(model)[1], head)
    return replace(parts, probe=probe_plain_head(who, parts))


def probe_plain_head(who: str, parts: Parts) -> tuple[float, ...]:
    """Refuse a model whose logits are not head(hidden); else the numbers for `Parts.probe`."""
    softcap = getattr(parts.model.config.get_text_config(), "final_logit_softcapping", None)
    if softcap is not None:
        # Near 0 the cap is the identity, so the comparison below need not see it.
        raise not_plain(who, parts, f"caps its logits (final_logit_softcapping={softcap})")
    ids_BL = torch.arange(8, device=parts.device).remainder(parts.vocabulary)[None]
    batch = Batch(ids_BL, None, ids_BL, ids_BL.numel())
    with torch.no_grad(), in_eval_mode(parts.model):
        logits = parts.model(input_ids=batch.input_ids_BL, use_cache=False).logits
        hidden_BLD = parts.hidden(batch)
        rebuilt = nn.functional.linear(hidden_BLD, parts.weight_VD, parts.bias_V)
    if logits.shape != rebuilt.shape:
        raise not_plain(who, parts, f"gives logits {list(logits.shape)}, its head {list(rebuilt.shape)}")
    difference, largest = float((logits - rebuilt).abs().max()), float(logits.abs().max())
    if not math.isfinite(largest):
        raise FxskipError(
            who,
            f"{parts.name} gives logits that are not finite",
            where=type(parts.model).__name__,
            hint="its weights hold NaN or infinity; fxskip doctor DIR --values says where",
        )
    if not difference <= 0.01 * largest:
        raise not_plain(
            who, parts, f"gives logits that differ from head(hidden) by {difference:.3g} of {largest:.3g}"
        )
    return tuple(hidden_BLD[0, -1, :8].float().tolist())


def not_plain(who: str, parts: Parts, found: str) -> FxskipError:
    return FxskipError(
        who,
        f"{parts.name} {found}",
        where=f"{type(parts.model).__name__}.{type(parts.head).__name__}",
        hint="models whose logits are scaled, capped or changed after the head are not supported yet",
    )


@contextmanager
def in_eval_mode(*models: nn.Module) -> Iterator[None]:
    with modes_restored(*models):
        for model in models:
            model.eval()
        yield


@contextmanager
def modes_restored(*models: nn.Module) -> Iterator[None]:
    """Give every module its train/eval flag back. Module by module: users freeze parts with eval()."""
    modes = [(module, module.training) for model in models for module in model.modules()]
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode
