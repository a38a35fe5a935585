"""KL(teacher || student) where the teacher is known by a few tokens a row: the loss of offline distillation."""

# N tokens, D width, V vocabulary, K entries of a teacher row

import torch
import torch.distributed as dist
from torch import Tensor

from fxskip.loss.arguments import (
    DEFAULT_CHUNK_TOKENS,
    as_scalar,
    checked_chunk,
    checked_denominator,
    checked_hidden,
    checked_token_weight,
    require_head,
    require_whole_number,
)
from fxskip.loss.gradient_rules import wanted_of
from fxskip.loss.implementation import Implementation, checked_logits_dtype, chosen_implementation
from fxskip.loss.operators import sparse_kl_operator
from fxskip.loss.tails import Tail, checked_tail
from fxskip.loss.teacher_rows import checked_teacher
from fxskip.loss.vocabulary import name_of

WHO = "sparse_kl"


def sparse_kl(
    hidden: Tensor,
    weight: Tensor,
    ids: Tensor,
    logp: Tensor,
    *,
    counts: Tensor | None = None,
    bias: Tensor | None = None,
    scale: float = 1.0,
    softcap: float | None = None,
    temperature: float = 1.0,
    tail: Tail = "truncated",
    token_weight: Tensor | None = None,
    denominator: float | Tensor | None = None,
    chunk_tokens: int = DEFAULT_CHUNK_TOKENS,
    accumulate: int = 2,
    vocabulary: int | None = None,
    group: dist.ProcessGroup | None = None,
    logits_dtype: torch.dtype | None = None,
    implementation: Implementation = "auto",
    validate: bool = True,
) -> Tensor:
    """Weighted sum over tokens of KL(teacher || student) in nats, divided by `denominator`; float32 scalar.

    hidden          [N, D] of the student, float32, bfloat16, float16, or float64 (then the result is float64)
    weight          [V, D] of its head, cast to the dtype of `hidden`; its gradient is summed in float32 and, for a
                    float32 weight, never rounded to less. A frozen head costs no memory and no product
    ids, logp       [N, K], int64 or int32, and a float dtype: tokens and their natural log-probabilities by the
                    teacher, over its whole vocabulary, at this temperature. Equal ids in a row add up. K may be V:
                    above 1024 entries the kernels have each chunk's rows sorted first
    counts          [N], whole numbers: only the first counts[n] entries of row n are given. Default: all K
    bias, scale, softcap, temperature
                    logits = softcap * tanh(scale * (hidden W^T + bias) / softcap) / temperature, in this order.
                    The result is not multiplied by the square of the temperature
    tail            truncated, ghost, renormalised, subset: what is said of tokens off the support. See
                    fxskip.loss.tails. `truncated` has the minimum `truncated_minimum`, which is not 0
    token_weight    [N], 0 or more. Rows of weight 0 are left out of all products: they may hold NaN. The host waits
                    for their number
    denominator     default: the sum of token_weight (N without weights). Over micro-batches or ranks give the
                    global count. Without a counted token the loss is 0 and so are the gradients
    chunk_tokens    logits exist for at most this many tokens at a time ...
    accumulate      ... and for this many chunks, whose part of d weight is one product; 1 takes the least memory
    vocabulary      number of tokens, where `weight` has more rows: those after them are padding, out of the
                    normaliser and without gradient. Default: all rows
    group           each rank holds consecutive rows of the head in rank order, and the same hidden states and
                    teacher. Loss and d hidden are those of the whole vocabulary, the same on all ranks; the parts
                    of d hidden are added up in the dtype of `hidden`
    logits_dtype    for "triton", since "torch" has float32 anyway: torch.float32 keeps the logits of bfloat16 inputs in
                    float32, for twice the memory of a chunk and more time. Worth it where the student is close to the
                    teacher: in bfloat16 a logit z is off by up to |z| / 256, and q by that fraction of itself
    implementation  "triton": CUDA, bfloat16 or float32. "torch": anywhere; logits in float32. "auto": "triton" on
                    CUDA, with a warning where that cannot run, else "torch"
    validate        checks ids, logp, counts, weights and the group's shards by value, for which the host waits.
                    Without it wrong values give wrong results, and the shards of `group` must be of equal size

    Peak extra memory: accumulate * chunk_tokens rows of V logits (2 bytes each for bfloat16 "triton", 4 and a few
    more blocks for "torch"), d weight in float32, d hidden; docs/loss.md has it to the byte. The gradients are formed
    in this call: its backward only multiplies them, its forward under activation checkpointing does all the work twice,
    and a gradient of the gradient is refused. FxskipError names a bad argument.
    """
    checked_hidden(WHO, "hidden", hidden)
    require_head(WHO, "", hidden, weight, bias, scale=scale, softcap=softcap, temperature=temperature)
    teacher = checked_teacher(WHO, hidden, ids, logp, counts)
    chosen = chosen_implementation(WHO, implementation, hidden, scale)
    weight_N = checked_token_weight(WHO, hidden, token_weight)
    loss: Tensor = sparse_kl_operator(
        hidden,
        weight,
        bias,
        wanted=wanted_of(WHO, hidden, weight, bias),
        who=WHO,
        ids=teacher.ids,
        logp=teacher.logp,
        counts=teacher.counts,
        token_weight=weight_N,
        denominator=as_scalar(checked_denominator(WHO, hidden, weight_N, denominator), hidden),
        scale=float(scale),
        softcap=None if softcap is None else float(softcap),
        temperature=float(temperature),
        tail=checked_tail(WHO, tail),
        vocabulary=None if vocabulary is None else require_whole_number(WHO, "vocabulary", vocabulary),
        chunk_tokens=checked_chunk(WHO, chunk_tokens),
        accumulate=require_whole_number(WHO, "accumulate", accumulate),
        logits_dtype=checked_logits_dtype(WHO, logits_dtype, hidden, chosen),
        group=name_of(WHO, group),
        implementation=chosen,
        validate=validate,
    )[0]
    return loss
