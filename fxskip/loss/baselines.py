"""The three usual ways to compute what `hidden_kl` computes: something to beat, and something to agree with.

They take the same arguments as `hidden_kl` (without beta) and give the same number. What they hold differs:

    dense_kl             several [N, V] float32 blocks between forward and backward
    forward_chunked_kl   several [chunk_tokens, V] blocks; the backward computes each chunk a second time and
                         adds up the gradient of the weight over chunks in its GEMM dtype
    full_chunked_kl      several [chunk_tokens, V] blocks in the forward; after it only the gradients
"""

# N tokens, t tokens in one chunk, D width, V vocabulary

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Self, Unpack

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fxskip.errors import FxskipError
from fxskip.loss.arguments import KLOptions, checked_head, checked_pair, require_weights
from fxskip.loss.engine import Rows
from fxskip.loss.head import Head
from fxskip.loss.products import accumulation_dtype


@dataclass(frozen=True)
class KLInputs:
    """Checked arguments of a KL between two models. The teacher's side is detached."""

    student: Head
    teacher: Head
    teacher_hidden: Tensor
    weight_N: Tensor | None
    denominator: Tensor | float
    chunk_tokens: int

    @classmethod
    def checked(
        cls,
        who: str,
        student_hidden: Tensor,
        student_weight: Tensor,
        teacher_hidden: Tensor,
        teacher_weight: Tensor,
        /,
        **options: Unpack[KLOptions],
    ) -> Self:
        pair = student_hidden, student_weight, teacher_hidden, teacher_weight
        reduction = checked_pair(who, *pair, **options)
        require_weights(who, reduction.weight_N)
        after_gemm: dict[str, Any] = {
            "scale": options.get("scale", 1.0),
            "softcap": options.get("softcap"),
            "temperature": options.get("temperature", 1.0),
        }
        student_bias, teacher_bias = options.get("student_bias"), options.get("teacher_bias")
        student = checked_head(who, "student_", student_hidden, student_weight, student_bias, **after_gemm)
        with torch.no_grad():
            teacher = checked_head(
                who, "teacher_", teacher_hidden, teacher_weight, teacher_bias, **after_gemm
            )
        return cls(student, teacher, teacher_hidden.detach(), *reduction)


def row_chunks(count: int, weight_N: Tensor | None, chunk_tokens: int) -> Iterator[Rows]:
    """Consecutive chunks; with weights only the rows that count: a masked row costs and spoils nothing."""
    if weight_N is None:
        for start in range(0, count, chunk_tokens):
            yield slice(start, min(start + chunk_tokens, count))
    else:
        counted = weight_N.nonzero().flatten()
        for start in range(0, len(counted), chunk_tokens):
            yield counted[start : start + chunk_tokens]


def dense_kl(
    student_hidden: Tensor,
    student_weight: Tensor,
    teacher_hidden: Tensor,
    teacher_weight: Tensor,
    **options: Unpack[KLOptions],
) -> Tensor:
    """All [N, V] logits at once, and autograd; can be differentiated twice. Takes no chunk_tokens."""
    if "chunk_tokens" in options:
        raise FxskipError(
            "dense_kl", "chunk_tokens is given, and there are no chunks", hint="drop the argument"
        )
    inputs = KLInputs.checked(
        "dense_kl", student_hidden, student_weight, teacher_hidden, teacher_weight, **options
    )
    inputs = replace(inputs, chunk_tokens=max(len(student_hidden), 1))
    return sum_of_chunks(inputs, student_hidden, keep_logits=True)


def forward_chunked_kl(
    student_hidden: Tensor,
    student_weight: Tensor,
    teacher_hidden: Tensor,
    teacher_weight: Tensor,
    **options: Unpack[KLOptions],
) -> Tensor:
    """A chunk at a time; its logits are forgotten and computed again in the backward."""
    inputs = KLInputs.checked(
        "forward_chunked_kl", student_hidden, student_weight, teacher_hidden, teacher_weight, **options
    )
    return sum_of_chunks(inputs, student_hidden, keep_logits=False)


