"""Launch parameters of the kernels: which are fastest on this GPU."""

import statistics
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from fxskip.bench.loss_inputs import draw_inputs
from fxskip.bench.measure import Work, kernel_events
from fxskip.loss.engine import RowLoss
from fxskip.loss.head import Head
from fxskip.loss.hidden_rows import OnlineTarget
from fxskip.loss.hidden_triton import TritonPairs
from fxskip.loss.hidden_triton import Tuning as PairTuning
from fxskip.loss.sparse_rows import SparseTarget
from fxskip.loss.sparse_triton import TritonRows, Tuning
from fxskip.loss.teacher_rows import TeacherRows
from fxskip.loss.vocabulary import Shard

CHUNK = 4096
ROW_TUNINGS = [
    Tuning(block, warps)
    for block, warps in (
        (1024, 4),
        (2048, 8),
        (2048, 16),
        (4096, 8),
        (4096, 16),
        (4096, 32),
        (8192, 16),
        (8192, 32),
    )
]
SUPPORT_TUNINGS = [
    Tuning(support_block=block, support_warps=warps) for block, warps in product((8, 16, 32), (2, 4, 8))
]
PAIR_TUNINGS = [(512, 4), (1024, 4), (1024, 8), (2048, 8), (2048, 16), (4096, 16)]


def sweep() -> dict[str, Any]:
    """Milliseconds of each kernel on one chunk of 4096 tokens, for each block and number of warps; and of a copy."""
    report: dict[str, Any] = {}
    for vocabulary in (65536, 131072):
        inputs = draw_inputs(CHUNK, vocabulary)
        logits = inputs.hidden.detach() @ inputs.weight.detach().T
        scratch = torch.empty_like(logits)
        head = Head(inputs.weight.detach(), None, 1.0, None, 1.0)
        teacher = TeacherRows(inputs.ids, inputs.logp, None)
        share = torch.full((CHUNK,), 1.0 / CHUNK, device="cuda")
        target = SparseTarget(head, teacher, share, "truncated", Shard(None, 0, vocabulary, vocabulary))
        online = OnlineTarget(head, head, inputs.hidden.detach(), share, 0.0)
        title = f"one chunk, V={vocabulary}"
        print(f"\n{title}", flush=True)
        rows = report[title] = {"copy": kernel_ms("elementwise", partial(scratch.copy_, logits))}
        for tuning in SUPPORT_TUNINGS:
            name = f"support, block {tuning.support_block}, warps {tuning.support_warps}"
            rows[name] = kernel_ms("take_support", on_copy(TritonRows(target, tuning), scratch, logits))
        for tuning in ROW_TUNINGS:
            name = f"rows, block 4 x {tuning.block}, warps {tuning.warps}"
            rows[name] = kernel_ms("reduce_rows", on_copy(TritonRows(target, tuning), scratch, logits))
        for block, warps in PAIR_TUNINGS:
            pairs = TritonPairs(online, PairTuning(block, warps))
            rows[f"pairs, block {block}, warps {warps}"] = kernel_ms(
                "compare_rows", on_copy(pairs, scratch, logits)
            )
        for name, value in rows.items():
            print(f"  {name:44s} {value:7.3f} ms", flush=True)
    return report


def on_copy(row_loss: RowLoss, scratch_tV: Tensor, logits_tV: Tensor) -> Work:
    """`row_loss` overwrites its logits, so each call has them anew."""

    def work() -> None:
        scratch_tV.copy_(logits_tV)
        row_loss.begin(scratch_tV, scratch_tV, slice(0, CHUNK))()

    return work


def kernel_ms(name: str, work: Work) -> float:
    """Median time of the kernel with `name` in its name; what launches it may take longer than the kernel."""
    work()
    return statistics.median(ms for kernel, ms in kernel_events(repeated(work)) if name in kernel)


def repeated(work: Work) -> Work:
    def often() -> None:
        for _ in range(10):
            work()

    return often
