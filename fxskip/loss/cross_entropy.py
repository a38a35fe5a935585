"""Next-token cross-entropy from the last hidden states: the control that a distillation is compared with."""

# N tokens, t tokens in one chunk, D width, V vocabulary

from typing import Any

import torch
from torch import Tensor

from fxskip.errors import FxskipError
from fxskip.loss.arguments import (
    DEFAULT_CHUNK_TOKENS,
    checked_chunk,
    checked_denominator,
    checked_head,
    checked_hidden,
    checked_token_weight,
    require_same_device,
)
from fxskip.loss.chunked import ChunkLoss, Rows, Task, chunked_loss


def cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    token_weight: Tensor | None = None,
    denominator: float | Tensor | None = None,
    chunk_tokens: int = DEFAULT_CHUNK_TOKENS,
    bias: Tensor | None = None,
    scale: float = 1.0,
    softcap: float | None = None,
) -> Tensor:
    """Weighted sum over tokens of -log q[label] in nats, divided by `denominator`; float32 scalar.

    `labels` is [N], int64: row n of `hidden` predicts labels[n], so the caller has shifted them. A row with
    label -100 has weight 0. All else is as in `hidden_kl`, the chunks and the gradient in the forward too.
    """
    who = "cross_entropy"
    checked_hidden(who, "hidden", hidden)
    with torch.no_grad():
        head = checked_head(who, "", hidden, weight, bias, scale=scale, softcap=softcap, temperature=1.0)
        counted_N = checked_labels(who, hidden, labels, head.weight_VD.shape[0])
        given_N = checked_token_weight(who, hidden, token_weight)
        weight_N = counted_N if given_N is None else given_N * counted_N
    task = Task(
        who,
        head,
        negative_log_likelihood(labels),
        weight_N,
        checked_denominator(who, hidden, weight_N, denominator),
        checked_chunk(who, chunk_tokens),
    )
    return chunked_loss(task, hidden, weight, bias)


def negative_log_likelihood(labels_N: Tensor) -> ChunkLoss:
    """-log q[label]; its gradient by the logits is q minus the one-hot label."""

    def chunk_loss(logq_tV: Tensor, rows: Rows, *, with_gradient: bool) -> tuple[Tensor, Tensor | None]:
        labels_t1 = labels_N[rows][:, None]
        loss_t = -logq_tV.gather(1, labels_t1).squeeze(1)
        if not with_gradient:
            return loss_t, None
        q_tV = logq_tV.exp_()
        return loss_t, q_tV.scatter_add_(1, labels_t1, -torch.ones_like(labels_t1, dtype=q_tV.dtype))

    return chunk_loss


def checked_labels(who: str, hidden: Tensor, labels: Any, vocabulary: int) -> Tensor:
    """1.0 for each row that has a label and 0.0 for each -100, in the dtype of the sums."""
    count = hidden.shape[0]
    if not isinstance(labels, Tensor) or labels.dtype != torch.int64 or list(labels.shape) != [count]:
        found = (
            f"{labels.dtype} {list(labels.shape)}" if isinstance(labels, Tensor) else type(labels).__name__
        )
        raise FxskipError(
            who, f"labels is {found}", hint=f"labels is int64 [{count}], one id or -100 a token"
        )
    require_same_device(who, hidden=hidden, labels=labels)
    bad = (labels != -100) & ((labels < 0) | (labels >= vocabulary))
    if bool(bad.any()):
        at = int(bad.nonzero()[0])
        raise FxskipError(
            who, f"labels[{at}] is {int(labels[at])}", hint=f"ids are 0 to {vocabulary - 1}, or -100"
        )
    return (labels != -100).to(torch.float64 if hidden.dtype == torch.float64 else torch.float32)
