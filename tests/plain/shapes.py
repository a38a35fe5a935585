"""Models around the same blocks that differ in how they keep and call their layers."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.plain.models import VOCAB, Block, D, IndexAddMoE, Model


class NanoStyle(nn.Module):
    """Everything in one ModuleDict, positions made without a device, several results."""

    def __init__(self) -> None:
        super().__init__()
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(VOCAB, D),
                "wpe": nn.Embedding(64, D),
                "h": nn.ModuleList([Block(IndexAddMoE()) for _ in range(2)]),
                "ln_f": nn.LayerNorm(D),
            }
        )
        self.lm_head = nn.Linear(D, VOCAB, bias=False)

    def forward(self, ids: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        parts = self.transformer
        x = parts["wte"](ids) + parts["wpe"](torch.arange(ids.shape[1]))
        for block in parts["h"]:
            x = block(x)
        logits = self.lm_head(parts["ln_f"](x))
        if targets is None:
            return logits, None
        return logits, nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


class InSequence(nn.Module):
    """The layers, and all around them, are one Sequential in another."""

    def __init__(self) -> None:
        super().__init__()
        blocks = nn.Sequential(*(Block(IndexAddMoE()) for _ in range(2)))
        self.model = nn.Sequential(nn.Embedding(VOCAB, D), blocks, nn.LayerNorm(D), nn.Linear(D, VOCAB))

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.model(ids)
        return out


class MaskedBlock(Block):
    """Takes a mask by name and returns a loss beside the stream."""

    def forward(self, x: Tensor, *, mask: Tensor) -> Any:
        x = super().forward(x)
        return x, (x.square() * mask[..., None]).mean()


class TupleLayers(Model):
    def __init__(self) -> None:
        super().__init__(layers=2)
        self.layers = nn.ModuleList([MaskedBlock(IndexAddMoE()) for _ in range(2)])

    def forward(self, ids: Tensor) -> Any:
        x, mask, losses = self.embed(ids), ids > 3, []
        for layer in self.layers:
            x, loss = layer(x, mask=mask)
            losses.append(loss)
        return self.head(self.norm(x)), sum(losses)


class Collects(Model):
    """Returns the stream after each layer."""

    def forward(self, ids: Tensor) -> Any:
        states = [self.embed(ids)]
        for layer in self.layers:
            states.append(layer(states[-1]))
        return self.head(self.norm(states[-1])), states


class Drops(Model):
    """Does something to the stream between layers."""

    def forward(self, ids: Tensor) -> Any:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x).mul(0.5)
        return self.head(self.norm(x))


class ByName(Model):
    def forward(self, ids: Tensor) -> Any:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x=x)
        return self.head(self.norm(x))


class ReadsValues(Model):
    def forward(self, ids: Tensor) -> Any:
        return super().forward(ids[:, : int((ids[0] > 0).sum())])


class TwoChains(Model):
    def __init__(self) -> None:
        super().__init__(layers=2)
        self.more = nn.ModuleList([Block(IndexAddMoE()) for _ in range(2)])

    def forward(self, ids: Tensor) -> Any:
        x = self.embed(ids)
        for layer in [*self.layers, *self.more]:
            x = layer(x)
        return self.head(self.norm(x))


class CheckpointsInside(Block):
    """Recomputes its MoE by itself."""

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.attn_norm(x))
        return x + checkpoint(self.moe, self.ffn_norm(x), use_reentrant=False)
