"""The distillation loss on one GPU: errors, launch parameters, times and memory.

    fxskip bench loss --out loss.json

Time is that of a forward and a backward. Every table has its floor, the bare matrix products, in it.
Several GPUs (`--ranks`) are measured by `loss_ranks`.
"""

import json
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from fxskip.bench.loss_errors import error_rows
from fxskip.bench.loss_inputs import FLOOR, Inputs, draw_inputs, four_products, three_products
from fxskip.bench.loss_others import liger_jsd, liger_kl
from fxskip.bench.loss_sweep import sweep
from fxskip.bench.measure import Work, as_json, environment, kernel_times_ms, measure, print_rows
from fxskip.loss import hidden_kl, sparse_kl
from fxskip.loss.sparse_baselines import dense_sparse_kl, forward_chunked_sparse_kl, full_chunked_sparse_kl

unchecked_kl = partial(sparse_kl, validate=False, implementation="triton")


def run(out: Path, parts: list[str]) -> None:
    """Runs `parts` (of PARTS), printing each as it ends; `out` is rewritten after each."""
    report: dict[str, Any] = environment()
    started = time.monotonic()
    for part in parts:
        report[part] = PARTS[part]()
        torch.cuda.empty_cache()
        out.write_text(json.dumps(report, indent=1))
        print(f"[{part} done after {time.monotonic() - started:.0f} s]", flush=True)


def table(title: str, variants: Mapping[str, Work], *, tokens: int, rounds: int, floor: str = FLOOR) -> Any:
    measured = measure(variants, rounds=rounds)
    print_rows(title, measured, floor=floor, tokens=tokens)
    return as_json(measured)


def middle() -> Any:
    inputs = draw_inputs(32768, 65536)
    half = torch.zeros(32768, device="cuda")
    half[::2] = 1.0
    variants = {FLOOR: three_products(inputs)} | ours(inputs) | baselines(inputs)
    variants["sparse_kl, half of the tokens masked"] = inputs.step(unchecked_kl, token_weight=half)
    return {
        "times": table("V=65536, 32K tokens", variants, tokens=32768, rounds=10),
        "kernels_ms": kernels(inputs.step(unchecked_kl)),
    }


def large() -> Any:
    inputs = draw_inputs(32768, 131072)
    variants = {FLOOR: three_products(inputs)} | ours(inputs) | baselines(inputs)
    variants["Liger fused linear KL, dense target"] = liger_kl(inputs)
    variants["Liger fused linear KL, float32 d weight"] = liger_kl(inputs, accumulate_in=torch.float32)
    return {
        "times": table("V=131072, 32K tokens", variants, tokens=32768, rounds=8),
        "kernels_ms": kernels(inputs.step(unchecked_kl)),
    }


def long() -> Any:
    tables = {}
    for tokens in (65536, 131072, 262144):
        inputs = draw_inputs(tokens, 131072)
        variants = {FLOOR: three_products(inputs), "sparse_kl": inputs.step(unchecked_kl)}
        if tokens == 262144:
            variants["full_chunked_sparse_kl"] = inputs.step(full_chunked_sparse_kl)
        title = f"V=131072, {tokens // 1024}K tokens"
        tables[title] = table(title, variants, tokens=tokens, rounds=4)
        del inputs, variants
    return tables


def small() -> Any:
    inputs = draw_inputs(4096, 32000)
    variants = {
        FLOOR: three_products(inputs),
        "dense_sparse_kl": inputs.step(dense_sparse_kl),
        "sparse_kl": inputs.step(unchecked_kl),
        "sparse_kl, values checked": inputs.step(sparse_kl),
        "Liger fused linear KL, dense target": liger_kl(inputs),
    }
    return table("V=32000, 4096 tokens", variants, tokens=4096, rounds=20)


def online() -> Any:
    inputs = draw_inputs(32768, 131072)
    teacher_hidden = torch.randn_like(inputs.hidden)

    def step(**more: Any) -> Work:
        def work() -> None:
            inputs.hidden.grad = inputs.weight.grad = None
            head = inputs.weight
            hidden_kl(inputs.hidden, head, teacher_hidden, head.detach(), **more).backward()
            inputs.hidden.grad = inputs.weight.grad = None

        return work

    variants = {
        "four products": four_products(inputs, teacher_hidden),
        "hidden_kl": step(),
        "hidden_kl, beta 1": step(beta=1.0),
        "hidden_kl, beta 0.5": step(beta=0.5),
        "Liger fused linear JSD, beta 0": liger_jsd(inputs, teacher_hidden),
    }
    return table(
        "online teacher, V=131072, 32K tokens", variants, tokens=32768, rounds=6, floor="four products"
    )


def ours(inputs: Inputs) -> dict[str, Work]:
    frozen = Inputs(inputs.hidden, inputs.weight.detach(), inputs.ids, inputs.logp)

    def loss_alone() -> None:
        with torch.no_grad():
            unchecked_kl(inputs.hidden, inputs.weight, inputs.ids, inputs.logp)

    return {
        "sparse_kl": inputs.step(unchecked_kl),
        "sparse_kl, values checked": inputs.step(sparse_kl),
        "sparse_kl, accumulate 1": inputs.step(unchecked_kl, accumulate=1),
        "sparse_kl, accumulate 4": inputs.step(unchecked_kl, accumulate=4),
        "sparse_kl, chunk 2048, accumulate 2": inputs.step(unchecked_kl, chunk_tokens=2048),
        "sparse_kl, chunk 2048, accumulate 4": inputs.step(unchecked_kl, chunk_tokens=2048, accumulate=4),
        "sparse_kl, chunk 8192, accumulate 1": inputs.step(unchecked_kl, chunk_tokens=8192, accumulate=1),
        "sparse_kl, ghost": inputs.step(unchecked_kl, tail="ghost"),
        "sparse_kl, float32 logits": inputs.step(unchecked_kl, logits_dtype=torch.float32),
        "sparse_kl, frozen head": frozen.step(unchecked_kl),
        "sparse_kl, no gradients": loss_alone,
    }


def baselines(inputs: Inputs) -> dict[str, Work]:
    return {
        "sparse_kl, implementation torch": inputs.step(sparse_kl, validate=False, implementation="torch"),
        "full_chunked_sparse_kl": inputs.step(full_chunked_sparse_kl),
        "forward_chunked_sparse_kl": inputs.step(forward_chunked_sparse_kl),
        "dense_sparse_kl": inputs.step(dense_sparse_kl),
    }


def kernels(work: Work) -> dict[str, float]:
    times = kernel_times_ms(work)
    print("\nkernels of one sparse_kl, ms", flush=True)
    for name, value in times.items():
        print(f"  {value:8.3f}  {name}", flush=True)
    return times


PARTS: dict[str, Callable[[], Any]] = {
    "errors": error_rows,
    "sweep": sweep,
    "middle": middle,
    "large": large,
    "small": small,
    "online": online,
    "long": long,
}
