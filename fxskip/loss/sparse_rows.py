"""From the logits of one chunk to its losses and its gradient under a sparse teacher, in plain PyTorch."""

# t rows of one chunk, V columns of this rank's vocabulary, K entries of a teacher row

from dataclasses import dataclass

import torch
from torch import Tensor

from fxskip.loss.engine import Finish, Rows
from fxskip.loss.head import Head
from fxskip.loss.tails import Sums, coefficients
from fxskip.loss.teacher_rows import TeacherRows
from fxskip.loss.vocabulary import Shard


@dataclass(frozen=True)
class SparseTarget:
    """What both implementations need beside the logits. `share_N` is token_weight / denominator."""

    head: Head
    teacher: TeacherRows
    share_N: Tensor
    tail: str
    shard: Shard


@dataclass(frozen=True)
class Support:
    """The entries of a chunk, equal ids merged into their first: all [t, K]."""

    columns: Tensor  # 0 where there is nothing
    is_first: Tensor  # of equal ids, and on this rank
    p: Tensor  # the sum over equal ids; 0 for all but their first. Of other ranks' tokens too


class TorchRows:
    """A `RowLoss`; the kernels in sparse_kernels.py do the same steps."""

    def __init__(self, target: SparseTarget) -> None:
        self.target = target

    def begin(
        self, product_tV: Tensor, gradient_tV: Tensor | None, rows: Rows, spare: Tensor | None
    ) -> Finish:
        target = self.target
        scaled_tV = target.head.scaled(product_tV)
        slope_tV = target.head.slope(scaled_tV) if gradient_tV is not None else 1.0
        logits_tV = target.head.tempered(scaled_tV)
        teacher = target.teacher.of(rows)
        support = support_of(teacher, target.shard, logits_tV.shape[1], logits_tV.dtype)
        taken_tK = take_out(logits_tV, support)
        sums = sums_of(logits_tV, taken_tK, support, mass_t=support.p.sum(dim=-1))
        exchange = None if target.shard.group is None else target.shard.gathered(torch.stack(sums[:3]))

        def finish() -> Tensor:
            over_ranks = sums
            if exchange is not None:
                every, work = exchange
                work.wait()
                over_ranks = combined(every, sums.mass)
            row = coefficients(target.tail, over_ranks)
            share_t = target.share_N[rows].to(logits_tV.dtype)
            if gradient_tV is not None and gradient_tV.shape[1] > 0:
                d_rest_tV = logits_tV.sub_(row.rest_reference[:, None]).exp_().mul_(row.rest_factor[:, None])
                d_taken_tK = row.support_factor[:, None] * (taken_tK - row.support_reference[:, None]).exp()
                d_taken_tK -= row.p_factor[:, None] * support.p
                # Off the rank and at repeated ids 0 is added; each token of the support gets one number.
                d_tV = d_rest_tV.scatter_add_(
                    1, support.columns, torch.where(support.is_first, d_taken_tK, 0.0)
                )
                d_tV = d_tV.mul_(slope_tV).mul_(share_t[:, None])
                # A narrower gradient lies in the front of the rows that d_tV may still be: not a copy in place.
                gradient_tV.copy_(d_tV.to(gradient_tV.dtype))
            return row.loss * share_t

        if exchange is not None:
            return finish
        loss_t = finish()  # nothing to wait for: the blocks of this chunk need not live beside the next one's
        return lambda: loss_t


def support_of(teacher: TeacherRows, shard: Shard, columns: int, dtype: torch.dtype) -> Support:
    ids_tK, p_tK = teacher.merged(dtype)
    column_tK = ids_tK.long() - shard.first
    is_first_tK = (ids_tK >= 0) & (column_tK >= 0) & (column_tK < columns)
    return Support(column_tK.where(is_first_tK, 0), is_first_tK, p_tK)


def take_out(logits_tV: Tensor, support: Support) -> Tensor:
    """The logits of the support, [t, K]; in `logits_tV` they become -inf."""
    if logits_tV.shape[1] == 0:  # a rank that holds nothing but padding
        return torch.zeros_like(support.p)
    taken_tK = logits_tV.gather(1, support.columns)
    # The smaller of the logit and +inf is the logit: an entry that is not here changes nothing.
    marks_tK = torch.where(support.is_first, -torch.inf, torch.inf).to(logits_tV.dtype)
    logits_tV.scatter_reduce_(1, support.columns, marks_tK, reduce="amin")
    return taken_tK


def sums_of(rest_tV: Tensor, taken_tK: Tensor, support: Support, mass_t: Tensor) -> Sums:
    """Of this rank's columns; the mass is that of the whole row."""
    p_tK = support.p.where(support.is_first, 0.0)
    log_p_tK = torch.where(p_tK > 0, p_tK, 1.0).log()
    cross_t = torch.where(p_tK > 0, p_tK * (log_p_tK - taken_tK), 0.0).sum(dim=-1)
    taken_or_nothing_tK = taken_tK.masked_fill(~support.is_first, -torch.inf)
    if rest_tV.shape[1] == 0:
        rest_t = torch.full_like(mass_t, -torch.inf)
    else:
        rest_t = torch.logsumexp(rest_tV, dim=-1)
    return Sums(rest_t, torch.logsumexp(taken_or_nothing_tK, dim=-1), cross_t, mass_t)


def combined(every_R3t: Tensor, mass_t: Tensor) -> Sums:
    """The sums over the whole vocabulary from those of R ranks; added in rank order, so equal on all."""
    rest_t, support_t = torch.logsumexp(every_R3t[:, :2], dim=0)
    return Sums(rest_t, support_t, every_R3t[:, 2].sum(dim=0), mass_t)
