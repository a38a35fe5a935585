"""Errors of the kernels against float64, beside those of the plain PyTorch version with the same inputs."""

from typing import Any

import torch
from torch import Tensor

from fxskip.bench.loss_inputs import draw_inputs
from fxskip.loss import sparse_kl
from fxskip.loss.implementation import Implementation

TOKENS, WIDTH, VOCABULARY, ENTRIES = 1000, 256, 5003, 100


def error_rows() -> list[dict[str, Any]]:
    """One row a case: relative errors (in norm) of loss, d hidden, d weight and d bias, kernels and PyTorch."""
    rows = []
    print("errors against float64: loss, d hidden, d weight, d bias; kernels | plain PyTorch", flush=True)
    for case in cases():
        try:
            rows.append(error_row(*case))
        except Exception as error:  # the other cases are still worth having
            rows.append({"case": case[0], "failed": f"{type(error).__name__}: {error}"})
            print(f"  {case[0]:34s} {rows[-1]['failed']}", flush=True)
    return [*rows, *many_chunks(), large_index()]


def error_row(
    name: str, leaves: list[Tensor], teacher: tuple[Tensor, Tensor], options: dict[str, Any]
) -> dict[str, Any]:
    wide = [leaf.detach().double().requires_grad_() for leaf in leaves]
    right = results(wide, teacher, options, implementation="torch")
    row: dict[str, Any] = {"case": name}
    both: tuple[Implementation, ...] = "triton", "torch"
    for implementation in both:
        got = results(leaves, teacher, options, implementation=implementation)
        row[implementation] = [relative(a, b) for a, b in zip(got, right, strict=True)]
    again = results(leaves, teacher, options, implementation="triton")
    first = results(leaves, teacher, options, implementation="triton")
    row["equal_bits"] = all(torch.equal(a, b) for a, b in zip(again, first, strict=True))
    parts = [" ".join(f"{e:.1e}" for e in row[i]) for i in ("triton", "torch")]
    print(f"  {name:34s} {parts[0]} | {parts[1]}  equal bits: {row['equal_bits']}", flush=True)
    return row


def cases() -> list[tuple[str, list[Tensor], tuple[Tensor, Tensor], dict[str, Any]]]:
    torch.manual_seed(0)
    hidden = torch.randn(TOKENS, WIDTH, device="cuda")
    weight = torch.randn(VOCABULARY, WIDTH, device="cuda") / 8
    bias = torch.randn(VOCABULARY, device="cuda")
    low = [x.bfloat16().requires_grad_() for x in (hidden, weight)]
    with_bias = [*low, bias.clone().requires_grad_()]
    single = [x.clone().requires_grad_() for x in (hidden, weight)]
    ids = torch.rand(TOKENS, VOCABULARY, device="cuda").topk(ENTRIES).indices
    far = ids, (2 * torch.randn(TOKENS, ENTRIES, device="cuda")).log_softmax(-1) - 0.1
    doubled = ids.clone()
    doubled[:, 1::2] = doubled[:, ::2]
    counts = torch.randint(0, ENTRIES + 1, (TOKENS,), device="cuda")
    weights = torch.rand(TOKENS, device="cuda").where(torch.rand(TOKENS, device="cuda") > 0.5, 0.0)
    own = (low[0].detach().float() @ low[1].detach().float().T).log_softmax(-1)
    near = tuple(reversed((own + 0.01 * torch.randn_like(own)).log_softmax(-1).topk(ENTRIES)))
    every: dict[str, Any] = {"scale": 0.7, "softcap": 20.0, "temperature": 1.5, "counts": counts}
    result: list[tuple[str, list[Tensor], tuple[Tensor, Tensor], dict[str, Any]]] = []
    for tail in ("truncated", "ghost", "renormalised", "subset"):
        result.append((f"{tail}, bfloat16", low, far, {"tail": tail}))
        result.append(
            (f"{tail}, all options", with_bias, far, {"tail": tail, "token_weight": weights, **every})
        )
        result.append((f"{tail}, equal ids", low, (doubled, far[1]), {"tail": tail}))
        result.append((f"{tail}, near the teacher", low, (near[0], near[1]), {"tail": tail}))
        wide = {"tail": tail, "logits_dtype": torch.float32}
        result.append((f"{tail}, near, float32 logits", low, (near[0], near[1]), wide))
    result.append(("truncated, float32", single, far, {}))
    return result


def results(
    leaves: list[Tensor],
    teacher: tuple[Tensor, Tensor],
    options: dict[str, Any],
    *,
    implementation: Implementation,
) -> list[Tensor]:
    hidden, weight, *bias = leaves
    given = dict(options) | ({"bias": bias[0]} if bias else {})
    if implementation == "torch":
        given.pop("logits_dtype", None)  # float32 anyway
    loss = sparse_kl(hidden, weight, *teacher, chunk_tokens=384, implementation=implementation, **given)
    return [loss.detach(), *torch.autograd.grad(loss, leaves)]


def many_chunks() -> list[dict[str, Any]]:
    """d weight over up to 512 chunks: with float32 logits its error is that of its roundings, however many."""
    rows = []
    for vocabulary in (8000, 8192, 8003):
        inputs = draw_inputs(8192, vocabulary, width=512)
        wide = [x.detach().double().requires_grad_() for x in (inputs.hidden, inputs.weight)]
        teacher = inputs.ids, inputs.logp
        loss = sparse_kl(wide[0], wide[1], *teacher, implementation="torch")
        (right,) = torch.autograd.grad(loss, wide[1:])
        for logits_dtype in (None, torch.float32):
            errors: dict[int | str, float] = {}
            for chunks in (1, 8, 512):
                loss = sparse_kl(
                    inputs.hidden,
                    inputs.weight,
                    *teacher,
                    chunk_tokens=8192 // chunks,
                    accumulate=1,
                    logits_dtype=logits_dtype,
                )
                (got,) = torch.autograd.grad(loss, [inputs.weight])
                errors[chunks] = relative(got, right)
            loss = sparse_kl(inputs.hidden, inputs.weight, *teacher, implementation="torch")
            (got,) = torch.autograd.grad(loss, [inputs.weight])
            errors["plain PyTorch"] = relative(got, right)
            case = f"d weight by number of chunks, V={vocabulary}, logits {logits_dtype or 'bfloat16'}"
            print(f"  {case}: {errors}", flush=True)
            rows.append({"case": case, "triton": errors})
    return rows


def large_index() -> dict[str, Any]:
    """One chunk of 32K x 131072 logits, more than 2**32 - 1 elements, against eight of 4K."""
    inputs = draw_inputs(32768, 131072, width=256)
    teacher = inputs.ids, inputs.logp
    got = []
    for chunk_tokens in (32768, 4096):
        loss = sparse_kl(inputs.hidden, inputs.weight, *teacher, chunk_tokens=chunk_tokens, accumulate=1)
        got.append([loss.detach(), *torch.autograd.grad(loss, [inputs.hidden, inputs.weight])])
    errors = [relative(a, b) for a, b in zip(*got, strict=True)]
    last = relative(got[0][1][-1], got[1][1][-1])
    print(f"  one chunk of 2**32 logits against eight: {errors}, last row {last:.1e}", flush=True)
    return {"case": "one chunk of 2**32 logits against eight", "triton": [*errors, last]}


def relative(got: Tensor, right: Tensor) -> float:
    return float((got.double() - right.double()).norm() / right.double().norm().clamp_min(1e-30))
