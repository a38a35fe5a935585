"""How far two models' hidden states lie apart: a loss beside the KL, in a pass of its own over chunks of tokens."""

# N tokens, t tokens in one chunk, D width

from collections.abc import Callable
from typing import Literal, get_args

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
    require_denominator,
    require_same_device,
    require_weights,
)
from fxskip.loss.gradient_rules import register_gradient_rules, wanted_of
from fxskip.loss.products import accumulation_dtype, gradient_dtype

Kind = Literal["mse", "cosine"]
WHO = "feature_loss"


def feature_loss(
    student_hidden: Tensor,
    teacher_hidden: Tensor,
    *,
    kind: Kind = "mse",
    token_weight: Tensor | None = None,
    denominator: float | Tensor | None = None,
    chunk_tokens: int = DEFAULT_CHUNK_TOKENS,
    validate: bool = True,
) -> Tensor:
    """Weighted sum over tokens of a distance of hidden states, divided by `denominator`; float32 scalar.

    student_hidden  [N, D], any float dtype (float64: the result is float64)
    teacher_hidden  [N, D]: a constant
    kind            "mse": mean over D of the squared difference. "cosine": 1 minus the cosine of the angle; 1, without
                    gradient, where one of the two is 0
    token_weight, denominator
                    as in `hidden_kl`, to which this can be added with the same values
    validate        checks the weights by value, for which the host waits

    For two tensors of one layer: `fxskip.distill` compares the streams of all layers, each relative to its size, by a
    loss of its own. Computed in float32 a chunk at a time. The gradient is formed in this call, which holds d hidden
    until the backward.
    """
    checked_hidden(WHO, "student_hidden", student_hidden)
    checked_hidden(WHO, "teacher_hidden", teacher_hidden)
    require_same_device(WHO, student_hidden=student_hidden, teacher_hidden=teacher_hidden)
    if student_hidden.shape != teacher_hidden.shape:
        raise FxskipError(
            WHO,
            f"student_hidden is {list(student_hidden.shape)}, teacher_hidden {list(teacher_hidden.shape)}",
            hint="both are [N, D], of the same tokens and the same width",
        )
    if kind not in get_args(Kind):
        raise FxskipError(WHO, f"kind is {kind!r}", hint="kind is mse or cosine")
    weight_N = checked_token_weight(WHO, student_hidden, token_weight, name="student_hidden")
    loss: Tensor = feature_loss_operator(
        student_hidden,
        teacher_hidden.detach(),
        None,
        wanted_of(WHO, student_hidden, teacher_hidden.detach(), None),
        WHO,
        kind,
        weight_N,
        as_scalar(checked_denominator(WHO, student_hidden, weight_N, denominator), student_hidden),
        checked_chunk(WHO, chunk_tokens),
        validate,
    )[0]
    return loss


@torch.library.custom_op("fxskip::feature_loss", mutates_args=())
def feature_loss_operator(
    hidden: Tensor,
    teacher_hidden: Tensor,
    bias: Tensor | None,
    wanted: list[bool],
    who: str,
    kind: str,
    token_weight: Tensor | None,
    denominator: Tensor,
    chunk_tokens: int,
    validate: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """In the shape that `register_gradient_rules` knows; the teacher stands where others have their weight."""
    if validate:
        require_weights(who, token_weight)
        require_denominator(who, denominator)
    distance = {"mse": squared_difference, "cosine": one_minus_cosine}[kind]
    wide = accumulation_dtype(hidden.dtype)
    loss = torch.zeros((), dtype=torch.float64, device=hidden.device)
    d_hidden_ND = hidden.new_empty(0)
    if wanted[0]:
        kept = gradient_dtype(hidden.dtype)
        d_hidden_ND = torch.zeros_like(hidden, dtype=kept, memory_format=torch.contiguous_format)
    counted_n = None if token_weight is None else token_weight.nonzero().flatten()
    for start in range(0, len(hidden) if counted_n is None else len(counted_n), chunk_tokens):
        part = slice(start, start + chunk_tokens)
        rows = part if counted_n is None else counted_n[part]
        share_t = (
            hidden.new_ones(1, dtype=wide) if token_weight is None else token_weight[rows]
        ) / denominator
        loss_t, gradient = distance(hidden[rows].to(wide), teacher_hidden[rows].to(wide))
        loss += (loss_t * share_t).sum(dtype=torch.float64)
        if wanted[0]:
            d_hidden_ND[rows] = (gradient() * share_t[:, None]).to(d_hidden_ND.dtype)
    return loss.to(wide), d_hidden_ND, hidden.new_empty(0), hidden.new_empty(0)


Distance = tuple[Tensor, Callable[[], Tensor]]  # [t], and what forms its gradient by x


def squared_difference(x_tD: Tensor, y_tD: Tensor) -> Distance:
    gap_tD = x_tD - y_tD
    return gap_tD.square().mean(dim=-1), lambda: gap_tD * (2.0 / max(x_tD.shape[1], 1))


def one_minus_cosine(x_tD: Tensor, y_tD: Tensor) -> Distance:
    """The gradient of the cosine by x is (y/|y| - cosine x/|x|) / |x|."""
    x_norm_t1, y_norm_t1 = x_tD.norm(dim=-1, keepdim=True), y_tD.norm(dim=-1, keepdim=True)
    is_defined_t1 = (x_norm_t1 != 0) & (y_norm_t1 != 0)  # NaN is: it must not pass for a length of 0
    x_unit_tD = x_tD / x_norm_t1.where(is_defined_t1, 1.0)
    y_unit_tD = y_tD / y_norm_t1.where(is_defined_t1, 1.0)
    cosine_t1 = (x_unit_tD * y_unit_tD).sum(dim=-1, keepdim=True)

    def gradient() -> Tensor:
        d_tD = (cosine_t1 * x_unit_tD - y_unit_tD) / x_norm_t1.where(is_defined_t1, 1.0)
        return torch.where(is_defined_t1, d_tD, 0.0)

    return 1.0 - cosine_t1.squeeze(1), gradient


register_gradient_rules(feature_loss_operator)
