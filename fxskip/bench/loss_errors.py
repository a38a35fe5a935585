"""Errors of the kernels against float64, beside those of the plain PyTorch version with the same inputs, and whether
they are within bounds.

Plain PyTorch keeps its logits in float32; the kernels round those of bfloat16 inputs, unless told not to. So an error
may be MARGIN times that of plain PyTorch and of the rounding together, where the second is of the float64 formula with
its logits rounded. With float32 logits it may be twice that of plain PyTorch. UNIT of the teacher's term (of the value
itself where that is larger) more is for the float32 of both.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from fxskip.bench.loss_cases import Case, cases
from fxskip.bench.loss_formulas import Outcome, sparse_outcome
from fxskip.bench.loss_inputs import Setting, draw_inputs
from fxskip.bench.measure import attempted
from fxskip.loss import sparse_kl
from fxskip.loss.implementation import Implementation

MARGIN, MARGIN_FLOAT32_LOGITS = 1.2, 2.0
UNIT = 2e-6  # 2**-19, a few roundings of float32
# d weight is rounded to bfloat16 twice, once before its product and once after: 1.66e-3 each, 2.35e-3 together.
GRADIENT_BOUND = 2.5e-3
# Two results that are rounded apart from each other differ by no more than both errors.
DIFFERENCE_BOUND = 2 * GRADIENT_BOUND


def error_rows(setting: Setting) -> list[dict[str, Any]]:
    """One row a case: relative errors of loss, d hidden, d weight and d bias, and `within_bounds`."""
    print(
        "errors against float64: loss, d hidden, d weight, d bias; kernels | allowed | plain PyTorch",
        flush=True,
    )
    rows = [{"case": case.name} | attempted(partial(error_row, case)) for case in cases(setting)]
    for vocabulary in (8000, 8192, 8003):
        for logits_dtype in (None, torch.float32):
            case = f"d weight by number of chunks, V={vocabulary}, logits {logits_dtype or 'bfloat16'}"
            rows.append({"case": case} | attempted(partial(many_chunks, setting, vocabulary, logits_dtype)))
            print(f"  {rows[-1]}", flush=True)
    rows.append(
        {"case": "one chunk of 2**32 logits against eight"} | attempted(partial(large_index, setting))
    )
    print(f"  {rows[-1]}", flush=True)
    return rows


def error_row(case: Case) -> dict[str, Any]:
    right = case.right(None)
    kernels, again = case.results("triton"), case.results("triton")
    errors, plain = relative_errors(kernels, right), relative_errors(case.results("torch"), right)
    allowed = [MARGIN_FLOAT32_LOGITS * error for error in plain]
    if case.rounded_to is not None:
        rounding = relative_errors(case.right(case.rounded_to).values, right)
        allowed = [MARGIN * (a + b) for a, b in zip(plain, rounding, strict=True)]
    allowed = [error + UNIT * max(1.0, term) for error, term in zip(allowed, right.terms, strict=True)]
    row: dict[str, Any] = {
        "triton": errors,
        "allowed": allowed,
        "torch": plain,
        "within_bounds": all(a <= b for a, b in zip(errors, allowed, strict=True)),
        "equal_bits": all(torch.equal(a, b) for a, b in zip(kernels, again, strict=True)),
    }
    parts = " | ".join(" ".join(f"{e:.1e}" for e in row[i]) for i in ("triton", "allowed", "torch"))
    verdict = ("" if row["within_bounds"] else "  OUTSIDE") + ("" if row["equal_bits"] else "  OTHER BITS")
    print(f"  {case.name:36s} {parts}{verdict}", flush=True)
    return row


def relative_errors(got: list[Tensor], right: Outcome) -> list[float]:
    differences = [float((a.double() - b).norm()) for a, b in zip(got, right.values, strict=True)]
    return [error / max(size, 1e-30) for error, size in zip(differences, right.sizes, strict=True)]


def many_chunks(setting: Setting, vocabulary: int, logits_dtype: torch.dtype | None) -> dict[str, Any]:
    """Errors of d weight over up to 512 chunks, which do not grow with their number."""
    inputs = draw_inputs(setting, 8192, vocabulary, width=512)
    teacher = inputs.ids, inputs.logp
    right = sparse_outcome([inputs.hidden, inputs.weight], *teacher).values[2]

    def error(implementation: Implementation, **options: Any) -> float:
        loss = sparse_kl(inputs.hidden, inputs.weight, *teacher, implementation=implementation, **options)
        (got,) = torch.autograd.grad(loss, [inputs.weight])
        return relative(got, right)

    errors = {
        f"{chunks} chunks": error(
            "triton",
            chunk_tokens=max(len(inputs.hidden) // chunks, 1),
            accumulate=1,
            logits_dtype=logits_dtype,
        )
        for chunks in (1, 8, 512)
    }
    return {
        "by_chunks": errors,
        "torch": error("torch"),
        "within_bounds": max(errors.values()) <= GRADIENT_BOUND,
    }


def large_index(setting: Setting) -> dict[str, Any]:
    """One chunk of 32K x 131072 logits, more than 2**32 - 1 elements, against eight of 4K."""
    inputs = draw_inputs(setting, 32768, 131072, width=256)
    got = []
    for chunk_tokens in (len(inputs.hidden), inputs.chunk_tokens):
        loss = sparse_kl(
            inputs.hidden,
            inputs.weight,
            inputs.ids,
            inputs.logp,
            chunk_tokens=chunk_tokens,
            accumulate=1,
            implementation="triton",
        )
        d_hidden, d_weight = torch.autograd.grad(loss, [inputs.hidden, inputs.weight])
        # By themselves: the rows that an overflowing index would miss.
        got.append([loss.detach(), d_hidden, d_weight, d_hidden[-1], d_weight[-1]])
    names = ("loss", "d hidden", "d weight", "d hidden of the last token", "d weight of the last row")
    differences = {name: relative(a, b) for name, a, b in zip(names, *got, strict=True)}
    return {"differences": differences, "within_bounds": max(differences.values()) <= DIFFERENCE_BOUND}


def relative(got: Tensor, right: Tensor) -> float:
    return float((got.double() - right.double()).norm() / right.double().norm().clamp_min(1e-30))
