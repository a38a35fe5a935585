"""Small Mixture-of-Experts models as people write them in plain PyTorch, each with another way to run experts.

All have the parts `embed`, `layers`, `norm` and `head`; a layer has `attn_norm`, `attn`, `ffn_norm` and `moe`.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCAB, D, HEADS, EXPERTS, TOP = 64, 32, 4, 4, 2


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(D, 3 * D, bias=False)
        self.out = nn.Linear(D, D, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, HEADS, D // HEADS).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(seen.transpose(1, 2).reshape(batch, length, D))


class Expert(nn.Module):
    def __init__(self, width: int = D) -> None:
        super().__init__()
        self.up = nn.Linear(D, width, bias=False)
        self.down = nn.Linear(width, D, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.up(x)))


class Router(nn.Module):
    """The weights [T, TOP] and the experts [T, TOP] of each token."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(D, EXPERTS, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        weights, chosen = self.gate(x).softmax(dim=-1).topk(TOP, dim=-1)
        return weights / weights.sum(dim=-1, keepdim=True), chosen


class MoE(nn.Module):
    """Routed experts and a shared one beside them; `routed` is what subclasses write in their own way."""

    def __init__(self) -> None:
        super().__init__()
        self.router = Router()
        self.experts = nn.ModuleList([Expert() for _ in range(EXPERTS)])
        self.shared = Expert()

    def routed(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        rows = x.view(-1, D)
        weights, chosen = self.router(rows)
        routed = self.routed(rows, weights, chosen)
        return (routed + self.shared(rows)).view(x.shape)


class IndexAddMoE(MoE):
    """A loop over experts: `where` finds the tokens of each, `index_add_` brings them back."""

    def routed(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            token, slot = torch.where(chosen == number)
            out.index_add_(0, token, expert(x[token]) * weights[token, slot, None])
        return out


class Block(nn.Module):
    def __init__(self, moe: nn.Module) -> None:
        super().__init__()
        self.attn_norm = nn.LayerNorm(D)
        self.attn = Attention()
        self.ffn_norm = nn.LayerNorm(D)
        self.moe = moe

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.attn_norm(x))
        return x + self.moe(self.ffn_norm(x))


class Model(nn.Module):
    """A decoder whose layers are a ModuleList."""

    def __init__(self, moe: type[nn.Module] = IndexAddMoE, layers: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, D)
        self.layers = nn.ModuleList([Block(moe()) for _ in range(layers)])
        self.norm = nn.LayerNorm(D)
        self.head = nn.Linear(D, VOCAB, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))
