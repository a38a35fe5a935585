"""Inputs of the loss benchmark, and the work that every variant is compared with."""

# N tokens, t of one chunk, D width, V vocabulary, K entries of a teacher row

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fxskip.loss.arguments import DEFAULT_CHUNK_TOKENS

TEACHER_MASS = 0.95
# Names of variants that goals speak of: the floors, which all others are compared with, and ...
FLOOR, FOUR_FLOOR = "three products", "four products"
LEAN = "sparse_kl, half a chunk, accumulate 2"
HALF_MASKED = "sparse_kl, half of the tokens masked"


@dataclass(frozen=True)
class Setting:
    """Where and how large. Sizes in the benchmark's code are those of `full`; a tiny run divides them by `shrink`."""

    device: str
    shrink: int
    width: int
    entries: int
    rounds: int  # at most

    def of(self, size: int) -> int:
        return max(size // self.shrink, 8)

    @property
    def chunk_tokens(self) -> int:
        return max(DEFAULT_CHUNK_TOKENS // self.shrink, 1)


FULL = Setting("cuda", shrink=1, width=4096, entries=100, rounds=20)


def tiny() -> Setting:
    """Every line of the benchmark in seconds, on any machine; without a GPU the kernels run in Triton's interpreter."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return Setting(device, shrink=4096, width=16, entries=4, rounds=1)


@dataclass(frozen=True)
class Inputs:
    """bfloat16 states and head that want gradients, and a teacher's top entries."""

    hidden: Tensor
    weight: Tensor
    ids: Tensor
    logp: Tensor
    chunk_tokens: int

    def step(self, loss: Callable[..., Tensor], **options: object) -> Callable[[], None]:
        """One forward and backward; gradients are dropped first, as an optimizer's zero_grad does."""

        def work() -> None:
            self.hidden.grad = self.weight.grad = None
            loss(self.hidden, self.weight, self.ids, self.logp, **options).backward()
            self.hidden.grad = self.weight.grad = None

        return work

    def chunked(self, loss: Callable[..., Tensor], **options: object) -> Callable[[], None]:
        return self.step(loss, **({"chunk_tokens": self.chunk_tokens} | options))

    def with_frozen_head(self) -> "Inputs":
        return replace(self, weight=self.weight.detach())


def draw_inputs(
    setting: Setting,
    tokens: int,
    vocabulary: int,
    *,
    shards: int = 1,
    rank: int = 0,
    width: int | None = None,
) -> Inputs:
    """Logits have a standard deviation of sqrt(width) / 50, 1.3 at a width of 4096; the teacher's entries random places
    and 95 % of the mass.

    `tokens` and `vocabulary` are those of a full run; `width` replaces the setting's where that is larger.
    """
    tokens, vocabulary = setting.of(tokens), setting.of(vocabulary)
    width = min(setting.width, width or setting.width)
    generator = torch.Generator(setting.device).manual_seed(0)
    draw = {"generator": generator, "device": setting.device, "dtype": torch.bfloat16}
    hidden = torch.randn(tokens, width, **draw).requires_grad_()  # type: ignore[call-overload]
    ids, logp = draw_teacher(tokens, vocabulary, setting.entries, generator)
    # Another seed than that of the states: of equal numbers, each token's logit by its own row would be |h|^2.
    own = torch.Generator(setting.device).manual_seed(1 + rank)
    rows = torch.randn(vocabulary // shards, width, generator=own, device=setting.device)
    weight = (0.02 * rows).bfloat16().requires_grad_()
    return Inputs(hidden, weight, ids, logp, setting.chunk_tokens)


def draw_teacher(
    tokens: int, vocabulary: int, entries: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    places = min(vocabulary, 1000)
    ids, logp = [], []
    for start in range(0, tokens, 16384):  # the draw is larger than what it leaves
        part = min(16384, tokens - start)
        drawn = torch.rand(part, places, generator=generator, device=generator.device)
        ids.append(drawn.topk(entries, dim=-1).indices * (vocabulary // places))
        scores = 2 * torch.randn(part, entries, generator=generator, device=generator.device)
        logp.append(scores.log_softmax(dim=-1) + math.log(TEACHER_MASS))
    return torch.cat(ids), torch.cat(logp)


def three_products(inputs: Inputs) -> Callable[[], None]:
    """The floor: logits, d hidden and d weight of each chunk into tensors that exist, nothing added up.

    The second and third product take a gradient as it is in use: what values toggle decides the power they draw,
    and so the clock.
    """
    hidden, weight, chunk_tokens = inputs.hidden.detach(), inputs.weight.detach(), inputs.chunk_tokens
    logits = hidden.new_empty(min(chunk_tokens, len(hidden)), len(weight))
    d_logits = truncated_gradient(inputs)
    d_hidden, d_weight = torch.empty_like(hidden), torch.empty_like(weight)

    def work() -> None:
        for start in range(0, len(hidden), chunk_tokens):
            rows = slice(start, start + chunk_tokens)
            states = hidden[rows]  # of the last chunk perhaps fewer
            gradient = d_logits[: len(states)]
            torch.mm(states, weight.T, out=logits[: len(states)])
            torch.mm(gradient, weight, out=d_hidden[rows])
            torch.mm(gradient.T, states, out=d_weight)

    return work


def truncated_gradient(inputs: Inputs) -> Tensor:
    """The gradient by the logits of the first chunk, by its formula: M q - p, divided by the number of tokens."""
    hidden, weight = inputs.hidden.detach(), inputs.weight.detach()
    parts = []
    for start in range(0, min(inputs.chunk_tokens, len(hidden)), 512):  # in float32, so a part at a time
        rows = slice(start, min(start + 512, inputs.chunk_tokens))
        p_tK = inputs.logp[rows].exp()
        q_tV = (hidden[rows] @ weight.T).float().softmax(dim=-1) * p_tK.sum(dim=-1, keepdim=True)
        # With a vocabulary over ranks the tokens of the others fold into this one's: their values matter, not where.
        q_tV.scatter_add_(1, inputs.ids[rows] % len(weight), -p_tK)
        parts.append((q_tV / len(hidden)).to(hidden.dtype))
    return torch.cat(parts)


def four_products(inputs: Inputs, teacher_hidden: Tensor) -> Callable[[], None]:
    """The floor of an online teacher: its logits too."""
    hidden, weight, chunk_tokens = inputs.hidden.detach(), inputs.weight.detach(), inputs.chunk_tokens
    three = three_products(inputs)
    logits = hidden.new_empty(min(chunk_tokens, len(hidden)), len(weight))

    def work() -> None:
        three()
        for start in range(0, len(hidden), chunk_tokens):
            states = teacher_hidden[start : start + chunk_tokens]
            torch.mm(states, weight.T, out=logits[: len(states)])

    return work
