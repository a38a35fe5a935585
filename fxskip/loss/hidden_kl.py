"""The divergence of two models over the whole vocabulary, from both models' last hidden states."""

# N tokens, D width (may differ between student and teacher), V vocabulary

import torch
import torch.distributed as dist
from torch import Tensor

from fxskip.errors import FxskipError
from fxskip.loss.arguments import (
    DEFAULT_CHUNK_TOKENS,
    as_scalar,
    checked_pair,
    require_number,
    require_whole_number,
)
from fxskip.loss.gradient_rules import wanted_of
from fxskip.loss.implementation import Implementation, checked_logits_dtype, chosen_implementation
from fxskip.loss.operators import hidden_kl_operator
from fxskip.loss.vocabulary import name_of

WHO = "hidden_kl"


def hidden_kl(
    student_hidden: Tensor,
    student_weight: Tensor,
    teacher_hidden: Tensor,
    teacher_weight: Tensor,
    *,
    beta: float = 0.0,
    temperature: float = 1.0,
    token_weight: Tensor | None = None,
    denominator: float | Tensor | None = None,
    chunk_tokens: int = DEFAULT_CHUNK_TOKENS,
    accumulate: int = 2,
    student_bias: Tensor | None = None,
    teacher_bias: Tensor | None = None,
    scale: float = 1.0,
    softcap: float | None = None,
    vocabulary: int | None = None,
    group: dist.ProcessGroup | None = None,
    logits_dtype: torch.dtype | None = None,
    implementation: Implementation = "auto",
    validate: bool = True,
) -> Tensor:
    """Weighted sum over tokens of a divergence in nats, divided by `denominator`; float32 scalar.

    student_hidden  [N, D], float32, bfloat16, float16, or float64 (then the result is float64)
    student_weight  [V, D] of the head. Weights are cast to the dtype of their hidden states; sums are float32, and the
                    gradient of a float32 weight is never rounded to less
    teacher_*       constants: no gradient reaches them, whatever their requires_grad says. Their width may
                    differ from the student's; V may not: a padded logit of 0 is not a probability of 0
    beta            0.0 is KL(teacher || student), 1.0 is KL(student || teacher). Between, with the mixture
                    m = beta teacher + (1 - beta) student: beta KL(teacher || m) + (1 - beta) KL(student || m)
    temperature     divides both models' logits; the result is not multiplied by its square
    token_weight    [N], 0 or more. Rows of weight 0 are skipped, not multiplied: they may hold NaN
    denominator     default: the sum of token_weight (N without weights). Without a counted token the loss is
                    0 and so are the gradients. Over micro-batches or ranks give the global count
    scale, softcap  of both models' logits: logits = softcap * tanh(scale * (hidden W^T + bias) / softcap)
    group, vocabulary
                    as in `sparse_kl`: each rank holds the same rows of both heads, and all hidden states. With beta
                    between 0 and 1 a token is exchanged twice, and the second exchange is under no product
    chunk_tokens, accumulate, logits_dtype, implementation
                    as in `sparse_kl`. Both models' logits have logits_dtype; near the teacher float32 matters
    validate        checks weights and the group's shards by value, for which the host waits

    Four matrix products, no logits kept. Peak extra memory: accumulate + 1 chunks of V logits (2 bytes each for
    bfloat16 "triton", 4 and a few more blocks for "torch"), d weight in float32, d hidden. Can be differentiated
    once.
    """
    if not 0.0 <= require_number(WHO, "beta", beta) <= 1.0:
        raise FxskipError(WHO, f"beta is {beta}", hint="0.0 is forward KL, 1.0 reverse KL, between a mixture")
    reduction = checked_pair(
        WHO,
        student_hidden,
        student_weight,
        teacher_hidden,
        teacher_weight,
        temperature=temperature,
        token_weight=token_weight,
        denominator=denominator,
        chunk_tokens=chunk_tokens,
        student_bias=student_bias,
        teacher_bias=teacher_bias,
        scale=scale,
        softcap=softcap,
    )
    chosen = chosen_implementation(WHO, implementation, student_hidden, scale, teacher_hidden)
    loss: Tensor = hidden_kl_operator(
        student_hidden,
        student_weight,
        student_bias,
        wanted=wanted_of(WHO, student_hidden, student_weight, student_bias),
        who=WHO,
        teacher_hidden=teacher_hidden.detach(),
        teacher_weight=teacher_weight.detach(),
        teacher_bias=None if teacher_bias is None else teacher_bias.detach(),
        token_weight=reduction.weight_N,
        denominator=as_scalar(reduction.denominator, student_hidden),
        beta=float(beta),
        scale=float(scale),
        softcap=None if softcap is None else float(softcap),
        temperature=float(temperature),
        vocabulary=None if vocabulary is None else require_whole_number(WHO, "vocabulary", vocabulary),
        chunk_tokens=reduction.chunk_tokens,
        accumulate=require_whole_number(WHO, "accumulate", accumulate),
        logits_dtype=checked_logits_dtype(WHO, logits_dtype, student_hidden, chosen),
        group=name_of(WHO, group),
        implementation=chosen,
        validate=validate,
    )[0]
    return loss