def full_chunked_kl(
    student_hidden: Tensor,
    student_weight: Tensor,
    teacher_hidden: Tensor,
    teacher_weight: Tensor,
    **options: Unpack[KLOptions],
) -> Tensor:
    """A chunk at a time, forward and backward, by autograd; forms gradients even under no_grad."""
    inputs = KLInputs.checked(
        "full_chunked_kl", student_hidden, student_weight, teacher_hidden, teacher_weight, **options
    )
    loss: Tensor = GradientByChunks.apply(  # type: ignore[no-untyped-call]
        student_hidden, student_weight, options.get("student_bias"), inputs
    )
    return loss


def sum_of_chunks(inputs: KLInputs, hidden_ND: Tensor, *, keep_logits: bool) -> Tensor:
    # A call without a counted token must have a gradient too (0), so the total starts connected to the
    # inputs: by empty slices, because 0 * NaN would let a masked row back in.
    total = (hidden_ND[:0].sum() + inputs.student.weight_VD[:0].sum()).to(accumulation_dtype(hidden_ND.dtype))
    for rows in row_chunks(len(hidden_ND), inputs.weight_N, inputs.chunk_tokens):
        if keep_logits:
            total = total + chunk_kl(inputs, hidden_ND[rows], rows)
        else:
            total = total + checkpoint(chunk_kl, inputs, hidden_ND[rows], rows, use_reentrant=False)
    return total


def chunk_kl(inputs: KLInputs, hidden_tD: Tensor, rows: Rows) -> Tensor:
    """This chunk's part of the loss, differentiable by autograd."""
    with torch.autocast(hidden_tD.device.type, enabled=False):
        logq_tV = inputs.student.log_probs(inputs.student.logits(hidden_tD))
        with torch.no_grad():
            logp_tV = inputs.teacher.log_probs(inputs.teacher.logits(inputs.teacher_hidden[rows]))
        p_tV = logp_tV.exp()
        loss_t = torch.where(p_tV > 0, p_tV * (logp_tV - logq_tV), 0.0).sum(dim=-1)
        if inputs.weight_N is not None:
            loss_t = loss_t * inputs.weight_N[rows]
        return (loss_t / inputs.denominator).sum()


class GradientByChunks(torch.autograd.Function):
    """Runs autograd on one chunk after the other inside the forward, and keeps only the gradients."""

    @staticmethod
    def forward(
        ctx: Any, hidden_ND: Tensor, weight_VD: Tensor, bias_V: Tensor | None, inputs: KLInputs
    ) -> Tensor:
        arguments = [hidden_ND, weight_VD] if bias_V is None else [hidden_ND, weight_VD, bias_V]
        wide = accumulation_dtype(hidden_ND.dtype)
        total = torch.zeros((), dtype=wide, device=hidden_ND.device)
        formed = [torch.zeros_like(argument, dtype=wide) for argument in arguments]
        for rows in row_chunks(len(hidden_ND), inputs.weight_N, inputs.chunk_tokens):
            loss, d_hidden_tD, *d_head = chunk_gradients(inputs, hidden_ND[rows], rows)
            total += loss
            formed[0][rows] = d_hidden_tD.to(wide)
            for sum_so_far, part in zip(formed[1:], d_head, strict=True):
                sum_so_far += part
        ctx.save_for_backward(*(f.to(a.dtype) for f, a in zip(formed, arguments, strict=True)))
        return total

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        scaled = [saved * grad_output for saved in ctx.saved_tensors]
        return *scaled, *[None] * (4 - len(scaled))


def chunk_gradients(inputs: KLInputs, hidden_tD: Tensor, rows: Rows) -> list[Tensor]:
    """Loss of a chunk, then its gradients by hidden, weight and bias (if any), on leaves made for it."""
    leaf_tD = hidden_tD.detach().requires_grad_()
    weight_VD = inputs.student.weight_VD.detach().requires_grad_()
    bias_V = None if inputs.student.bias_V is None else inputs.student.bias_V.detach().requires_grad_()
    head = replace(inputs.student, weight_VD=weight_VD, bias_V=bias_V)
    with torch.enable_grad():
        loss = chunk_kl(replace(inputs, student=head), leaf_tD, rows)
        leaves = [leaf_tD, weight_VD] if bias_V is None else [leaf_tD, weight_VD, bias_V]
        return [loss.detach(), *torch.autograd.grad(loss, leaves)]
