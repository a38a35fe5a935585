"""The engine of the chunked losses: the gradient is formed in the forward, a chunk of tokens at a time.

A loss whose value needs the logits of a chunk also has, at that moment, all that its gradient needs. Forming
the gradient there means three GEMMs (logits, d hidden, d weight), none done twice, and no logits kept: what
survives the forward is d hidden [N, D] and d weight [V, D]. The backward multiplies them by one number.
"""

# N tokens of the call, t tokens in one chunk (t <= chunk_tokens), D width, V vocabulary

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from fxskip.errors import FxskipError
from fxskip.loss.head import Head
from fxskip.loss.products import accumulation_dtype, gemm_operand, multiply_into, wide_matmul

Rows = slice | Tensor


class ChunkLoss(Protocol):
    def __call__(self, logq_tV: Tensor, rows: Rows, *, with_gradient: bool) -> tuple[Tensor, Tensor | None]:
        """Loss of each token of a chunk, and its gradient by the tempered logits.

        `logq_tV` are the student's log-probabilities; the rule may overwrite them.
        """


@dataclass(frozen=True)
class Task:
    """Everything of one call that is not differentiated."""

    who: str
    head: Head
    chunk_loss: ChunkLoss
    weight_N: Tensor | None
    denominator: Tensor | float
    chunk_tokens: int


@dataclass(frozen=True)
class Gradients:
    """Where the chunks add what they form; None for an argument that wants no gradient."""

    hidden_ND: Tensor | None
    weight_VD: Tensor | None
    bias_V: Tensor | None

    def is_wanted(self) -> bool:
        return any(total is not None for total in (self.hidden_ND, self.weight_VD, self.bias_V))


NO_GRADIENTS = Gradients(None, None, None)


def row_chunks(count: int, weight_N: Tensor | None, chunk_tokens: int) -> Iterator[Rows]:
    """Consecutive chunks; with weights only the rows that count: a masked row costs and spoils nothing."""
    if weight_N is None:
        for start in range(0, count, chunk_tokens):
            yield slice(start, min(start + chunk_tokens, count))
    else:
        counted = weight_N.nonzero().flatten()
        for start in range(0, len(counted), chunk_tokens):
            yield counted[start : start + chunk_tokens]


def run_chunks(task: Task, hidden_ND: Tensor, gradients: Gradients) -> Tensor:
    """The loss; adds to whatever `gradients` asks for."""
    total = torch.zeros((), dtype=accumulation_dtype(hidden_ND.dtype), device=hidden_ND.device)
    for rows in row_chunks(hidden_ND.shape[0], task.weight_N, task.chunk_tokens):
        total += run_chunk(task, hidden_ND[rows], rows, gradients)
    return total


def run_chunk(task: Task, hidden_tD: Tensor, rows: Rows, gradients: Gradients) -> Tensor:
    """The part of the loss that `rows` contribute; adds their part to `gradients`."""
    logits_tV = task.head.logits(hidden_tD)
    slope_tV = task.head.slope(logits_tV) if gradients.is_wanted() else 1.0
    logq_tV = task.head.log_probs(logits_tV)
    del logits_tV  # one block of [t, V] less while the next ones are made
    loss_t, d_logits_tV = task.chunk_loss(logq_tV, rows, with_gradient=gradients.is_wanted())
    share_t = torch.ones_like(loss_t) if task.weight_N is None else task.weight_N[rows]
    share_t = share_t / task.denominator
    if d_logits_tV is not None:
        # Scaled before it is rounded to the dtype of the GEMMs, so that it is rounded once.
        d_logits_tV.mul_(slope_tV).mul_(share_t[:, None])
        add_gradients(task.head, hidden_tD, d_logits_tV, rows, gradients)
    return (loss_t * share_t).sum()


def add_gradients(
    head: Head, hidden_tD: Tensor, d_logits_tV: Tensor, rows: Rows, gradients: Gradients
) -> None:
    if gradients.bias_V is not None:
        gradients.bias_V.add_(d_logits_tV.sum(dim=0))
    d_operand_tV = d_logits_tV.to(head.weight_VD.dtype)
    if gradients.hidden_ND is not None:
        # Nothing else is added to these rows: one rounding, to the dtype of the hidden states.
        gradients.hidden_ND[rows] = wide_matmul(d_operand_tV, head.weight_VD).to(gradients.hidden_ND.dtype)
    if gradients.weight_VD is not None:
        multiply_into(gradients.weight_VD, d_operand_tV.T, gemm_operand(hidden_tD), add=True)


class GradientInForward(torch.autograd.Function):
    """Hands autograd the gradients that the chunks formed."""

    @staticmethod
    def forward(ctx: Any, hidden_ND: Tensor, weight_VD: Tensor, bias_V: Tensor | None, task: Task) -> Tensor:
        wide = accumulation_dtype(hidden_ND.dtype)
        needs_hidden, needs_weight, needs_bias, _ = ctx.needs_input_grad
        formed = Gradients(
            torch.zeros_like(hidden_ND, memory_format=torch.contiguous_format) if needs_hidden else None,
            torch.zeros_like(weight_VD, dtype=wide) if needs_weight else None,
            torch.zeros_like(bias_V, dtype=wide) if bias_V is not None and needs_bias else None,
        )
        total = run_chunks(task, hidden_ND, formed)
        ctx.who = task.who
        ctx.save_for_backward(
            formed.hidden_ND,
            None if formed.weight_VD is None else formed.weight_VD.to(weight_VD.dtype),
            None if formed.bias_V is None or bias_V is None else formed.bias_V.to(bias_V.dtype),
        )
        return total

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        if torch.is_grad_enabled():  # only with create_graph=True
            raise FxskipError(
                ctx.who,
                "create_graph=True asks for a gradient of the gradient, and there is none: "
                "the gradient was formed in the forward, as a constant",
                hint="drop create_graph=True, or use fxskip.loss.dense_kl",
            )
        # Not in place: with retain_graph=True the saved gradients are used again.
        return *(None if saved is None else saved * grad_output for saved in ctx.saved_tensors), None


def chunked_loss(task: Task, hidden_ND: Tensor, weight_VD: Tensor, bias_V: Tensor | None) -> Tensor:
    """The loss as a scalar in the accumulation dtype, differentiable by those of the three that want it."""
    # The dtypes are chosen here; an autocast region around the call would choose others.
    with torch.autocast(hidden_ND.device.type, enabled=False):
        wants_gradient = any(x is not None and x.requires_grad for x in (hidden_ND, weight_VD, bias_V))
        if not (torch.is_grad_enabled() and wants_gradient):
            with torch.no_grad():
                return run_chunks(task, hidden_ND, NO_GRADIENTS)
        loss: Tensor = GradientInForward.apply(hidden_ND, weight_VD, bias_V, task)  # type: ignore[no-untyped-call]
        return loss
