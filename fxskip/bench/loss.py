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
from fxskip.bench.loss_inputs import (
    FLOOR,
    FULL,
    Inputs,
    Setting,
    draw_inputs,
    four_products,
    three_products,
    tiny,
)
from fxskip.bench.loss_others import liger_jsd, liger_kl
from fxskip.bench.loss_sweep import sweep
from fxskip.bench.measure import (
    Work,
    as_json,
    attempted,
    environment,
    kernel_times_ms,
    measure,
    print_rows,
    require_no_failures,
)
from fxskip.loss import hidden_kl, sparse_kl
from fxskip.loss.sparse_baselines import dense_sparse_kl, forward_chunked_sparse_kl, full_chunked_sparse_kl

unchecked_kl = partial(sparse_kl, validate=False, implementation="triton")


def run(out: Path, parts: list[str], *, is_tiny: bool = False) -> None:
    """Runs `parts` (of PARTS), printing each as it ends; `out` is rewritten after each.

    What fails is in the report with its message, and the rest runs; FxskipError at the end lists it.
    """
    setting = tiny() if is_tiny else FULL
    report: dict[str, Any] = environment() | {"tiny": is_tiny}
    started = time.monotonic()
    for part in parts:
        report[part] = attempted(partial(PARTS[part], setting))
        torch.cuda.empty_cache()
        out.write_text(json.dumps(report, indent=1))
        print(f"[{part} done after {time.monotonic() - started:.0f} s]", flush=True)
    require_no_failures(report)


def table(
    title: str,
    setting: Setting,
    inputs: Inputs,
    variants: Mapping[str, Work],
    *,
    rounds: int,
    floor: str = FLOOR,
) -> Any:
    tokens, vocabulary = len(inputs.hidden), len(inputs.weight)
    measured = measure(variants, rounds=min(rounds, setting.rounds))
    print_rows(f"{title}: V={vocabulary}, {tokens} tokens", measured, floor=floor, tokens=tokens)
    return {"vocabulary": vocabulary, "tokens": tokens, "variants": as_json(measured)}


def middle(setting: Setting) -> Any:
    inputs = draw_inputs(setting, 32768, 65536)
    half = torch.zeros(len(inputs.hidden), device=setting.device)
    half[::2] = 1.0
    variants = {FLOOR: three_products(inputs)} | ours(inputs) | baselines(inputs)
    variants["sparse_kl, half of the tokens masked"] = inputs.chunked(unchecked_kl, token_weight=half)
    return times_and_kernels("middle", setting, inputs, variants, rounds=10)


def large(setting: Setting) -> Any:
    inputs = draw_inputs(setting, 32768, 131072)
    variants = {FLOOR: three_products(inputs)} | ours(inputs) | baselines(inputs)
    variants["Liger fused linear KL, dense target"] = liger_kl(inputs)
    variants["Liger fused linear KL, float32 d weight"] = liger_kl(inputs, accumulate_in=torch.float32)
    return times_and_kernels("large", setting, inputs, variants, rounds=8)


def times_and_kernels(
    title: str, setting: Setting, inputs: Inputs, variants: Mapping[str, Work], *, rounds: int
) -> Any:
    return {
        "times": table(title, setting, inputs, variants, rounds=rounds),
        "kernels_ms": attempted(partial(kernels, inputs.chunked(unchecked_kl))),
    }


def long(setting: Setting) -> Any:
    return {
        f"{tokens // 1024}K tokens": attempted(partial(long_table, setting, tokens))
        for tokens in (65536, 131072, 262144)
    }


def long_table(setting: Setting, tokens: int) -> Any:
    inputs = draw_inputs(setting, tokens, 131072)
    variants = {FLOOR: three_products(inputs), "sparse_kl": inputs.chunked(unchecked_kl)}
    if tokens == 262144:
        variants["full_chunked_sparse_kl"] = inputs.chunked(full_chunked_sparse_kl)
    return table("long", setting, inputs, variants, rounds=4)


