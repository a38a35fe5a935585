"""The three usual ways to compute what `hidden_kl` computes, to agree with; sparse_baselines.py has those to beat.

They take the same arguments as `hidden_kl` (without beta) and give the same number. What they hold differs:

    dense_kl             several [N, V] float32 blocks between forward and backward
    forward_chunked_kl   several [chunk_tokens, V] blocks; the backward computes each chunk a second time and
                         adds up the gradient of the weight over chunks in its GEMM dtype
    full_chunked_kl      several [chunk_tokens, V] blocks: a first pass for the loss, and in the backward a second one
                         that computes every chunk again for its gradient; the weight's is added up in its dtype
"""

# N tokens, t tokens in one chunk, D width, V vocabulary

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Self, Unpack

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fxskip.errors import FxskipError
from fxskip.loss.arguments import KLOptions, checked_head, checked_pair, require_denominator, require_weights
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
        if isinstance(reduction.denominator, Tensor):
            require_denominator(who, reduction.denominator)
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
    """A chunk at a time, in the forward and in the backward: no value of either is larger than a chunk's."""
    inputs = KLInputs.checked(
        "full_chunked_kl", student_hidden, student_weight, teacher_hidden, teacher_weight, **options
    )
    loss: Tensor = TwoPasses.apply(  # type: ignore[no-untyped-call]
        student_hidden, student_weight, options.get("student_bias"), inputs
    )
    return loss


def sum_of_chunks(inputs: KLInputs, hidden_ND: Tensor, *, keep_logits: bool) -> Tensor:
    # A call without a counted token must have a gradient too (0), so the total starts connected to the
    # inputs: by empty slices, because 0 * NaN would let a masked row back in.
    wide = accumulation_dtype(hidden_ND.dtype)
    total = hidden_ND[:0].sum().to(wide) + inputs.student.weight_VD[:0].sum().to(wide)
    if inputs.student.bias_V is not None:
        total = total + inputs.student.bias_V[:0].sum().to(wide)
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
        loss_t = torch.where(p_tV == 0, 0.0, p_tV * (logp_tV - logq_tV)).sum(dim=-1)
        if inputs.weight_N is not None:
            loss_t = loss_t * inputs.weight_N[rows]
        return (loss_t / inputs.denominator).sum()


class TwoPasses(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_ND: Tensor, weight_VD: Tensor, bias_V: Tensor | None, inputs: KLInputs
    ) -> Tensor:
        ctx.save_for_backward(hidden_ND, weight_VD, bias_V)
        ctx.inputs = inputs
        total = torch.zeros((), dtype=accumulation_dtype(hidden_ND.dtype), device=hidden_ND.device)
        for rows in row_chunks(len(hidden_ND), inputs.weight_N, inputs.chunk_tokens):
            total += chunk_kl(inputs, hidden_ND[rows], rows)
        return total

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, d_loss: Tensor) -> Any:
        inputs = ctx.inputs
        hidden_ND, *head = (x for x in ctx.saved_tensors if x is not None)
        d_hidden_ND, *d_head = (torch.zeros_like(argument) for argument in (hidden_ND, *head))
        for rows in row_chunks(len(hidden_ND), inputs.weight_N, inputs.chunk_tokens):
            d_hidden_tD, *parts = chunk_gradients(inputs, hidden_ND[rows], rows, d_loss)
            d_hidden_ND[rows] = d_hidden_tD
            for total, part in zip(d_head, parts, strict=True):
                total += part.to(total.dtype)
        return d_hidden_ND, *d_head, *[None] * (3 - len(d_head))


def chunk_gradients(inputs: KLInputs, hidden_tD: Tensor, rows: Rows, d_loss: Tensor) -> tuple[Tensor, ...]:
    """A chunk's gradients by hidden, weight and bias (if any), on leaves made for it."""
    leaf_tD = hidden_tD.detach().requires_grad_()
    weight_VD = inputs.student.weight_VD.detach().requires_grad_()
    bias_V = None if inputs.student.bias_V is None else inputs.student.bias_V.detach().requires_grad_()
    head = replace(inputs.student, weight_VD=weight_VD, bias_V=bias_V)
    with torch.enable_grad():
        loss = chunk_kl(replace(inputs, student=head), leaf_tD, rows)
        leaves = [leaf_tD, weight_VD] if bias_V is None else [leaf_tD, weight_VD, bias_V]
        return torch.autograd.grad(loss, leaves, d_loss)
