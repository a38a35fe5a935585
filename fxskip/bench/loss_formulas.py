"""What the losses are to give, in float64 by autograd from dense logits: nothing of `fxskip.loss` is in it.

The product of the head can be rounded on the way, to see what that alone does to the results.
"""

# N tokens, V vocabulary, K entries of a teacher row

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Head:
    """From hidden states to what enters the softmax, in float64."""

    scale: float = 1.0
    softcap: float | None = None
    temperature: float = 1.0

    def logits(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None, rounded_to: torch.dtype | None
    ) -> Tensor:
        z_NV = hidden.double() @ weight.double().T
        if rounded_to is not None:
            z_NV = z_NV + (z_NV.detach().to(rounded_to).double() - z_NV.detach())
        if bias is not None:
            z_NV = z_NV + bias.double()
        z_NV = self.scale * z_NV
        if self.softcap is not None:
            z_NV = self.softcap * torch.tanh(z_NV / self.softcap)
        return z_NV / self.temperature


@dataclass(frozen=True)
class Outcome:
    """The loss, then its gradients by the leaves.

    sizes   what errors of each are relative to: its norm, but a thousandth of that of the teacher's term at least.
            Near the teacher a value is the difference of two terms that are as large
    terms   norm of the teacher's term, in `sizes`
    """

    values: list[Tensor]
    sizes: list[float]
    terms: list[float]


Rows = Callable[[Tensor], tuple[Tensor, Tensor]]


def outcome(rows: Rows, student_NV: Tensor, leaves: list[Tensor], weight_N: Tensor | None) -> Outcome:
    """Of the weighted mean of `rows(student_NV)`: each token's loss, and its term that holds the teacher's entries."""
    loss_N, term_N = rows(student_NV)
    weight_N = torch.ones_like(loss_N) if weight_N is None else weight_N.double()
    loss, term = ((x_N * weight_N).sum() / weight_N.sum() for x_N in (loss_N, term_N))
    terms = [term, *torch.autograd.grad(term, leaves, retain_graph=True)]
    values = [loss.detach(), *torch.autograd.grad(loss, leaves)]
    of_terms = [float(x.detach().norm()) for x in terms]
    sizes = [max(float(x.norm()), 1e-3 * of_term) for x, of_term in zip(values, of_terms, strict=True)]
    return Outcome(values, sizes, [a / max(b, 1e-300) for a, b in zip(of_terms, sizes, strict=True)])


def plogp(p: Tensor) -> Tensor:
    return torch.xlogy(p, p)


def sparse_rows(tail: str, ids: Tensor, logp: Tensor, counts: Tensor | None) -> Rows:
    """The four losses of a teacher known by a few tokens, as `fxskip.loss.tails` defines them."""

    def rows(x_NV: Tensor) -> tuple[Tensor, Tensor]:
        given_NK = torch.ones_like(ids, dtype=torch.bool)
        if counts is not None:
            given_NK = torch.arange(ids.shape[1], device=ids.device) < counts[:, None]
        p_NK = logp.double().exp() * given_NK
        p_NV = torch.zeros_like(x_NV).scatter_add(1, ids, p_NK)
        on_NV = torch.zeros_like(x_NV).scatter_add(1, ids, given_NK.double()) > 0
        mass_N = p_NV.sum(dim=1)
        q_NV = x_NV.log_softmax(dim=1)
        if tail in ("renormalised", "subset"):
            p_NV = p_NV / mass_N.where(mass_N > 0, 1.0)[:, None]
        if tail == "subset":
            support_N = q_NV.masked_fill(~on_NV, -1e300).logsumexp(dim=1)
            q_NV = q_NV - support_N.where(on_NV.any(dim=1), 0.0)[:, None]
        term_N = (p_NV * x_NV).sum(dim=1)
        loss_N = (plogp(p_NV) - p_NV * q_NV).sum(dim=1)
        if tail == "ghost":
            bucket_N = (1.0 - mass_N).clamp_min(0.0) * (~on_NV).any(dim=1)
            rest_N = q_NV.masked_fill(on_NV, -1e300).logsumexp(dim=1)
            loss_N = loss_N + plogp(bucket_N) - bucket_N * rest_N.where(bucket_N > 0, 0.0)
        return loss_N, term_N

    return rows


def online_rows(teacher_NV: Tensor, beta: float) -> Rows:
    """beta KL(p || m) + (1 - beta) KL(q || m), m = beta p + (1 - beta) q; at 0 KL(p || q), at 1 KL(q || p)."""

    def rows(x_NV: Tensor) -> tuple[Tensor, Tensor]:
        log_p, log_q = teacher_NV.log_softmax(dim=1), x_NV.log_softmax(dim=1)
        p, q = log_p.exp(), log_q.exp()
        if beta == 0.0:
            loss_NV = p * (log_p - log_q)
        elif beta == 1.0:
            loss_NV = q * (log_q - log_p)
        else:
            log_m = (beta * p + (1.0 - beta) * q).log()
            loss_NV = beta * p * (log_p - log_m) + (1.0 - beta) * q * (log_q - log_m)
        return loss_NV.sum(dim=1), (p * x_NV).sum(dim=1)

    return rows


def sparse_outcome(
    leaves: list[Tensor],
    ids: Tensor,
    logp: Tensor,
    *,
    tail: str = "truncated",
    counts: Tensor | None = None,
    token_weight: Tensor | None = None,
    rounded_to: torch.dtype | None = None,
    **after_product: Any,
) -> Outcome:
    """Of `sparse_kl`; `leaves` are hidden, weight and perhaps bias."""
    wide, bias = widened(leaves)
    logits_NV = Head(**after_product).logits(wide[0], wide[1], bias, rounded_to)
    return outcome(sparse_rows(tail, ids, logp, counts), logits_NV, wide, token_weight)


def online_outcome(
    leaves: list[Tensor],
    teacher: tuple[Tensor, Tensor],
    *,
    beta: float = 0.0,
    teacher_bias: Tensor | None = None,
    token_weight: Tensor | None = None,
    rounded_to: torch.dtype | None = None,
    **after_product: Any,
) -> Outcome:
    """Of `hidden_kl`; `teacher` are its hidden states and head."""
    wide, bias = widened(leaves)
    head = Head(**after_product)
    with torch.no_grad():
        teacher_NV = head.logits(*teacher, teacher_bias, rounded_to)
    return outcome(
        online_rows(teacher_NV, beta), head.logits(wide[0], wide[1], bias, rounded_to), wide, token_weight
    )


def widened(leaves: list[Tensor]) -> tuple[list[Tensor], Tensor | None]:
    wide = [leaf.detach().double().requires_grad_() for leaf in leaves]
    return wide, wide[2] if len(wide) > 2 else None
