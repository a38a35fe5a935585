"""From the logits of one chunk of student and teacher to losses and gradient, in plain PyTorch."""

# t rows of one chunk, D width, V vocabulary of this rank, R ranks

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from fxskip.loss.engine import Finish, Rows
from fxskip.loss.head import Head
from fxskip.loss.products import multiply_into
from fxskip.loss.vocabulary import Shard


@dataclass(frozen=True)
class OnlineTarget:
    """What both implementations need beside the student's logits. `share_N` is token_weight / denominator."""

    student: Head
    teacher: Head
    teacher_hidden_ND: Tensor
    share_N: Tensor
    beta: float
    shard: Shard
    shares_products: bool
    """The student's products have the teacher's behind them."""

    def products(self, product: Tensor, rows: Rows) -> tuple[Tensor, Tensor]:
        """Hidden W^T of student and teacher [t, V], in one dtype."""
        if self.shares_products:
            student_tV, teacher_tV = product.tensor_split(2)
            return student_tV, teacher_tV
        return product, self.teacher_product(product, rows)

    def teacher_product(self, like_tV: Tensor, rows: Rows) -> Tensor:
        """The teacher's hidden W^T of `rows`, in shape and dtype of the student's."""
        # Padded like the student's buffer: rows that start aligned.
        product_tV = torch.empty_strided(
            like_tV.shape, like_tV.stride(), dtype=like_tV.dtype, device=like_tV.device
        )
        hidden_tD = self.teacher_hidden_ND[rows].to(self.teacher.weight_VD.dtype)
        multiply_into(product_tV, hidden_tD, self.teacher.weight_VD.T)
        return product_tV

    @property
    def is_mixed(self) -> bool:
        return 0.0 < self.beta < 1.0


class Sums(NamedTuple):
    """Of each row, all [t]: log-sum-exps of the logits of student and teacher, and the parts of the divergence that are
    weighed with p and with q, as `divergences` gives them."""

    student: Tensor
    teacher: Tensor
    p_kl: Tensor
    q_kl: Tensor


class TorchPairs:
    """A `RowLoss`; the kernels in hidden_kernels.py do the same."""

    def __init__(self, target: OnlineTarget) -> None:
        self.target = target

    def begin(
        self, product_tV: Tensor, gradient_tV: Tensor | None, rows: Rows, spare: Tensor | None
    ) -> Finish:
        target = self.target
        product_tV, teacher_tV = target.products(product_tV, rows)
        teacher_tV = target.teacher.tempered(target.teacher.scaled(teacher_tV))
        scaled_tV = target.student.scaled(product_tV)
        slope_tV = target.student.slope(scaled_tV) if gradient_tV is not None else 1.0
        student_tV = target.student.tempered(scaled_tV)
        sums = sums_of(target, student_tV, teacher_tV)
        exchange = None if target.shard.group is None else target.shard.gathered(torch.stack(sums))

        def finish() -> Tensor:
            total = sums
            if exchange is not None:
                total = over_ranks(target, exchange, sums_of_parts)
            logq_tV, logp_tV = student_tV - total.student[:, None], teacher_tV - total.teacher[:, None]
            share_t = target.share_N[rows].to(logq_tV.dtype)
            if gradient_tV is not None:
                d_tV = gradient(target.beta, logp_tV, logq_tV, total.q_kl)
                gradient_tV.copy_(d_tV.mul_(slope_tV).mul_(share_t[:, None]))
            return divergence(target.beta, total) * share_t

        def sums_of_parts(student_t: Tensor, teacher_t: Tensor) -> Tensor:
            logq_tV, logp_tV = student_tV - student_t[:, None], teacher_tV - teacher_t[:, None]
            return torch.stack(divergences(target.beta, logp_tV, logq_tV))

        if exchange is not None:
            return finish
        loss_t = finish()
        return lambda: loss_t


def sums_of(target: OnlineTarget, student_tV: Tensor, teacher_tV: Tensor) -> Sums:
    """Of this rank's columns; divergences by their own normalisers, which say nothing about those of a mixture."""
    student_t, teacher_t = (log_sum_exp(logits_tV) for logits_tV in (student_tV, teacher_tV))
    if target.shard.group is not None and target.is_mixed:
        return Sums(student_t, teacher_t, torch.zeros_like(student_t), torch.zeros_like(student_t))
    logq_tV, logp_tV = student_tV - student_t[:, None], teacher_tV - teacher_t[:, None]
    return Sums(student_t, teacher_t, *divergences(target.beta, logp_tV, logq_tV))


