"""What `sparse_kl` must give, from its definition: float64, dense, autograd, a row at a time where that is clearer."""

import torch
from torch import Tensor

from tests.loss.formulas import logits


def dense_teacher(ids: Tensor, logp: Tensor, counts: Tensor | None, vocabulary: int) -> tuple[Tensor, Tensor]:
    """p [N, V] with equal ids added up, and whether a token is in the support."""
    p = torch.zeros(len(ids), vocabulary, dtype=torch.float64, device=ids.device)
    support = torch.zeros_like(p, dtype=torch.bool)
    for k in range(ids.shape[1]):
        rows = torch.arange(len(ids), device=ids.device)
        rows = rows if counts is None else rows[counts > k]
        p[rows, ids[rows, k].long()] += logp[rows, k].double().exp()
        support[rows, ids[rows, k].long()] = True
    return p, support


def x_log_x(x: Tensor) -> Tensor:
    return torch.where(x > 0, x * torch.where(x > 0, x, 1.0).log(), 0.0)


def per_token(tail: str, logits_NV: Tensor, p: Tensor, support: Tensor) -> Tensor:
    """The loss of each row, as fxskip.loss.tails says it; 0 for a row without mass."""
    log_q = logits_NV.log_softmax(dim=-1)
    mass = p.sum(dim=-1)
    if tail in ("renormalised", "subset"):
        p = p / torch.where(mass > 0, mass, 1.0)[:, None]
    if tail == "subset":
        inside = torch.where(support, logits_NV, -torch.inf)
        log_q = logits_NV - torch.where(support.any(-1), inside.logsumexp(dim=-1), 0.0)[:, None]
    loss = (x_log_x(p) - torch.where(p > 0, p * log_q, 0.0)).sum(dim=-1)
    if tail == "ghost":
        rest = torch.where(support, 0.0, log_q.exp()).sum(dim=-1)
        tail_mass = (1.0 - mass).clamp_min(0.0).where(~support.all(-1), 0.0)
        has_tail = tail_mass > 0
        loss = (
            loss
            + x_log_x(tail_mass)
            - torch.where(has_tail, tail_mass * rest.where(has_tail, 1.0).log(), 0.0)
        )
    return loss


def loss_and_gradients(
    tail: str,
    leaves: list[Tensor],
    ids: Tensor,
    logp: Tensor,
    *,
    counts: Tensor | None = None,
    token_weight: Tensor | None = None,
    denominator: float | Tensor | None = None,
    vocabulary: int | None = None,
    **after_gemm: float | None,
) -> list[Tensor]:
    """`leaves` are hidden, weight and perhaps bias; in float64 the loss and its gradients by them."""
    leaves = [leaf.detach().double().requires_grad_() for leaf in leaves]
    z = logits(*leaves, **after_gemm)[:, :vocabulary]
    rows = per_token(tail, z, *dense_teacher(ids, logp, counts, z.shape[1]))
    weight = torch.ones_like(rows) if token_weight is None else token_weight.double()
    loss = (rows * weight).sum() / (weight.sum() if denominator is None else denominator)
    return [loss.detach(), *torch.autograd.grad(loss, leaves)]


def relative_error(got: Tensor, right: Tensor) -> float:
    return float((got.double() - right.double()).norm() / right.double().norm().clamp_min(1e-30))


def seeded_teacher(
    tokens: int, vocabulary: int, entries: int, *, mass: float = 0.9, seed: int = 0, device: str = "cpu"
) -> tuple[Tensor, Tensor]:
    """Distinct ids in no order, and log-probabilities that add up to about `mass`."""
    generator = torch.Generator(device).manual_seed(seed)
    # A few draws a row and a stride between them: a [tokens, vocabulary] tensor would be too large for a benchmark.
    places = min(vocabulary, max(1000, entries))
    drawn = (
        torch.rand(tokens, places, generator=generator, device=device)
        .topk(entries, dim=-1, sorted=False)
        .indices
    )
    ids = drawn * (vocabulary // places)
    logp = (2 * torch.randn(tokens, entries, generator=generator, device=device)).log_softmax(dim=-1)
    return ids, logp + torch.log(torch.tensor(mass, device=device))
