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


class SkippingExperts(nn.Module):
    """A loop that leaves out experts without tokens: its course depends on values."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([Expert() for _ in range(EXPERTS)])

    def forward(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            token, slot = torch.where(chosen == number)
            if token.numel() == 0:
                continue
            out.index_add_(0, token, expert(x[token]) * weights[token, slot, None])
        return out


class SkippingMoE(MoE):
    """The loop is in a module of its own, so that it alone becomes a leaf."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = SkippingExperts()  # type: ignore[assignment]

    def routed(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        return self.experts(x, weights, chosen)


class WholeMoE(MoE):
    """The loop is in the module that also routes and has the shared expert: the leaf is all of it."""

    def routed(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            token, slot = torch.where(chosen == number)
            if token.numel() > 0:
                out[token] += expert(x[token]) * weights[token, slot, None]
        return out


class MaskedSumMoE(MoE):
    """Every expert sees every token; what it must not add is multiplied with zero."""

    def routed(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            out = out + expert(x) * (weights * (chosen == number)).sum(dim=-1, keepdim=True)
        return out


class MaskedRowsMoE(MoE):
    """A loop that writes through boolean masks."""

    def routed(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            weight = (weights * (chosen == number)).sum(dim=-1, keepdim=True)
            mine = weight[:, 0] > 0
            out[mine] = out[mine] + expert(x[mine]) * weight[mine]
        return out


class IntoSharedMoE(MoE):
    """The shared expert's output is where the loop adds the routed experts, one after the other."""

    def forward(self, x: Tensor) -> Tensor:
        rows = x.view(-1, D)
        weights, chosen = self.router(rows)
        out = self.shared(rows)
        for number, expert in enumerate(self.experts):
            token, slot = torch.where(chosen == number)
            out.index_add_(0, token, expert(rows[token]) * weights[token, slot, None])
        return out.view(x.shape)


class EinsumMoE(nn.Module):
    """One-hot dispatch and combination, experts as stacks [EXPERTS, in, out]; the router sees [batch, length, D]."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(D, EXPERTS, bias=False)
        self.up = nn.Parameter(torch.randn(EXPERTS, D, D) / D**0.5)
        self.down = nn.Parameter(torch.randn(EXPERTS, D, D) / D**0.5)
        self.shared = Expert()

    def routed(self, x: Tensor) -> Tensor:
        weights, chosen = self.gate(x).softmax(dim=-1).topk(TOP, dim=-1)
        dispatch = F.one_hot(chosen, EXPERTS).to(x.dtype)  # [B, S, TOP, EXPERTS]
        combine = torch.einsum("bske,bsk->bse", dispatch, weights)
        inputs = torch.einsum("bsd,bse->ebsd", x, dispatch.sum(dim=2))
        hidden = F.silu(torch.einsum("ebsd,edf->ebsf", inputs, self.up))
        return torch.einsum("ebsf,efd,bse->bsd", hidden, self.down, combine)

    def forward(self, x: Tensor) -> Tensor:
        return self.shared(x) + self.routed(x)


# --- in the style of torchtitan -------------------------------------------------------------------


@dataclass
class Args:
    dim: int = D
    n_layers: int = 3
    n_heads: int = HEADS
    vocab_size: int = VOCAB
    num_experts: int = EXPERTS
    top_k: int = TOP
    n_dense_layers: int = 1
    use_grouped_mm: bool = True
    max_seq_len: int = 64


def rope_table(width: int, length: int) -> Tensor:
    """Complex rotations [length, width / 2]."""
    angles = torch.outer(torch.arange(length), 1.0 / 10000 ** (torch.arange(0, width, 2) / width))
    return torch.polar(torch.ones_like(angles), angles)


def rotate(x: Tensor, rope: Tensor) -> Tensor:
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * rope[None, : x.shape[1], None]).flatten(3).type_as(x)


class TitanAttention(nn.Module):
    def __init__(self, args: Args) -> None:
        super().__init__()
        self.n_heads, self.head_dim = args.n_heads, args.dim // args.n_heads
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(args.dim, args.dim, bias=False) for _ in range(4))

    def forward(self, x: Tensor, rope: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = (w(x).view(batch, length, -1, self.head_dim) for w in (self.wq, self.wk, self.wv))
        q, k = rotate(q, rope), rotate(k, rope)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(out.transpose(1, 2).reshape(batch, length, -1))


class FeedForward(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.w1, self.w2, self.w3 = (nn.Linear(dim, dim, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class GroupedExperts(nn.Module):
    def __init__(self, args: Args) -> None:
        super().__init__()
        self.w1, self.w2, self.w3 = (
            nn.Parameter(torch.randn(args.num_experts, args.dim, args.dim) / args.dim**0.5) for _ in range(3)
        )
        self.use_grouped_mm = args.use_grouped_mm

    def forward(self, x: Tensor, tokens_per_expert: Tensor) -> Tensor:
        if not self.use_grouped_mm:
            return self._loop(x, tokens_per_expert)
        offsets = torch.cumsum(tokens_per_expert, dim=0, dtype=torch.int32)
        w1, w2, w3 = (w.bfloat16().transpose(-2, -1) for w in (self.w1, self.w2, self.w3))
        h = F.silu(torch._grouped_mm(x.bfloat16(), w1, offs=offsets))
        h = h * torch._grouped_mm(x.bfloat16(), w3, offs=offsets)
        return torch._grouped_mm(h, w2, offs=offsets).type_as(x)

    def _loop(self, x: Tensor, tokens_per_expert: Tensor) -> Tensor:
        parts = torch.split(x, tokens_per_expert.long().tolist())
        outputs = [
            (F.silu(part @ self.w1[i].T) * (part @ self.w3[i].T)) @ self.w2[i].T
            for i, part in enumerate(parts)
        ]
        return torch.cat(outputs)


class TokenChoiceRouter(nn.Module):
    def __init__(self, args: Args) -> None:
        super().__init__()
        self.gate = nn.Linear(args.dim, args.num_experts, bias=False)
        self.num_experts, self.top_k = args.num_experts, args.top_k

    def forward(self, x: Tensor, bias: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        scores = torch.sigmoid(self.gate(x).to(torch.float32))
        _, chosen = torch.topk(scores + bias, k=self.top_k, dim=1)
        counts = torch.histc(chosen.view(-1).float(), bins=self.num_experts, min=0, max=self.num_experts)
        return scores.gather(dim=1, index=chosen), chosen, counts


class TitanMoE(nn.Module):
    tokens_per_expert: Tensor
    expert_bias: Tensor

    def __init__(self, args: Args) -> None:
        super().__init__()
        self.router = TokenChoiceRouter(args)
        self.experts = GroupedExperts(args)
        self.shared_experts = FeedForward(args.dim)
        self.top_k = args.top_k
        self.register_buffer("expert_bias", torch.zeros(args.num_experts))
        self.register_buffer("tokens_per_expert", torch.zeros(args.num_experts), persistent=False)

    def routed(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Rows to add, and the positions [rows, dim] where."""
        scores, chosen, counts = self.router(rows, self.expert_bias)
        with torch.no_grad():
            self.tokens_per_expert.add_(counts)
        order = torch.argsort(chosen.view(-1), stable=True)
        scores, where = (
            scores.view(-1)[order],
            (order // self.top_k).reshape(-1, 1).expand(-1, rows.shape[-1]),
        )
        outputs = self.experts(torch.gather(rows, dim=0, index=where), counts)
        return (outputs.to(torch.float32) * scores.reshape(-1, 1)).to(rows.dtype), where

    def forward(self, x: Tensor) -> Tensor:
        batch, length, dim = x.shape
        rows = x.view(-1, dim)
        outputs, where = self.routed(rows)
        out = self.shared_experts(rows).scatter_add(dim=0, index=where, src=outputs)
        return out.reshape(batch, length, dim)


class TransformerBlock(nn.Module):
    def __init__(self, layer_id: int, args: Args) -> None:
        super().__init__()
        self.attention = TitanAttention(args)
        self.attention_norm, self.ffn_norm = nn.RMSNorm(args.dim), nn.RMSNorm(args.dim)
        self.moe_enabled = layer_id >= args.n_dense_layers
        if self.moe_enabled:
            self.moe = TitanMoE(args)
        else:
            self.feed_forward = FeedForward(args.dim)

    def forward(self, x: Tensor, rope: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), rope)
        if self.moe_enabled:
            return x + self.moe(self.ffn_norm(x))
        return x + self.feed_forward(self.ffn_norm(x))


class Transformer(nn.Module):
    """A decoder whose layers are a ModuleDict and get a rope table beside the stream."""

    rope: Tensor

    def __init__(self, args: Args) -> None:
        super().__init__()
        self.args = args
        self.tok_embeddings = nn.Embedding(args.vocab_size, args.dim)
        self.register_buffer("rope", rope_table(args.dim // args.n_heads, args.max_seq_len), persistent=False)
        self.layers = nn.ModuleDict({str(i): TransformerBlock(i, args) for i in range(args.n_layers)})
        self.norm = nn.RMSNorm(args.dim)
        self.output = nn.Linear(args.dim, args.vocab_size, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.tok_embeddings(tokens)
        for layer in self.layers.values():
            h = layer(h, self.rope)
        return self.output(self.norm(h))
