"""Matrix products whose sums are float32 (float64 for float64 inputs), rounded at most once, at the end."""

import torch
from torch import Tensor


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """float32 for every input but float64, which is kept: gradient checks need it."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def gradient_dtype(dtype: torch.dtype) -> torch.dtype:
    """Of d hidden until the backward scales it: float16 has no room below for what a large denominator leaves, and a
    gradient scaler comes only then."""
    return torch.float32 if dtype == torch.float16 else dtype


def gemm_operand(matrix: Tensor) -> Tensor:
    """`matrix` in a dtype whose products can be had in the accumulation dtype.

    CUDA multiplies bfloat16 into float32; elsewhere the operand is widened first. float16 is widened too: the
    gradients of single logits, divided by the number of tokens, fall below its range.
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


def multiply_into(out: Tensor, a: Tensor, b: Tensor, *, add: bool = False) -> None:
    """out = a @ b, or out += a @ b. `out` may be narrower or wider than the operands.

    On CUDA this is one GEMM without a temporary, also where bfloat16 operands meet a float32 `out`.
    """
    wide = accumulation_dtype(a.dtype)
    if a.dtype == out.dtype and (a.is_cuda or a.dtype == wide):
        if add:
            torch.addmm(out, a, b, out=out)
        else:
            torch.mm(a, b, out=out)
    elif a.is_cuda and out.dtype == wide:
        if add:
            torch.addmm(out, a, b, out_dtype=wide, out=out)
        else:
            torch.mm(a, b, out_dtype=wide, out=out)
    else:
        product = a.to(wide) @ b.to(wide)
        out.copy_(out.to(wide).add_(product) if add else product)
