"""Errors of the kernels against float64, beside those of the plain PyTorch version with the same inputs."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from fxskip.bench.loss_inputs import Setting, draw_inputs
from fxskip.bench.measure import attempted
from fxskip.loss import sparse_kl
from fxskip.loss.implementation import Implementation
from fxskip.loss.tails import TAILS

Case = tuple[str, list[Tensor], tuple[Tensor, Tensor], dict[str, Any]]


def error_rows(setting: Setting) -> list[dict[str, Any]]:
    """One row a case: relative errors (in norm) of loss, d hidden, d weight and d bias, kernels and PyTorch."""
    print("errors against float64: loss, d hidden, d weight, d bias; kernels | plain PyTorch", flush=True)
    rows = [{"case": case[0]} | attempted(partial(error_row, *case)) for case in cases(setting)]
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


def error_row(
    name: str, leaves: list[Tensor], teacher: tuple[Tensor, Tensor], options: dict[str, Any]
) -> dict[str, Any]:
    wide = [leaf.detach().double().requires_grad_() for leaf in leaves]
    right = results(wide, teacher, options, implementation="torch")
    row: dict[str, Any] = {}
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


def cases(setting: Setting) -> list[Case]:
    torch.manual_seed(0)
    tokens, vocabulary, entries = setting.of(1000), setting.of(5003), setting.entries
    width, on = min(setting.width, 256), {"device": setting.device}
    hidden = torch.randn(tokens, width, **on)  # type: ignore[call-overload]
    weight = torch.randn(vocabulary, width, **on) / 8  # type: ignore[call-overload]
    bias = torch.randn(vocabulary, **on)  # type: ignore[call-overload]
    low = [x.bfloat16().requires_grad_() for x in (hidden, weight)]
    with_bias = [*low, bias.clone().requires_grad_()]
    single = [x.clone().requires_grad_() for x in (hidden, weight)]
    ids = torch.rand(tokens, vocabulary, device=setting.device).topk(entries).indices
    far = ids, (2 * torch.randn(tokens, entries, device=setting.device)).log_softmax(-1) - 0.1
    doubled = ids.clone()
    doubled[:, 1::2] = doubled[:, ::2]
    counts = torch.randint(0, entries + 1, (tokens,), device=setting.device)
    weights = torch.rand(tokens, device=setting.device)
    weights = weights.where(torch.rand(tokens, device=setting.device) > 0.5, 0.0)
    own = (low[0].detach().float() @ low[1].detach().float().T).log_softmax(-1)
    near = (own + 0.01 * torch.randn_like(own)).log_softmax(-1).topk(entries)
    every: dict[str, Any] = {"scale": 0.7, "softcap": 20.0, "temperature": 1.5, "counts": counts}
    result: list[Case] = []
    for tail in TAILS:
        result.append((f"{tail}, bfloat16", low, far, {"tail": tail}))
        result.append(
            (f"{tail}, all options", with_bias, far, {"tail": tail, "token_weight": weights, **every})
        )
        result.append((f"{tail}, equal ids", low, (doubled, far[1]), {"tail": tail}))
        result.append((f"{tail}, near the teacher", low, (near.indices, near.values), {"tail": tail}))
        wide = {"tail": tail, "logits_dtype": torch.float32}
        result.append((f"{tail}, near, float32 logits", low, (near.indices, near.values), wide))
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


def many_chunks(setting: Setting, vocabulary: int, logits_dtype: torch.dtype | None) -> dict[str, Any]:
    """d weight over up to 512 chunks: with float32 logits its error is that of its roundings, however many."""
    inputs = draw_inputs(setting, 8192, vocabulary, width=512)
    teacher = inputs.ids, inputs.logp
    wide = [x.detach().double().requires_grad_() for x in (inputs.hidden, inputs.weight)]
    (right,) = torch.autograd.grad(sparse_kl(wide[0], wide[1], *teacher, implementation="torch"), wide[1:])

    def error(**options: Any) -> float:
        loss = sparse_kl(inputs.hidden, inputs.weight, *teacher, **options)
        (got,) = torch.autograd.grad(loss, [inputs.weight])
        return relative(got, right)

    errors = {
        f"{chunks} chunks": error(
            chunk_tokens=max(len(inputs.hidden) // chunks, 1),
            accumulate=1,
            logits_dtype=logits_dtype,
            implementation="triton",
        )
        for chunks in (1, 8, 512)
    }
    return {"triton": errors, "torch": error(implementation="torch")}


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
        got.append([loss.detach(), *torch.autograd.grad(loss, [inputs.hidden, inputs.weight])])
    errors = [relative(a, b) for a, b in zip(*got, strict=True)]
    return {"triton": [*errors, relative(got[0][1][-1], got[1][1][-1])]}


def relative(got: Tensor, right: Tensor) -> float:
    return float((got.double() - right.double()).norm() / right.double().norm().clamp_min(1e-30))
