"""The models of `models.py` rewired by hand, from their own parts: what a rewired model must compute, bit for bit."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tests.plain import models
from tests.plain.models import D

Addends = tuple[Tensor, Tensor]
"""What a MoE writes, and what of it is not routed."""


@dataclass(frozen=True)
class Reads:
    """What the blocks of a layer read: the full stream, or the stream without the write before (or its routed part)."""

    attention: str = "full"
    moe: str = "full"


IDENTITY = Reads()
WIRINGS = {
    "identity": IDENTITY,
    "farskip": Reads(attention="unrouted", moe="before"),
    "farskip-attention": Reads(attention="unrouted"),
    "farskip-moe": Reads(moe="before"),
    "ladder": Reads(attention="before", moe="before"),
}
"""By the names of the presets."""


def moe(module: nn.Module, x: Tensor) -> Addends:
    """Run a MoE on [batch, length, D]."""
    if isinstance(module, models.TitanMoE):
        rows = x.view(-1, D)
        outputs, where = module.routed(rows)
        shared = module.shared_experts(rows)
        return shared.scatter_add(0, where, outputs).view(x.shape), shared.view(x.shape)
    if isinstance(module, models.EinsumMoE):
        shared = module.shared(x)
        return shared + module.routed(x), shared
    assert isinstance(module, models.MoE)
    rows = x.view(-1, D)
    weights, chosen = module.router(rows)
    if isinstance(module, models.IntoSharedMoE):
        full = shared = module.shared(rows)
        for number, expert in enumerate(module.experts):
            token, slot = torch.where(chosen == number)
            full = full.index_add(0, token, expert(rows[token]) * weights[token, slot, None])
        return full.view(x.shape), shared.view(x.shape)
    routed = module.routed(rows, weights, chosen)
    shared = module.shared(rows)
    return (routed + shared).view(x.shape), shared.view(x.shape)


def rewired(model: nn.Module, ids: Tensor, reads: Reads) -> Tensor:
    """The logits of `model` under a wiring."""
    if isinstance(model, models.Transformer):
        x = stream(
            model.tok_embeddings(ids), [titan_layer(b, model.rope) for b in model.layers.values()], reads
        )
        return model.output(model.norm(x))
    assert isinstance(model, models.Model)
    return model.head(model.norm(stream(model.embed(ids), [layer(b) for b in model.layers], reads)))


Block = Callable[[Tensor], Tensor]
Layer = tuple[Block, Callable[[Tensor], Addends]]


def layer(block: nn.Module) -> Layer:
    return lambda x: block.attn(block.attn_norm(x)), lambda x: moe(block.moe, block.ffn_norm(x))


def titan_layer(block: nn.Module, rope: Tensor) -> Layer:
    def feed_forward(x: Tensor) -> Addends:
        if block.moe_enabled:
            return moe(block.moe, block.ffn_norm(x))
        dense = block.feed_forward(block.ffn_norm(x))
        return dense, dense  # nothing of it is routed

    return lambda x: block.attention(block.attention_norm(x), rope), feed_forward


def stream(x: Tensor, layers: list[Layer], reads: Reads) -> Tensor:
    """x full, `unrouted` without the last routed addend, `before` without the last write."""
    unrouted = before = x
    for attention, experts in layers:
        seen = {"full": x, "unrouted": unrouted, "before": before}
        r = x + attention(seen[reads.attention])
        full, rest = experts({"full": r, "before": x}[reads.moe])
        x, before = r + full, r
        unrouted = x if rest is full else r + rest
    return x
