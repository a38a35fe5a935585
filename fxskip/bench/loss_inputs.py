"""Inputs of the loss benchmark, and the work that every variant is compared with."""

# N tokens, t of one chunk, D width, V vocabulary, K entries of a teacher row

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

WIDTH = 4096
ENTRIES = 100
TEACHER_MASS = 0.95
FLOOR = "three products"  # the variant that every other is compared with


@dataclass(frozen=True)
class Inputs:
    """bfloat16 states and head on the GPU that want gradients, and a teacher's top entries."""

    hidden: Tensor
    weight: Tensor
    ids: Tensor
    logp: Tensor

    def step(self, loss: Callable[..., Tensor], **options: object) -> Callable[[], None]:
        """One forward and backward; gradients are dropped first, as an optimizer's zero_grad does."""

        def work() -> None:
            self.hidden.grad = self.weight.grad = None
            loss(self.hidden, self.weight, self.ids, self.logp, **options).backward()
            self.hidden.grad = self.weight.grad = None

        return work


def draw_inputs(
    tokens: int, vocabulary: int, *, shards: int = 1, rank: int = 0, width: int = WIDTH
) -> Inputs:
    """Logits have a standard deviation of about 1.3, the teacher's entries random places and 95 % of the mass."""
    generator = torch.Generator("cuda").manual_seed(0)

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device="cuda", dtype=torch.bfloat16)

    hidden = randn(tokens, width).requires_grad_()
    ids, logp = draw_teacher(tokens, vocabulary, generator)
    # Another seed than that of the states: of equal numbers, each token's logit by its own row would be |h|^2.
    own = torch.Generator("cuda").manual_seed(1 + rank)
    rows = torch.randn(vocabulary // shards, width, generator=own, device="cuda")
    weight = (0.02 * rows).bfloat16().requires_grad_()
    return Inputs(hidden, weight, ids, logp)


def draw_teacher(tokens: int, vocabulary: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    places = min(vocabulary, 1000)
    ids, logp = [], []
    for start in range(0, tokens, 16384):  # the draw is larger than what it leaves
        part = min(16384, tokens - start)
        drawn = torch.rand(part, places, generator=generator, device="cuda").topk(ENTRIES, dim=-1).indices
        ids.append(drawn * (vocabulary // places))
        scores = 2 * torch.randn(part, ENTRIES, generator=generator, device="cuda")
        logp.append(scores.log_softmax(dim=-1) + torch.log(torch.tensor(TEACHER_MASS)).item())
    return torch.cat(ids), torch.cat(logp)


def three_products(inputs: Inputs, chunk_tokens: int = 4096) -> Callable[[], None]:
    """The floor: logits, d hidden and d weight of each chunk into tensors that exist, nothing added up.

    The second and third product take a gradient as it is in use: what values toggle decides the power they draw,
    and so the clock.
    """
    hidden, weight = inputs.hidden.detach(), inputs.weight.detach()
    logits = hidden.new_empty(min(chunk_tokens, len(hidden)), len(weight))
    d_logits = truncated_gradient(inputs, chunk_tokens)
    d_hidden, d_weight = torch.empty_like(hidden), torch.empty_like(weight)

    def work() -> None:
        for start in range(0, len(hidden), chunk_tokens):
            rows = slice(start, start + chunk_tokens)
            torch.mm(hidden[rows], weight.T, out=logits)
            torch.mm(d_logits, weight, out=d_hidden[rows])
            torch.mm(d_logits.T, hidden[rows], out=d_weight)

    return work


def truncated_gradient(inputs: Inputs, chunk_tokens: int) -> Tensor:
    """The gradient by the logits of the first chunk, by its formula: M q - p, divided by the number of tokens."""
    hidden, weight = inputs.hidden.detach(), inputs.weight.detach()
    parts = []
    for start in range(0, min(chunk_tokens, len(hidden)), 512):  # in float32, so a part at a time
        rows = slice(start, start + 512)
        p_tK = inputs.logp[rows].exp()
        q_tV = (hidden[rows] @ weight.T).float().softmax(dim=-1) * p_tK.sum(dim=-1, keepdim=True)
        # With a vocabulary over ranks the tokens of the others fold into this one's: their values matter, not where.
        q_tV.scatter_add_(1, inputs.ids[rows] % len(weight), -p_tK)
        parts.append((q_tV / len(hidden)).to(hidden.dtype))
    return torch.cat(parts)


def four_products(inputs: Inputs, teacher_hidden: Tensor, chunk_tokens: int = 4096) -> Callable[[], None]:
    """The floor of an online teacher: its logits too."""
    hidden, weight = inputs.hidden.detach(), inputs.weight.detach()
    three = three_products(inputs, chunk_tokens)
    logits = hidden.new_empty(min(chunk_tokens, len(hidden)), len(weight))

    def work() -> None:
        three()
        for start in range(0, len(hidden), chunk_tokens):
            torch.mm(teacher_hidden[start : start + chunk_tokens], weight.T, out=logits)

    return work
