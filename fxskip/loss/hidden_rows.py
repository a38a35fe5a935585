"""From the logits of one chunk of student and teacher to losses and gradient, in plain PyTorch."""

# t rows of one chunk, D width, V vocabulary

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from fxskip.loss.engine import Finish, Rows
from fxskip.loss.head import Head
from fxskip.loss.products import multiply_into


@dataclass(frozen=True)
class OnlineTarget:
    """What both implementations need beside the student's logits. `share_N` is token_weight / denominator."""

    student: Head
    teacher: Head
    teacher_hidden_ND: Tensor
    share_N: Tensor
    beta: float

    def teacher_product(self, like_tV: Tensor, rows: Rows) -> Tensor:
        """The teacher's hidden W^T of `rows`, in shape and dtype of the student's."""
        # Padded like the student's buffer: rows that start aligned.
        product_tV = torch.empty_strided(
            like_tV.shape, like_tV.stride(), dtype=like_tV.dtype, device=like_tV.device
        )
        hidden_tD = self.teacher_hidden_ND[rows].to(self.teacher.weight_VD.dtype)
        multiply_into(product_tV, hidden_tD, self.teacher.weight_VD.T)
        return product_tV


class TorchPairs:
    """A `RowLoss`; the kernels in hidden_kernels.py do the same."""

    def __init__(self, target: OnlineTarget) -> None:
        self.target = target

    def begin(
        self, product_tV: Tensor, gradient_tV: Tensor | None, rows: Rows, spare: Tensor | None
    ) -> Finish:
        target = self.target
        logp_tV = target.teacher.log_probs(target.teacher.scaled(target.teacher_product(product_tV, rows)))
        scaled_tV = target.student.scaled(product_tV)
        slope_tV = target.student.slope(scaled_tV) if gradient_tV is not None else 1.0
        loss_t, d_tV = divergence(target.beta, logp_tV, target.student.log_probs(scaled_tV))
        share_t = target.share_N[rows].to(loss_t.dtype)
        if gradient_tV is not None:
            gradient_tV.copy_(d_tV.mul_(slope_tV).mul_(share_t[:, None]))
        loss_t = loss_t * share_t
        return lambda: loss_t


def divergence(beta: float, logp_tV: Tensor, logq_tV: Tensor) -> tuple[Tensor, Tensor]:
    """The generalised Jensen-Shannon divergence of each row, and its gradient by the logits of q.

    beta 0: KL(p || q), whose gradient is q - p. beta 1: KL(q || p), q (log q/p - KL). Between, with the mixture
    m = beta p + (1 - beta) q: beta KL(p || m) + (1 - beta) KL(q || m), (1 - beta) q (log q/m - KL(q || m)).
    """
    p_tV, q_tV = logp_tV.exp(), logq_tV.exp()
    if beta == 0.0:
        return weighted_gap(p_tV, logp_tV, logq_tV), q_tV - p_tV
    if beta == 1.0:
        logm_tV = logp_tV
    else:
        logm_tV = torch.logaddexp(logp_tV + math.log(beta), logq_tV + math.log1p(-beta))
    q_kl_t = weighted_gap(q_tV, logq_tV, logm_tV)
    # A token that the student excludes adds 0, not 0 * inf.
    gap_tV = torch.where(q_tV > 0, logq_tV - logm_tV, 0.0)
    d_tV = q_tV.mul_(gap_tV.sub_(q_kl_t[:, None]))
    if beta == 1.0:
        return q_kl_t, d_tV
    p_kl_t = weighted_gap(p_tV, logp_tV, logm_tV)
    return beta * p_kl_t + (1.0 - beta) * q_kl_t, d_tV.mul_(1.0 - beta)


def weighted_gap(p_tV: Tensor, log_tV: Tensor, other_log_tV: Tensor) -> Tensor:
    """sum p (log p - other) of each row; where p is 0 the term is 0."""
    return torch.where(p_tV > 0, p_tV * (log_tV - other_log_tV), 0.0).sum(dim=-1)
