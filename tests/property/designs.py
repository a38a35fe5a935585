"""What a random Mixture-of-Experts transformer looks like, as data, and the PyTorch module that a design describes.

The modules are written as people write them; nothing here comes from fxskip.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput, CausalLMOutput

VOCAB, WIDTH, HEADS, EXPERTS = 32, 16, 2, 3


@dataclass(frozen=True)
class Design:
    """One architecture. The defaults are the simplest; `describe` names what differs from them."""

    layers: tuple[str, ...] = ("moe", "moe")
    """For each layer, from the first: its second block, moe or dense."""
    wrapper: str = "plain"
    """plain: any nn.Module; hf: a causal language model of transformers."""
    form: str = "serial"
    """serial: one block after the other; parallel_one: x + (attn(h) + mlp(h)); parallel_two: x + attn(h) + mlp(h)."""
    norm: str = "rms"
    """rms, layer or none."""
    place: str = "pre"
    """Of the norm f: pre x + b(f(x)); post x + f(b(x)); both x + f(b(f(x))); outer f(x + b(x))."""
    residual: str = "plain"
    """plain x + y; constant x + y * 0.5; learned x + y * vector; identity x * 0.5 + y."""
    stream: str = "new"
    """new: x = x + y; in_place: x += y."""
    attention: str = "sdpa"
    """sdpa: the fused function; softmax: written out."""
    routing: str = "softmax"
    """softmax: top-2 of a softmax; sigmoid: top-2 of scores plus a bias; top1: argmax of a softmax."""
    experts: str = "masked"
    """masked, einsum, index_add: captured; skipping: a loop in a module of its own; whole: a loop in the MoE itself."""
    shared: int = 1
    """Shared experts."""
    order: str = "routed_first"
    """How a MoE adds up its parts; see MoE.forward. stream: (x + shared) + routed, in the layer."""
    dropout: str = "none"
    """Of probability 0, on nothing, on each addend of a MoE, or on what a block writes."""
    bias: bool = False
    tied: bool = False
    dtype: str = "float32"

    def describe(self) -> str:
        changed = (f.name for f in fields(self) if getattr(self, f.name) != f.default)
        return ", ".join(f"{name}={getattr(self, name)!r}" for name in changed) or "the simplest design"


CHOICES: dict[str, list[Any]] = {
    "wrapper": ["plain", "plain", "hf"],
    "form": ["serial"] * 16 + ["parallel_one"] + ["parallel_two"] * 3,
    "norm": ["rms", "layer", "none"],
    "place": ["pre"] * 12 + ["post", "post", "both", "both", "outer"],
    "residual": ["plain"] * 8 + ["constant", "constant", "learned", "learned", "identity", "identity"],
    "stream": ["new"] * 5 + ["in_place"],
    "attention": ["sdpa", "softmax"],
    "routing": ["softmax", "sigmoid", "top1"],
    "experts": ["masked", "einsum", "index_add", "skipping", "skipping", "whole"],
    "shared": [0, 1, 1, 2],
    "order": ["routed_first", "shared_first", "nested", "iadd", "add_", "into_shared"] + ["stream"],
    "dropout": ["none"] * 4 + ["addends", "write"],
    "bias": [False, True],
    "tied": [False, True],
    "dtype": ["float32", "float32", "float32", "bfloat16"],
}


def random_design(draw: random.Random, *, max_layers: int = 5) -> Design:
    """Any combination of the choices; some make others void, such as an order without shared experts."""
    count = min(draw.choice([1, 2, 2, 3, 3, 4, 5]), max_layers)
    pattern = draw.choice(["moe", "moe", "first dense", "alternating", "any", "any"])
    layers = {
        "moe": ["moe"] * count,
        "first dense": ["dense"] + ["moe"] * (count - 1),
        "alternating": ["moe" if i % 2 == count % 2 else "dense" for i in range(count)],
        "any": [draw.choice(["moe", "dense"]) for _ in range(count)],
    }[pattern]
    design = Design(tuple(layers), **{name: draw.choice(options) for name, options in CHOICES.items()})
    is_bare = design.norm == "none" or design.place in ("post", "outer")
    if is_bare and (design.form == "parallel_two" or design.order == "stream"):
        # Without a norm in front, h is x itself, and x += y would change what the next block reads.
        return replace(design, stream="new")
    return design


def simpler(design: Design) -> list[Design]:
    """Designs that differ in one choice, which has its simplest value, or have a layer less."""
    defaults = {f.name: f.default for f in fields(Design) if f.name != "layers"}
    found = [
        replace(design, **{name: value}) for name, value in defaults.items() if getattr(design, name) != value
    ]
    shorter = [design.layers[:i] + design.layers[i + 1 :] for i in range(len(design.layers))]
    return [replace(design, layers=layers) for layers in dict.fromkeys(shorter) if layers] + found


# --- modules -------------------------------------------------------------------------------------


def make_norm(design: Design) -> nn.Module:
    return (
        {"rms": nn.RMSNorm, "layer": nn.LayerNorm}[design.norm](WIDTH)
        if design.norm != "none"
        else nn.Identity()
    )


class Attention(nn.Module):
    def __init__(self, design: Design) -> None:
        super().__init__()
        self.fused = design.attention == "sdpa"
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=design.bias)
        self.out = nn.Linear(WIDTH, WIDTH, bias=design.bias)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        if self.fused:
            seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            future = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
            scores = (q @ k.transpose(-1, -2) * (WIDTH // HEADS) ** -0.5).masked_fill(future, float("-inf"))
            seen = scores.softmax(dim=-1) @ v
        return self.out(seen.transpose(1, 2).reshape(batch, length, WIDTH))


class MLP(nn.Module):
    def __init__(self, design: Design) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH, bias=design.bias)
        self.down = nn.Linear(WIDTH, WIDTH, bias=design.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.up(x)))


class SkippingExperts(nn.Module):
    """A loop whose course depends on values; TorchDynamo cannot follow it."""

    def __init__(self, design: Design) -> None:
        super().__init__()
        self.experts = nn.ModuleList([MLP(design) for _ in range(EXPERTS)])

    def forward(self, rows: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        return skipping_loop(self.experts, rows, weights, chosen)


def skipping_loop(experts: nn.ModuleList, rows: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    out = torch.zeros_like(rows)
    for number, expert in enumerate(experts):
        token, slot = torch.where(chosen == number)
        if token.numel() == 0:
            continue
        out.index_add_(0, token, expert(rows[token]) * weights[token, slot, None])
    return out


class MoE(nn.Module):
    bias: Tensor

    def __init__(self, design: Design) -> None:
        super().__init__()
        self.design = design
        self.gate = nn.Linear(WIDTH, EXPERTS, bias=design.bias)
        self.register_buffer("bias", torch.zeros(EXPERTS))
        if design.experts == "einsum":
            self.up = nn.Parameter(torch.empty(EXPERTS, WIDTH, WIDTH))
            self.down = nn.Parameter(torch.empty(EXPERTS, WIDTH, WIDTH))
        elif design.experts == "skipping":
            self.experts: nn.Module = SkippingExperts(design)
        else:
            self.experts = nn.ModuleList([MLP(design) for _ in range(EXPERTS)])
        self.shared_experts = nn.ModuleList([MLP(design) for _ in range(design.shared)])
        self.drop = nn.Dropout(0.0) if design.dropout == "addends" else nn.Identity()

    def route(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Weights [T, k] and experts [T, k] of each token."""
        logits = self.gate(rows)
        if self.design.routing == "sigmoid":
            scores = logits.sigmoid()
            chosen = torch.topk(scores + self.bias, 2, dim=-1).indices
            return scores.gather(-1, chosen), chosen
        scores = logits.softmax(dim=-1)
        if self.design.routing == "top1":
            chosen = scores.argmax(dim=-1, keepdim=True)
            return scores.gather(-1, chosen), chosen
        weights, chosen = scores.topk(2, dim=-1)
        return weights / weights.sum(dim=-1, keepdim=True), chosen

    def routed(self, rows: Tensor) -> Tensor:
        weights, chosen = self.route(rows)
        how = self.design.experts
        if how == "einsum":
            combine = (F.one_hot(chosen, EXPERTS).to(rows.dtype) * weights[..., None]).sum(dim=-2)
            hidden = F.silu(torch.einsum("td,edf->etf", rows, self.up))
            return torch.einsum("etf,efd,te->td", hidden, self.down, combine)
        if how == "skipping":
            return self.experts(rows, weights, chosen)
        assert isinstance(self.experts, nn.ModuleList)
        if how == "whole":
            return skipping_loop(self.experts, rows, weights, chosen)
        out = torch.zeros_like(rows)
        if how == "index_add":
            return self.add_into(out, rows, weights, chosen)
        for number, expert in enumerate(self.experts):
            out = out + expert(rows) * (weights * (chosen == number)).sum(dim=-1, keepdim=True)
        return out

    def add_into(self, out: Tensor, rows: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """Add each expert's output to `out`, which is changed, at the rows of its tokens."""
        assert isinstance(self.experts, nn.ModuleList)
        for number, expert in enumerate(self.experts):
            token, slot = torch.where(chosen == number)
            out.index_add_(0, token, expert(rows[token]) * weights[token, slot, None])
        return out

    def forward(self, h: Tensor) -> Tensor:
        rows, order = h.reshape(-1, WIDTH), self.design.order
        if not len(self.shared_experts):
            return self.drop(self.routed(rows)).view(h.shape)
        if order == "into_shared" and self.design.experts == "index_add":
            out = self.shared(rows)
            return self.add_into(out, rows, *self.route(rows)).view(h.shape)
        if order in ("shared_first", "add_", "into_shared"):
            shared = self.shared(rows)
            routed = self.drop(self.routed(rows))
            return (shared.add_(routed) if order == "add_" else shared + routed).view(h.shape)
        out = self.drop(self.routed(rows))
        if order == "nested":
            return (out + self.shared(rows)).view(h.shape)
        for expert in self.shared_experts:
            if order == "iadd":
                out += self.drop(expert(rows))
            else:
                out = out + self.drop(expert(rows))
        return out.view(h.shape)

    def shared(self, rows: Tensor) -> Tensor:
        first, *others = self.shared_experts
        out = self.drop(first(rows))
        for expert in others:
            out = out + self.drop(expert(rows))
        return out


class Layer(nn.Module):
    def __init__(self, design: Design, kind: str) -> None:
        super().__init__()
        self.design, self.kind = design, kind
        before, after = design.place in ("pre", "both"), design.place != "pre"
        self.attn, self.mlp = Attention(design), MoE(design) if kind == "moe" else MLP(design)
        self.norm1, self.norm2 = (make_norm(design) if before else nn.Identity() for _ in range(2))
        self.post1, self.post2 = (make_norm(design) if after else nn.Identity() for _ in range(2))
        self.drop = nn.Dropout(0.0) if design.dropout == "write" else nn.Identity()
        if design.residual == "learned":
            self.scale1, self.scale2 = (nn.Parameter(torch.ones(WIDTH)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        if self.design.form == "parallel_one":
            h = self.norm1(x)
            return self.write(x, self.attn(h) + self.mlp(h), 1)
        if self.design.form == "parallel_two":
            h = self.norm1(x)
            x = self.write(x, self.attn(h), 1)
            return self.write(x, self.mlp(h), 2)
        x = self.write(x, self.attn(self.norm1(x)), 1)
        h = self.norm2(x)
        if adds_to_the_stream_twice(self.design, self.kind):
            assert isinstance(self.mlp, MoE)
            rows = h.reshape(-1, WIDTH)
            x = self.write(x, self.mlp.shared(rows).view(h.shape), 2)
            return self.write(x, self.mlp.drop(self.mlp.routed(rows)).view(h.shape), 2)
        return self.write(x, self.mlp(h), 2)

    def write(self, x: Tensor, y: Tensor, number: int) -> Tensor:
        post = self.post1 if number == 1 else self.post2
        if self.design.place != "outer":
            y = post(y)
        y = self.scaled(self.drop(y), number)
        if self.design.residual == "identity":
            x = x * 0.5
        if self.design.stream == "in_place":
            x += y
        else:
            x = x + y
        return post(x) if self.design.place == "outer" else x

    def scaled(self, y: Tensor, number: int) -> Tensor:
        if self.design.residual == "constant":
            return y * 0.5
        if self.design.residual == "learned":
            return y * (self.scale1 if number == 1 else self.scale2)
        return y


def adds_to_the_stream_twice(design: Design, kind: str) -> bool:
    """Whether a MoE layer adds its shared and its routed experts to the stream one after the other."""
    if design.form != "serial":
        return False
    return kind == "moe" and design.order == "stream" and design.shared > 0 and design.experts != "whole"


class Decoder(nn.Module):
    def __init__(self, design: Design) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList([Layer(design, kind) for kind in design.layers])
        self.norm = nn.LayerNorm(WIDTH)

    def hidden(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


class HFDecoder(Decoder):
    def forward(self, input_ids: Tensor, **unused: Any) -> BaseModelOutput:
        return BaseModelOutput(self.hidden(input_ids))


class PlainModel(Decoder):
    def __init__(self, design: Design) -> None:
        super().__init__(design)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        if design.tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.hidden(ids))


class RandomConfig(PreTrainedConfig):
    model_type = "fxskip_property_test"
    num_hidden_layers: int = 1
    hidden_size: int = WIDTH
    vocab_size: int = VOCAB


class HFModel(PreTrainedModel):
    config_class = RandomConfig

    def __init__(self, config: RandomConfig, design: Design) -> None:
        super().__init__(config)
        self.model = HFDecoder(design)
        self.lm_head = nn.Linear(WIDTH, VOCAB, bias=False)
        if design.tied:
            self.lm_head.weight = self.model.embed.weight

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def get_decoder(self, *args: Any, **kwargs: Any) -> nn.Module:
        return self.model

    def forward(self, input_ids: Tensor, **unused: Any) -> CausalLMOutput:
        return CausalLMOutput(logits=self.lm_head(self.model(input_ids).last_hidden_state))


def build(design: Design, seed: int) -> nn.Module:
    """The module of a design with random weights: every block writes about as much as the stream holds."""
    model: nn.Module
    if design.wrapper == "hf":
        model = HFModel(RandomConfig(num_hidden_layers=len(design.layers)), design)
    else:
        model = PlainModel(design)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            noise = torch.randn(tensor.shape, generator=generator)
            is_gain = "norm" in name or "post" in name or "scale" in name
            wide = 1.0 if "embed" in name else 0.4 if tensor.dim() > 1 else 0.2
            tensor.copy_(1 + 0.2 * noise if is_gain and not name.endswith("bias") else wide * noise)
    return model.to(getattr(torch, design.dtype)).train()


def decoder(model: nn.Module) -> Decoder:
    found = model.model if isinstance(model, HFModel) else model
    assert isinstance(found, Decoder)
    return found


def logits(model: nn.Module, ids: Tensor) -> Tensor:
    out = model(ids)
    return out if isinstance(out, Tensor) else out.logits


def head(model: nn.Module) -> nn.Module:
    return model.lm_head if isinstance(model, HFModel) else model.head  # type: ignore[return-value]
