"""Next-token cross-entropy from the last hidden states: the control that a distillation is compared with."""

# N tokens, t tokens in one chunk, D width, V vocabulary

from typing import Any

import torch
from torch import Tensor

from fxskip.errors import FxskipError
from fxskip.loss.arguments import (
    DEFAULT_CHUNK_TOKENS,
    as_scalar,
    checked_chunk,
    checked_denominator,
    checked_hidden,
    checked_token_weight,
    require_head,
    require_same_device,
    require_weights,
)
from fxskip.loss.gradient_rules import wanted_of
from fxskip.loss.implementation import chosen_implementation
from fxskip.loss.operators import sparse_kl_operator
from fxskip.loss.products import accumulation_dtype


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
    validate: bool = True,
) -> Tensor:
    """Weighted sum over tokens of -log q[label] in nats, divided by `denominator`; float32 scalar.

    `labels` is [N], int64: row n of `hidden` predicts labels[n], so the caller has shifted them. A row with
    label -100 has weight 0. All else is as in `sparse_kl`, of which this is the case of one token with all the
    mass; logits are float32. `validate` checks labels and weights by value, for which the host waits.
    """
    who = "cross_entropy"
    checked_hidden(who, "hidden", hidden)
    require_head(who, "", hidden, weight, bias, scale=scale, softcap=softcap, temperature=1.0)
    require_labels(who, hidden, labels)
    given_N = checked_token_weight(who, hidden, token_weight)
    weight_N = weight_of_labels(
        labels, given_N, accumulation_dtype(hidden.dtype), weight.shape[0], who, validate
    )
    # A label is a teacher that puts all its mass on one token.
    ids_N1 = labels.clamp_min(0)[:, None]
    loss: Tensor = sparse_kl_operator(
        hidden,
        weight,
        bias,
        wanted=wanted_of(who, hidden, weight, bias),
        who=who,
        ids=ids_N1,
        logp=torch.zeros_like(ids_N1, dtype=torch.float32),
        counts=None,
        token_weight=weight_N,
        denominator=as_scalar(checked_denominator(who, hidden, weight_N, denominator), hidden),
        scale=float(scale),
        softcap=None if softcap is None else float(softcap),
        temperature=1.0,
        tail="truncated",
        vocabulary=None,
        chunk_tokens=checked_chunk(who, chunk_tokens),
        accumulate=2,
        logits_dtype=accumulation_dtype(hidden.dtype),
        group="",
        implementation=chosen_implementation(who, "auto", hidden, scale),
        validate=validate,
    )[0]
    return loss


def require_labels(who: str, hidden: Tensor, labels: Any) -> None:
    count = hidden.shape[0]
    if not isinstance(labels, Tensor) or labels.dtype != torch.int64 or list(labels.shape) != [count]:
        found = (
            f"{labels.dtype} {list(labels.shape)}" if isinstance(labels, Tensor) else type(labels).__name__
        )
        raise FxskipError(
            who, f"labels is {found}", hint=f"labels is int64 [{count}], one id or -100 a token"
        )
    require_same_device(who, hidden=hidden, labels=labels)


@torch.library.custom_op("fxskip::weight_of_labels", mutates_args=())
def weight_of_labels(
    labels: Tensor,
    token_weight: Tensor | None,
    dtype: torch.dtype,
    vocabulary: int,
    who: str,
    validate: bool,
) -> Tensor:
    """[N]: the weight of each token, 0 for each -100. An operator, so that torch.compile keeps the checks of values."""
    if validate:
        require_weights(who, token_weight)
        bad = (labels != -100) & ((labels < 0) | (labels >= vocabulary))
        if bool(bad.any()):
            at = int(bad.nonzero()[0])
            raise FxskipError(
                who, f"labels[{at}] is {int(labels[at])}", hint=f"ids are 0 to {vocabulary - 1}, or -100"
            )
    counted_N = (labels != -100).to(dtype)
    return counted_N if token_weight is None else counted_N * token_weight


@weight_of_labels.register_fake
def _(labels: Tensor, token_weight: Tensor | None, dtype: torch.dtype, *_: Any) -> Tensor:
    return torch.empty_like(labels, dtype=dtype)
