"""Launch parameters of the kernels: which are fastest on this GPU."""

from itertools import product
from typing import Any

import torch

from fxskip.bench.loss_inputs import draw_inputs
from fxskip.bench.measure import as_json, measure, print_rows
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
    for block, warps in ((1024, 4), (1024, 8), (2048, 4), (2048, 8), (2048, 16), (4096, 16), (4096, 8))
]
SUPPORT_TUNINGS = [
    Tuning(support_block=block, support_warps=warps) for block, warps in product((16, 32, 64), (1, 2, 4, 8))
]
PAIR_TUNINGS = [(1024, 4), (1024, 8), (2048, 8), (2048, 16), (4096, 16)]


def sweep() -> dict[str, Any]:
    """One chunk of 4096 tokens: the row kernel for each block and warps, the support kernel likewise, a copy."""
    report = {}
    for vocabulary in (65536, 131072):
        inputs = draw_inputs(CHUNK, vocabulary)
        logits = inputs.hidden.detach() @ inputs.weight.detach().T
        scratch = torch.empty_like(logits)
        variants: dict[str, Any] = {"copy": lambda a=scratch, b=logits: a.copy_(b)}
        head = Head(inputs.weight.detach(), None, 1.0, None, 1.0)
        teacher = TeacherRows(inputs.ids, inputs.logp, None)
        share = torch.full((CHUNK,), 1.0 / CHUNK, device="cuda")
        target = SparseTarget(head, teacher, share, "truncated", Shard(None, 0, vocabulary, vocabulary))
        for tuning in SUPPORT_TUNINGS:
            rows = TritonRows(target, tuning)
            name = f"support, block {tuning.support_block}, warps {tuning.support_warps}"
            variants[name] = lambda r=rows, z=scratch: r.take_support(z, z, slice(0, CHUNK))
        for tuning in ROW_TUNINGS:
            rows = TritonRows(target, tuning)
            name = f"support and rows, block 4 x {tuning.block}, warps {tuning.warps}"
            variants[name] = lambda r=rows, z=scratch: r.begin(z, z, slice(0, CHUNK))()
        # The teacher's product is in this time: it is a row loss's own.
        online = OnlineTarget(head, head, inputs.hidden.detach(), share, 0.0)
        variants["teacher's product alone"] = lambda t=online, z=scratch: t.teacher_product(
            z, slice(0, CHUNK)
        )
        for block, warps in PAIR_TUNINGS:
            pairs = TritonPairs(online, PairTuning(block, warps))
            name = f"teacher's product and pairs, block {block}, warps {warps}"
            variants[name] = lambda r=pairs, z=scratch: r.begin(z, z, slice(0, CHUNK))()
        title = f"one chunk, V={vocabulary}"
        measured = measure(variants, rounds=15)
        print_rows(title, measured, floor="copy", tokens=CHUNK)
        report[title] = as_json(measured)
    return report
