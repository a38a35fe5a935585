"""The usual ways to compute what `sparse_kl` computes with tail="truncated": something to beat and to agree with.

dense_sparse_kl             all [N, V] logits at once, in float32, and autograd
forward_chunked_sparse_kl   a chunk of logits at a time, computed again in the backward
full_chunked_sparse_kl      a first pass over all chunks for the loss, a second one that computes every chunk's logits
                            again for its gradient; d weight is added up in the weight's dtype
"""

# N tokens, t tokens in one chunk, D width, V vocabulary (of this rank), K entries of a teacher row

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fxskip.loss.vocabulary import all_gather


def dense_sparse_kl(
    hidden: Tensor, weight: Tensor, ids: Tensor, logp: Tensor, *, group: dist.ProcessGroup | None = None
) -> Tensor:
    """Mean over tokens of sum p (log p - log q), in nats; [N, V] logits in float32."""
    return truncated_kl_sum(summed_backward(hidden, group), weight, ids, logp, group) / len(hidden)


def forward_chunked_sparse_kl(
    hidden: Tensor,
    weight: Tensor,
    ids: Tensor,
    logp: Tensor,
    *,
    chunk_tokens: int = 4096,
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """The same a chunk at a time: autograd keeps no logits, and computes each chunk's again in the backward."""
    shared_ND = summed_backward(hidden, group)
    total = hidden.new_zeros((), dtype=torch.float32)
    for start in range(0, len(hidden), chunk_tokens):
        rows = slice(start, start + chunk_tokens)
        total = total + checkpoint(
            truncated_kl_sum, shared_ND[rows], weight, ids[rows], logp[rows], group, use_reentrant=False
        )
    return total / len(hidden)


def full_chunked_sparse_kl(
    hidden: Tensor,
    weight: Tensor,
    ids: Tensor,
    logp: Tensor,
    *,
    chunk_tokens: int = 4096,
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """Chunked in the forward and in the backward: no intermediate value of either is larger than a chunk."""
    loss: Tensor = TwoPasses.apply(hidden, weight, ids, logp, chunk_tokens, group)  # type: ignore[no-untyped-call]
    return loss


class TwoPasses(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        ids_NK: Tensor,
        logp_NK: Tensor,
        chunk_tokens: int,
        group: dist.ProcessGroup | None,
    ) -> Tensor:
        ctx.save_for_backward(hidden_ND, weight_VD, ids_NK, logp_NK)
        ctx.chunk_tokens, ctx.group = chunk_tokens, group
        total = hidden_ND.new_zeros((), dtype=torch.float32)
        for start in range(0, len(hidden_ND), chunk_tokens):
            rows = slice(start, start + chunk_tokens)
            total += truncated_kl_sum(hidden_ND[rows], weight_VD, ids_NK[rows], logp_NK[rows], group)
        return total / len(hidden_ND)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, d_loss: Tensor) -> Any:
        hidden_ND, weight_VD, ids_NK, logp_NK = ctx.saved_tensors
        d_hidden_ND, d_weight_VD = torch.empty_like(hidden_ND), torch.zeros_like(weight_VD)
        leaf_VD = weight_VD.detach().requires_grad_()
        for start in range(0, len(hidden_ND), ctx.chunk_tokens):
            rows = slice(start, start + ctx.chunk_tokens)
            leaf_tD = hidden_ND[rows].detach().requires_grad_()
            with torch.enable_grad():
                shared_tD = summed_backward(leaf_tD, ctx.group)
                loss = truncated_kl_sum(shared_tD, leaf_VD, ids_NK[rows], logp_NK[rows], ctx.group)
                part_tD, part_VD = torch.autograd.grad(loss, [leaf_tD, leaf_VD], d_loss / len(hidden_ND))
            d_hidden_ND[rows] = part_tD
            d_weight_VD += part_VD
        return d_hidden_ND, d_weight_VD, None, None, None, None


def truncated_kl_sum(
    hidden_tD: Tensor, weight_VD: Tensor, ids_tK: Tensor, logp_tK: Tensor, group: dist.ProcessGroup | None
) -> Tensor:
    logits_tV = (hidden_tD @ weight_VD.T).float()
    first = 0 if group is None else group.rank() * len(weight_VD)
    columns_tK = ids_tK.long() - first
    here_tK = (columns_tK >= 0) & (columns_tK < len(weight_VD))
    taken_tK = logits_tV.gather(1, columns_tK.where(here_tK, 0)).where(here_tK, 0.0)
    normaliser_t = torch.logsumexp(logits_tV, dim=-1)
    if group is not None:
        taken_tK = SumOverRanks.apply(taken_tK, group)  # type: ignore[no-untyped-call]
        normaliser_t = LogSumOverRanks.apply(normaliser_t, group)  # type: ignore[no-untyped-call]
    p_tK = logp_tK.float().exp()
    return (p_tK * (logp_tK.float() - taken_tK + normaliser_t[:, None])).sum()


def summed_backward(hidden_ND: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """`hidden_ND`, whose gradient is the sum over the ranks' shards of the vocabulary."""
    result: Tensor = hidden_ND if group is None else GradientOverRanks.apply(hidden_ND, group)  # type: ignore[no-untyped-call]
    return result


class GradientOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden_ND: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return hidden_ND.view_as(hidden_ND)

    @staticmethod
    def backward(ctx: Any, d_hidden_ND: Tensor) -> Any:
        summed_ND = d_hidden_ND.clone()
        dist.all_reduce(summed_ND, group=ctx.group)
        return summed_ND, None


class SumOverRanks(torch.autograd.Function):
    """The loss after it is the same on all ranks, so each rank's gradient passes as it is."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: dist.ProcessGroup) -> Tensor:
        total = part.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, d_total: Tensor) -> Any:
        return d_total, None


class LogSumOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part_t: Tensor, group: dist.ProcessGroup) -> Tensor:
        every_Rt, work = all_gather(part_t, group)
        work.wait()
        total_t = torch.logsumexp(every_Rt, dim=0)
        ctx.save_for_backward((part_t - total_t).exp())
        return total_t

    @staticmethod
    def backward(ctx: Any, d_total_t: Tensor) -> Any:
        (share_t,) = ctx.saved_tensors
        return d_total_t * share_t, None