def small(setting: Setting) -> Any:
    inputs = draw_inputs(setting, 4096, 32000)
    variants = {
        FLOOR: three_products(inputs),
        "dense_sparse_kl": inputs.step(dense_sparse_kl),
        "sparse_kl": inputs.chunked(unchecked_kl),
        "sparse_kl, values checked": inputs.chunked(sparse_kl),
        "Liger fused linear KL, dense target": liger_kl(inputs),
    }
    return times_and_kernels("small", setting, inputs, variants, rounds=20)


def online(setting: Setting) -> Any:
    inputs = draw_inputs(setting, 32768, 131072)
    teacher_hidden = torch.randn_like(inputs.hidden)

    def loss(hidden: torch.Tensor, head: torch.Tensor, *_: torch.Tensor, **options: Any) -> torch.Tensor:
        return hidden_kl(hidden, head, teacher_hidden, head.detach(), implementation="triton", **options)

    variants = {
        "four products": four_products(inputs, teacher_hidden),
        "hidden_kl": inputs.chunked(loss),
        "hidden_kl, beta 1": inputs.chunked(loss, beta=1.0),
        "hidden_kl, beta 0.5": inputs.chunked(loss, beta=0.5),
        "Liger fused linear JSD, beta 0": liger_jsd(inputs, teacher_hidden),
    }
    return table("online teacher", setting, inputs, variants, rounds=6, floor="four products")


def ours(inputs: Inputs) -> dict[str, Work]:
    whole, half, double = inputs.chunk_tokens, max(inputs.chunk_tokens // 2, 1), 2 * inputs.chunk_tokens

    def loss_alone() -> None:
        with torch.no_grad():
            unchecked_kl(inputs.hidden, inputs.weight, inputs.ids, inputs.logp, chunk_tokens=whole)

    return {
        "sparse_kl": inputs.chunked(unchecked_kl),
        "sparse_kl, values checked": inputs.chunked(sparse_kl, implementation="triton"),
        "sparse_kl, accumulate 1": inputs.chunked(unchecked_kl, accumulate=1),
        "sparse_kl, accumulate 4": inputs.chunked(unchecked_kl, accumulate=4),
        "sparse_kl, half a chunk, accumulate 2": inputs.chunked(unchecked_kl, chunk_tokens=half),
        "sparse_kl, half a chunk, accumulate 4": inputs.chunked(
            unchecked_kl, chunk_tokens=half, accumulate=4
        ),
        "sparse_kl, two chunks, accumulate 1": inputs.chunked(
            unchecked_kl, chunk_tokens=double, accumulate=1
        ),
        "sparse_kl, ghost": inputs.chunked(unchecked_kl, tail="ghost"),
        "sparse_kl, float32 logits": inputs.chunked(unchecked_kl, logits_dtype=torch.float32),
        "sparse_kl, frozen head": inputs.with_frozen_head().chunked(unchecked_kl),
        "sparse_kl, no gradients": loss_alone,
    }


def baselines(inputs: Inputs) -> dict[str, Work]:
    return {
        "sparse_kl, implementation torch": inputs.chunked(sparse_kl, validate=False, implementation="torch"),
        "full_chunked_sparse_kl": inputs.chunked(full_chunked_sparse_kl),
        "forward_chunked_sparse_kl": inputs.chunked(forward_chunked_sparse_kl),
        "dense_sparse_kl": inputs.step(dense_sparse_kl),
    }


def kernels(work: Work) -> dict[str, float]:
    work()
    times = kernel_times_ms(work)
    print("\nkernels of one sparse_kl, ms", flush=True)
    for name, value in times.items():
        print(f"  {value:8.3f}  {name}", flush=True)
    return times


PARTS: dict[str, Callable[[Setting], Any]] = {
    "errors": error_rows,
    "sweep": sweep,
    "middle": middle,
    "large": large,
    "small": small,
    "online": online,
    "long": long,
}
