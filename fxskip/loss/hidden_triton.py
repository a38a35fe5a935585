"""Launches the kernel of hidden_kernels.py on one chunk after the other."""

# t rows of one chunk, V vocabulary

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fxskip.loss import hidden_kernels as kernels
from fxskip.loss.engine import Finish, Rows
from fxskip.loss.hidden_rows import OnlineTarget, over_ranks
from fxskip.loss.row_kernels import block_for

LN_2 = math.log(2)


@dataclass(frozen=True)
class Tuning:
    """Launch parameters: `block` columns a load, of each row four or two loads at a time."""

    block: int = 1024
    warps: int = 8


class TritonPairs:
    """A `RowLoss`: one launch a chunk, on the logits of student and teacher; two around the exchange of a group, and
    one more for a mixture."""

    def __init__(self, target: OnlineTarget, tuning: Tuning = Tuning()) -> None:
        self.target, self.tuning = target, tuning
        kinds = {0.0: kernels.FORWARD, 1.0: kernels.REVERSE}
        self.kind = kinds.get(target.beta, kernels.MIXED).value

    def begin(
        self, product_tV: Tensor, gradient_tV: Tensor | None, rows: Rows, spare: Tensor | None
    ) -> Finish:
        product_tV, teacher_tV = self.target.products(product_tV, rows)
        like = product_tV.new_empty(0, dtype=torch.float32)
        sums_t4, loss_t = like.new_zeros(len(product_tV), 4), like.new_empty(len(product_tV))
        share_t = self.target.share_N[rows].contiguous()

        def launch(stage: Any) -> None:
            self.launch(stage, product_tV, teacher_tV, gradient_tV, sums_t4, share_t, loss_t)

        if self.target.shard.group is None:
            launch(kernels.WHOLE)
            return lambda: loss_t
        launch(kernels.SUMS)
        exchange = self.target.shard.gathered((sums_t4 * LN_2).T.contiguous())

        def parts_of(student_t: Tensor, teacher_t: Tensor) -> Tensor:
            sums_t4[:, :2] = torch.stack((student_t, teacher_t), dim=1) / LN_2
            launch(kernels.PARTS)
            return (sums_t4[:, 2:] * LN_2).T.contiguous()

        def finish() -> Tensor:
            sums_t4.copy_(torch.stack(over_ranks(self.target, exchange, parts_of), dim=1) / LN_2)
            launch(kernels.GRADIENT)
            return loss_t

        return finish

    def launch(
        self,
        stage: Any,
        product_tV: Tensor,
        teacher_tV: Tensor,
        gradient_tV: Tensor | None,
        sums_t4: Tensor,
        share_t: Tensor,
        loss_t: Tensor,
    ) -> None:
        student = self.target.student
        tokens, columns = product_tV.shape
        d_tV = product_tV if gradient_tV is None else gradient_tV
        z_bias, y_bias = student.bias_V, self.target.teacher.bias_V
        kernels.compare_rows[(tokens,)](
            product_tV, product_tV.stride(0), teacher_tV, teacher_tV.stride(0), d_tV, d_tV.stride(0),
            unread(z_bias, product_tV), unread(y_bias, product_tV), sums_t4, share_t, loss_t,
            self.target.beta, student.scale, student.softcap or 1.0, 1.0 / student.temperature,
            V=columns, BLOCK=block_for(columns, self.tuning.block), KIND=self.kind, STAGE=stage.value,
            WITH_GRADIENT=gradient_tV is not None, HAS_Z_BIAS=z_bias is not None, HAS_Y_BIAS=y_bias is not None,
            HAS_SOFTCAP=student.softcap is not None, num_warps=self.tuning.warps,
        )  # fmt: skip


def unread(bias_V: Tensor | None, other: Tensor) -> Tensor:
    """A pointer for the kernel, which reads it only if there is a bias."""
    return other if bias_V is None else bias_V.contiguous()
