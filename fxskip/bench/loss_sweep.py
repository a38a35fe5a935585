"""Launch parameters of the kernels: which are fastest on this GPU."""

from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from fxskip.bench.loss_inputs import Setting, draw_inputs
from fxskip.bench.measure import Work, attempted, kernel_ms
from fxskip.loss.engine import RowLoss
from fxskip.loss.head import Head
from fxskip.loss.hidden_rows import OnlineTarget
from fxskip.loss.hidden_triton import TritonPairs
from fxskip.loss.hidden_triton import Tuning as PairTuning
from fxskip.loss.sparse_rows import SparseTarget
from fxskip.loss.sparse_triton import TritonRows, Tuning
from fxskip.loss.teacher_rows import TeacherRows
from fxskip.loss.vocabulary import Shard

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


def sweep(setting: Setting) -> dict[str, Any]:
    """Milliseconds of each kernel on one chunk of 4096 tokens, for each block and number of warps; and of one that
    reads and writes as much and does nothing else."""
    return {
        f"one chunk, V={vocabulary}": attempted(partial(swept, setting, vocabulary))
        for vocabulary in (32000, 65536, 98304, 131072, 151936)
    }


def swept(setting: Setting, vocabulary: int) -> dict[str, Any]:
    inputs = draw_inputs(setting, 4096, vocabulary)
    hidden, weight = inputs.hidden.detach(), inputs.weight.detach()
    logits = hidden @ weight.T
    scratch = torch.empty_like(logits)
    head = Head(weight, None, 1.0, None, 1.0)
    teacher = TeacherRows(inputs.ids, inputs.logp, None)
    share = torch.full((len(hidden),), 1.0 / len(hidden), device=setting.device)
    shard = Shard(None, 0, len(weight), len(weight))
    target = SparseTarget(head, teacher, share, "truncated", shard)
    online = OnlineTarget(head, head, hidden, share, 0.0, shard, shares_products=False)
    # A plain copy would be no kernel.
    work: dict[str, tuple[str, Work]] = {"negation": ("elementwise", partial(torch.neg, logits, out=scratch))}
    for tuning in SUPPORT_TUNINGS:
        name = f"support, block {tuning.support_block}, warps {tuning.support_warps}"
        work[name] = "take_support", on_copy(TritonRows(target, tuning), scratch, logits)
    for tuning in ROW_TUNINGS:
        name = f"rows, block 4 x {tuning.block}, warps {tuning.warps}"
        work[name] = "reduce_rows", on_copy(TritonRows(target, tuning), scratch, logits)
    for block, warps in PAIR_TUNINGS:
        pairs = TritonPairs(online, PairTuning(block, warps))
        work[f"pairs, block {block}, warps {warps}"] = "compare_rows", on_copy(pairs, scratch, logits)
    print(f"\none chunk, V={vocabulary}", flush=True)
    rows = {}
    for name, (kernel, call) in work.items():
        rows[name] = attempted(partial(kernel_ms, kernel, call))
        print(f"  {name:44s} {rows[name]}", flush=True)
    return rows


def on_copy(row_loss: RowLoss, scratch_tV: Tensor, logits_tV: Tensor) -> Work:
    """`row_loss` overwrites its logits, so each call has them anew."""

    def work() -> None:
        scratch_tV.copy_(logits_tV)
        row_loss.begin(scratch_tV, scratch_tV, slice(0, len(scratch_tV)), None)()

    return work
