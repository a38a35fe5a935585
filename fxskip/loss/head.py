"""From the last hidden state to log-probabilities: the only part of a model that the losses recompute."""

# t tokens of one chunk, D width, V vocabulary

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Head:
    """log_softmax(softcap(scale * (hidden W^T + bias)) / temperature), in this order.

    `weight_VD` is already a GEMM operand for the dtype of the hidden states (see `gemm_operand`): converted
    once, not once a chunk.
    """

    weight_VD: Tensor
    bias_V: Tensor | None
    scale: float
    softcap: float | None
    temperature: float

    def logits(self, hidden_tD: Tensor) -> Tensor:
        """[t, V] logits before the softcap, in the accumulation dtype."""
        logits_tV = wide_matmul(gemm_operand(hidden_tD), self.weight_VD.T)
        if self.bias_V is not None:
            logits_tV = logits_tV + self.bias_V.to(logits_tV.dtype)
        return logits_tV if self.scale == 1.0 else logits_tV * self.scale

    def log_probs(self, logits_tV: Tensor) -> Tensor:
        if self.softcap is not None:
            logits_tV = self.softcap * torch.tanh(logits_tV / self.softcap)
        if self.temperature != 1.0:
            logits_tV = logits_tV / self.temperature
        return torch.log_softmax(logits_tV, dim=-1)

    def slope(self, logits_tV: Tensor) -> Tensor | float:
        """Derivative of what enters the softmax by hidden W^T + bias, given the logits before the softcap."""
        factor = self.scale / self.temperature
        if self.softcap is None:
            return factor
        return (1.0 - torch.tanh(logits_tV / self.softcap).square()) * factor


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """float32 for every input but float64, which is kept: gradient checks need it."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def gemm_operand(matrix: Tensor) -> Tensor:
    """`matrix` in a dtype whose products can be had in the accumulation dtype.

    A product rounded to bfloat16 is useless towards the end of a distillation: where student and teacher
    almost agree, the rounding of the logits is larger than their difference. CUDA multiplies bfloat16 into
    float32; elsewhere the operand is widened first. float16 is widened too: the gradients of single logits,
    divided by the number of tokens, fall below its range.
    """
    if matrix.is_cuda and matrix.dtype == torch.bfloat16:
        return matrix
    return matrix.to(accumulation_dtype(matrix.dtype))


def wide_matmul(a: Tensor, b: Tensor) -> Tensor:
    """a @ b in the accumulation dtype; both are GEMM operands."""
    wide = accumulation_dtype(a.dtype)
    if a.dtype == wide:
        return a @ b
    if torch.is_grad_enabled():  # torch.mm has no derivative when it is given out_dtype
        return a.to(wide) @ b.to(wide)
    return torch.mm(a, b, out_dtype=wide)


def add_matmul_(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a @ b in the dtype of `total`, the accumulation dtype; both are GEMM operands."""
    if a.dtype == total.dtype:
        total.addmm_(a, b)
    else:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
