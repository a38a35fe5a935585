"""Which implementation of a loss runs: Triton kernels or plain PyTorch."""

import importlib.util
import warnings
from typing import Any, Literal

import torch
from torch import Tensor

from fxskip.errors import FxskipError
from fxskip.loss.products import accumulation_dtype

Implementation = Literal["auto", "triton", "torch"]
# Looked up once: torch.compile cannot trace a search for modules.
HAS_TRITON = importlib.util.find_spec("triton") is not None


def chosen_implementation(
    who: str, implementation: str, hidden: Tensor, scale: float, teacher_hidden: Tensor | None = None
) -> Literal["triton", "torch"]:
    """ "triton" or "torch". "auto" is Triton on CUDA and PyTorch elsewhere; where CUDA tensors cannot have the
    kernels, "auto" says why in a warning and "triton" raises."""
    if implementation == "torch":
        return "torch"
    if implementation not in ("auto", "triton"):
        raise FxskipError(
            who, f"implementation is {implementation!r}", hint="implementation is auto, triton or torch"
        )
    if implementation == "auto" and not hidden.is_cuda:
        return "torch"
    obstacle = obstacle_to_triton(hidden, scale) or other_dtype(hidden, teacher_hidden)
    if obstacle is None:
        return "triton"
    if implementation == "triton":
        raise FxskipError(
            who, f"implementation='triton' cannot run: {obstacle}", hint="implementation='torch', or 'auto'"
        )
    warnings.warn(f"{who}: implementation='auto' runs 'torch': {obstacle}", RuntimeWarning, stacklevel=3)
    return "torch"


def obstacle_to_triton(hidden: Tensor, scale: float) -> str | None:
    """Why the kernels cannot take these arguments; None if they can."""
    if not HAS_TRITON:
        return "triton is not installed"
    if hidden.dtype not in (torch.bfloat16, torch.float32):
        return f"hidden is {hidden.dtype}, and the kernels take bfloat16 and float32"
    if scale < 0:
        return f"scale is {scale}, and in the kernels a logit of -inf must stay one"
    if not hidden.is_cuda and not is_interpreted():
        return f"hidden is on {hidden.device}, and the kernels need CUDA (or TRITON_INTERPRET=1, for tests)"
    return None


def other_dtype(hidden: Tensor, teacher_hidden: Tensor | None) -> str | None:
    """The kernels compare logits of one dtype; products of another one would need copies of a chunk and of the head."""
    if teacher_hidden is None or teacher_hidden.dtype == hidden.dtype:
        return None
    return f"student_hidden is {hidden.dtype} and teacher_hidden {teacher_hidden.dtype}; with one dtype the kernels can"


def is_interpreted() -> bool:
    """Triton runs its kernels in Python, one program after the other: the switch is read when they are defined."""
    if not HAS_TRITON:
        return False
    import triton

    return bool(triton.knobs.runtime.interpret)


def checked_logits_dtype(
    who: str, logits_dtype: Any, hidden: Tensor, implementation: str
) -> torch.dtype | None:
    """The dtype of the logits, None for that of the products' operands: bfloat16 with bfloat16 in the kernels."""
    if logits_dtype is None:
        return None
    wide = accumulation_dtype(hidden.dtype)
    allowed = [wide]
    if implementation == "triton" and hidden.dtype != wide:
        allowed = [hidden.dtype, wide]
    if logits_dtype not in allowed:
        raise FxskipError(
            who,
            f"logits_dtype is {logits_dtype}, hidden {hidden.dtype}, implementation {implementation!r}",
            hint=f"logits_dtype is None or {' or '.join(map(str, allowed))}",
        )
    found: torch.dtype = logits_dtype
    return found
