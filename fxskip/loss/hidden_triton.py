"""Launches the kernel of hidden_kernels.py on one chunk after the other."""

# t rows of one chunk, V vocabulary

from dataclasses import dataclass

import torch
from torch import Tensor

from fxskip.loss import hidden_kernels as kernels
from fxskip.loss.engine import Finish, Rows
from fxskip.loss.hidden_rows import OnlineTarget
from fxskip.loss.row_kernels import block_for


@dataclass(frozen=True)
class Tuning:
    """Launch parameters: `block` columns a load, of each row four or two loads at a time."""

    block: int = 1024
    warps: int = 8


class TritonPairs:
    """A `RowLoss`: one launch a chunk, on the logits of student and teacher."""

    def __init__(self, target: OnlineTarget, tuning: Tuning = Tuning()) -> None:
        self.target, self.tuning = target, tuning

    def begin(
        self, product_tV: Tensor, gradient_tV: Tensor | None, rows: Rows, spare: Tensor | None
    ) -> Finish:
        target, student = self.target, self.target.student
        teacher_tV = target.teacher_product(product_tV, rows)
        tokens, columns = product_tV.shape
        d_tV = product_tV if gradient_tV is None else gradient_tV
        loss_t = torch.empty(tokens, dtype=torch.float32, device=product_tV.device)
        kind = {0.0: kernels.FORWARD, 1.0: kernels.REVERSE}.get(target.beta, kernels.MIXED)
        z_bias, y_bias = student.bias_V, target.teacher.bias_V
        kernels.compare_rows[(tokens,)](
            product_tV, product_tV.stride(0), teacher_tV, teacher_tV.stride(0), d_tV, d_tV.stride(0),
            unread(z_bias, product_tV), unread(y_bias, product_tV), target.share_N[rows].contiguous(), loss_t,
            target.beta, student.scale, student.softcap or 1.0, 1.0 / student.temperature,
            V=columns, BLOCK=block_for(columns, self.tuning.block), KIND=kind.value,
            WITH_GRADIENT=gradient_tV is not None, HAS_Z_BIAS=z_bias is not None, HAS_Y_BIAS=y_bias is not None,
            HAS_SOFTCAP=student.softcap is not None, num_warps=self.tuning.warps,
        )  # fmt: skip
        return lambda: loss_t


def unread(bias_V: Tensor | None, other: Tensor) -> Tensor:
    """A pointer for the kernel, which reads it only if there is a bias."""
    return other if bias_V is None else bias_V.contiguous()
