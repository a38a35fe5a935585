"""Launches the kernels of sparse_kernels.py on one chunk after the other."""

# t rows of one chunk, V columns of this rank's vocabulary, K entries of a teacher row

import math
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from fxskip.loss import sparse_kernels as kernels
from fxskip.loss.engine import Finish, Rows
from fxskip.loss.row_kernels import block_for
from fxskip.loss.spare import Spare
from fxskip.loss.sparse_rows import SparseTarget, combined
from fxskip.loss.teacher_rows import TeacherRows

LN_2 = math.log(2)
KERNEL_TAILS = {
    "truncated": kernels.TRUNCATED,
    "ghost": kernels.GHOST,
    "renormalised": kernels.RENORMALISED,
    "subset": kernels.SUBSET,
}
# To this many entries a row the kernel finds equal ids by comparing each with all; more are sorted first, by PyTorch.
COMPARED_ENTRIES = 1024


@dataclass(frozen=True)
class Tuning:
    """Launch parameters: `block` columns a load of the row kernel; the support kernel compares each entry of a teacher
    row with `support_block` others at a time. Best of `fxskip bench loss --part sweep` on an H200."""

    block: int = 4096
    warps: int = 16
    support_block: int = 8
    support_warps: int = 4


@dataclass
class Chunk:
    """One chunk between its launches. `sums_t3` and `rest2_t` are as in sparse_kernels."""

    product_tV: Tensor
    gradient_tV: Tensor | None
    teacher: TeacherRows
    taken2_tK: Tensor
    merged_tK: Tensor
    sums_t3: Tensor
    rest2_t: Tensor
    share_t: Tensor
    loss_t: Tensor


class TritonRows:
    """A `RowLoss`. One launch a chunk for the whole row, two around the exchange of a group."""

    def __init__(self, target: SparseTarget, tuning: Tuning = Tuning()) -> None:
        self.target, self.tuning = target, tuning
        head = target.head
        # Without a bias any pointer will do: the kernels do not read it.
        self.bias_V = head.weight_VD if head.bias_V is None else head.bias_V.contiguous()
        self.numbers = (head.scale, head.softcap or 1.0, 1.0 / head.temperature)
        self.flags = {"HAS_BIAS": head.bias_V is not None, "HAS_SOFTCAP": head.softcap is not None}
        self.width = target.teacher.ids.shape[1]
        self.sizes = {"CAPACITY": capacity_of(self.width), "BLOCK_K": min(128, power_of_two(self.width))}

    def begin(
        self, product_tV: Tensor, gradient_tV: Tensor | None, rows: Rows, spare: Tensor | None
    ) -> Finish:
        chunk = self.take_support(product_tV, gradient_tV, rows, Spare(spare, product_tV.device))
        if self.target.shard.group is None:
            self.launch(chunk, kernels.WHOLE)
            loss_t = chunk.loss_t
            return lambda: loss_t  # and not the chunk, whose memory the next one can have
        self.launch(chunk, kernels.SUMS)
        support2_t, cross_t, mass_t = chunk.sums_t3.unbind(dim=1)
        mine_3t = torch.stack((chunk.rest2_t * LN_2, support2_t * LN_2, cross_t))
        every_R3t, work = self.target.shard.gathered(mine_3t)

        def finish() -> Tensor:
            work.wait()
            total = combined(every_R3t, mass_t)
            chunk.rest2_t = total.rest / LN_2
            chunk.sums_t3 = torch.stack((total.support / LN_2, total.cross, mass_t), dim=1)
            self.launch(chunk, kernels.GRADIENT)
            return chunk.loss_t

        return finish

    def take_support(self, product_tV: Tensor, gradient_tV: Tensor | None, rows: Rows, spare: Spare) -> Chunk:
        teacher = self.target.teacher.of(rows)
        is_compared = self.width <= COMPARED_ENTRIES
        if not is_compared:
            ids_tK, p_tK = teacher.merged(torch.float32)
            teacher = TeacherRows(ids_tK, p_tK.log_(), None)
        tokens, columns = product_tV.shape
        chunk = Chunk(
            product_tV,
            gradient_tV,
            teacher,
            spare.take((tokens, self.width), torch.float32),
            spare.take((tokens, self.width), torch.float32),
            spare.take((tokens, 3), torch.float32),
            spare.take((tokens,), torch.float32),
            spare.take((tokens,), torch.float32).copy_(self.target.share_N[rows]),
            spare.take((tokens,), torch.float32),
        )
        counts = teacher.ids if teacher.counts is None else teacher.counts  # unread without counts
        launch(kernels.take_support, tokens)(
            product_tV, product_tV.stride(0), self.bias_V, teacher.ids, teacher.logp, counts,
            chunk.taken2_tK, chunk.merged_tK, chunk.sums_t3, self.target.shard.first, self.width, *self.numbers,
            V=columns, BLOCK_J=self.tuning.support_block, COMPARE=is_compared,
            HAS_COUNTS=teacher.counts is not None, num_warps=self.tuning.support_warps, **self.sizes, **self.flags,
        )  # fmt: skip
        return chunk

    def launch(self, chunk: Chunk, stage: Any) -> None:
        tokens, columns = chunk.product_tV.shape
        gradient_tV = chunk.product_tV if chunk.gradient_tV is None else chunk.gradient_tV
        launch(kernels.reduce_rows, tokens)(
            chunk.product_tV, chunk.product_tV.stride(0), gradient_tV, gradient_tV.stride(0), self.bias_V,
            chunk.teacher.ids, chunk.taken2_tK, chunk.merged_tK, chunk.sums_t3, chunk.rest2_t, chunk.share_t,
            chunk.loss_t, self.target.shard.first, self.width, *self.numbers,
            V=columns, BLOCK=block_for(columns, self.tuning.block),
            TAIL=KERNEL_TAILS[self.target.tail].value, STAGE=stage.value, WITH_GRADIENT=chunk.gradient_tV is not None,
            num_warps=self.tuning.warps, **self.sizes, **self.flags,
        )  # fmt: skip


def capacity_of(entries: int) -> int:
    """`entries` rounded up: to a multiple of 16 to 128, then to a power of two. Each capacity is compiled once."""
    return -(-entries // 16) * 16 if entries <= 128 else power_of_two(entries)


def power_of_two(size: int) -> int:
    """The next power of two, 16 or more."""
    return max(16, int(triton.next_power_of_2(size)))


def launch(kernel: Any, programs: int) -> Any:
    """`kernel` on a grid of one program a row. Not called without rows: chunks are never empty."""
    return kernel[(programs,)]
