"""KL(teacher || student) over the whole vocabulary, from both models' last hidden states."""

# N tokens, t tokens in one chunk, D width (may differ between student and teacher), V vocabulary

import torch
from torch import Tensor

from fxskip.errors import FxskipError
from fxskip.loss.arguments import DEFAULT_CHUNK_TOKENS, KLInputs
from fxskip.loss.chunked import ChunkLoss, Rows, Task, chunked_loss
from fxskip.loss.head import Head


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
    student_bias: Tensor | None = None,
    teacher_bias: Tensor | None = None,
    scale: float = 1.0,
    softcap: float | None = None,
) -> Tensor:
    """Weighted sum over tokens of KL(teacher || student) in nats, divided by `denominator`; float32 scalar.

    student_hidden  [N, D], float32, bfloat16, float16, or float64 (then the result is float64)
    student_weight  [V, D] of the head. Weights are cast to the dtype of their hidden states; products and
                    sums are float32, and the gradient of a float32 weight is never rounded to less
    teacher_*       constants: no gradient reaches them, whatever their requires_grad says. Their width may
                    differ from the student's; V may not: a padded logit of 0 is not a probability of 0
    beta            0.0 is forward KL, the only one that exists today
    temperature     divides both models' logits; the result is not multiplied by its square
    token_weight    [N], 0 or more. Rows of weight 0 are skipped, not multiplied: they may hold NaN
    denominator     default: the sum of token_weight (N without weights). Without a counted token the loss is
                    0 and so are the gradients. Over micro-batches or ranks give the global count
    scale, softcap  of both models' logits: logits = softcap * tanh(scale * (hidden W^T + bias) / softcap)

    Peak extra memory is a few [chunk_tokens, V] float32 blocks, d weight in float32, and for low-precision
    inputs outside CUDA a float32 copy of each weight. Can be differentiated once.
    """
    who = "hidden_kl"
    if beta != 0.0:
        raise FxskipError(
            who,
            f"beta={beta} is a mixture of forward and reverse KL, which is not built",
            hint="beta=0.0, forward KL",
        )
    with torch.no_grad():  # the engine writes the gradients itself; a graph here would only hold memory
        inputs = KLInputs.checked(
            who,
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
    task = Task(
        who,
        inputs.student,
        forward_kl(inputs.teacher_hidden, inputs.teacher),
        inputs.weight_N,
        inputs.denominator,
        inputs.chunk_tokens,
    )
    return chunked_loss(task, student_hidden, student_weight, student_bias)


def forward_kl(teacher_hidden_ND: Tensor, teacher: Head) -> ChunkLoss:
    """sum p (log p - log q) over the vocabulary; its gradient by the student's logits is q - p."""

    def chunk_loss(logq_tV: Tensor, rows: Rows, *, with_gradient: bool) -> tuple[Tensor, Tensor | None]:
        logp_tV = teacher.log_probs(teacher.logits(teacher_hidden_ND[rows]))
        p_tV = logp_tV.exp()
        # A token that the teacher excludes (bias -inf, or p below the smallest float) adds 0, not 0 * inf.
        gap_tV = logp_tV.sub_(logq_tV).masked_fill_(p_tV == 0, 0.0)
        loss_t = gap_tV.mul_(p_tV).sum(dim=-1)
        return loss_t, logq_tV.exp_().sub_(p_tV) if with_gradient else None

    return chunk_loss