def log_sum_exp(logits_tV: Tensor) -> Tensor:
    if logits_tV.shape[1] == 0:  # a rank that holds nothing but padding
        return logits_tV.new_full((len(logits_tV),), -torch.inf)
    return torch.logsumexp(logits_tV, dim=-1)


def over_ranks(
    target: OnlineTarget,
    exchange: tuple[Tensor, dist.Work],
    parts_of: Callable[[Tensor, Tensor], Tensor],
) -> Sums:
    """The sums of the whole vocabulary, when those of every rank [R, 4, t] have come.

    Each rank's KL was taken between p and q as they are on the rank, made to add up to 1. By the chain rule it enters
    with the mass that the rank has, and the masses have a divergence of their own. For a mixture there is no such
    rule: `parts_of` gives this rank's parts [2, t] by the normalisers of all, and they are exchanged too.
    """
    every_R4t, work = exchange
    work.wait()
    student_Rt, teacher_Rt, p_kl_Rt, q_kl_Rt = every_R4t.unbind(dim=1)
    student_t, teacher_t = torch.logsumexp(student_Rt, dim=0), torch.logsumexp(teacher_Rt, dim=0)
    if target.is_mixed:
        parts_R2t, second_work = target.shard.gathered(parts_of(student_t, teacher_t))
        second_work.wait()
        p_kl_t, q_kl_t = parts_R2t.sum(dim=0)
        return Sums(student_t, teacher_t, p_kl_t, q_kl_t)
    log_q_Rt, log_p_Rt = student_Rt - student_t, teacher_Rt - teacher_t
    p_kl_t = expected(log_p_Rt.exp(), p_kl_Rt + log_p_Rt - log_q_Rt, dim=0)
    q_kl_t = expected(log_q_Rt.exp(), q_kl_Rt + log_q_Rt - log_p_Rt, dim=0)
    # Of the two, one is asked for.
    zero_t = torch.zeros_like(p_kl_t)
    return Sums(student_t, teacher_t, *((p_kl_t, zero_t) if target.beta == 0.0 else (zero_t, q_kl_t)))


def divergences(beta: float, logp_tV: Tensor, logq_tV: Tensor) -> tuple[Tensor, Tensor]:
    """The parts of each row's generalised Jensen-Shannon divergence: sum p (log p - log m) and sum q (log q - log m).

    With beta 0, KL(p || q), m is q and the second part 0. With beta 1, KL(q || p), m is p and the first part 0.
    Between, m is the mixture beta p + (1 - beta) q.
    """
    p_tV, q_tV = logp_tV.exp(), logq_tV.exp()
    zero_t = logp_tV.new_zeros(len(logp_tV))
    if beta == 0.0:
        return expected(p_tV, logp_tV - logq_tV), zero_t
    if beta == 1.0:
        return zero_t, expected(q_tV, logq_tV - logp_tV)
    logm_tV = log_mixture(beta, logp_tV, logq_tV)
    return expected(p_tV, logp_tV - logm_tV), expected(q_tV, logq_tV - logm_tV)


def log_mixture(beta: float, logp_tV: Tensor, logq_tV: Tensor) -> Tensor:
    return torch.logaddexp(logp_tV + math.log(beta), logq_tV + math.log1p(-beta))


def divergence(beta: float, sums: Sums) -> Tensor:
    if 0.0 < beta < 1.0:
        return beta * sums.p_kl + (1.0 - beta) * sums.q_kl
    return sums.p_kl + sums.q_kl  # one of them is 0


def gradient(beta: float, logp_tV: Tensor, logq_tV: Tensor, q_kl_t: Tensor) -> Tensor:
    """Of the divergence by the logits of q: with beta 0 q - p, else (1 - beta, or 1 with beta 1) times
    q (log q - log m - KL(q || m))."""
    q_tV = logq_tV.exp()
    if beta == 0.0:
        return q_tV.sub_(logp_tV.exp())
    logm_tV = logp_tV if beta == 1.0 else log_mixture(beta, logp_tV, logq_tV)
    # A token that the student excludes adds 0, not 0 * inf.
    gap_tV = torch.where(q_tV == 0, 0.0, logq_tV - logm_tV)
    return q_tV.mul_(gap_tV.sub_(q_kl_t[:, None])).mul_(1.0 if beta == 1.0 else 1.0 - beta)


def expected(p: Tensor, values: Tensor, dim: int = -1) -> Tensor:
    """sum p * value over `dim`; where p is 0 the term is 0, and where it is NaN, NaN."""
    return torch.where(p == 0, 0.0, p * values).sum(dim=dim)
