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

from fxskip.bench.goals import print_verdicts, verdicts
from fxskip.bench.loss_errors import error_rows
from fxskip.bench.loss_goals import ONE_GPU
from fxskip.bench.loss_inputs import (
    FLOOR,
    FOUR_FLOOR,
    FULL,
    HALF_MASKED,
    LEAN,
    Inputs,
    Setting,
    draw_inputs,
    four_products,
    three_products,
    tiny,
)
from fxskip.bench.loss_others import compiled_dense, liger_jsd, liger_kl, torch_cross_entropy
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

COMPILED = "dense_sparse_kl under torch.compile"
LABELS = "F.linear_cross_entropy, of labels"
LIGER = "Liger fused linear KL, dense target"
unchecked_kl = partial(sparse_kl, validate=False, implementation="triton")


def run(out: Path, parts: list[str], *, is_tiny: bool = False) -> None:
    """Runs `parts` (of PARTS), printing each as it ends; `out` is rewritten after each.

    What fails is in the report with its message, and the rest runs; FxskipError at the end lists it. `goals` in the
    report and at the end of the output are the verdicts on what ran.
    """
    setting = tiny() if is_tiny else FULL
    report: dict[str, Any] = environment() | {"tiny": is_tiny, "width": setting.width, "dtype": "bfloat16"}
    started = time.monotonic()
    done: list[str] = []
    for part in parts:
        report[part] = attempted(partial(PARTS[part], setting))
        done.append(part)
        report["goals"] = verdicts(ONE_GPU, report, done)
        torch.cuda.empty_cache()
        out.write_text(json.dumps(report, indent=1))
        print(f"[{part} done after {time.monotonic() - started:.0f} s]", flush=True)
    print_verdicts(report["goals"], is_tiny=is_tiny)
    require_no_failures(report, who="bench loss", repeat="repeat a part with --part")


def table(
    title: str,
    setting: Setting,
    inputs: Inputs,
    variants: Mapping[str, Work],
    comparisons: Mapping[str, Work],
    *,
    rounds: int,
    floor: str = FLOOR,
) -> dict[str, Any]:
    """`times` of variants and comparisons, as `measure` says; each is named in one of them."""
    tokens, vocabulary = len(inputs.hidden), len(inputs.weight)
    measured = measure(variants, comparisons, rounds=min(rounds, setting.rounds))
    print_rows(f"{title}: V={vocabulary}, {tokens} tokens", measured, floor=floor, tokens=tokens)
    size = {
        "vocabulary": vocabulary,
        "tokens": tokens,
        "bytes_of_a_state": inputs.hidden[0].numel() * inputs.hidden.element_size(),
    }
    return {"times": size | {"variants": as_json(measured)}}


def v65536_32k(setting: Setting) -> dict[str, Any]:
    inputs = draw_inputs(setting, 32768, 65536)
    half = torch.zeros(len(inputs.hidden), device=setting.device)
    half[::2] = 1.0
    variants = {FLOOR: three_products(inputs)} | ours(inputs)
    variants[HALF_MASKED] = inputs.chunked(unchecked_kl, token_weight=half)
    found = table("medium vocabulary", setting, inputs, variants, baselines(inputs), rounds=10)
    return found | kernels(inputs)


def v131072_32k(setting: Setting) -> dict[str, Any]:
    inputs = draw_inputs(setting, 32768, 131072)
    variants = {FLOOR: three_products(inputs)} | ours(inputs)
    compared = baselines(inputs) | {LIGER: liger_kl(inputs)}
    compared["Liger fused linear KL, float32 d weight"] = liger_kl(inputs, accumulate_in=torch.float32)
    return table("large vocabulary", setting, inputs, variants, compared, rounds=8) | kernels(inputs)


def many_tokens(tokens: int, setting: Setting) -> dict[str, Any]:
    inputs = draw_inputs(setting, tokens, 131072)
    variants = {FLOOR: three_products(inputs), "sparse_kl": inputs.chunked(unchecked_kl)}
    compared = {"full_chunked_sparse_kl": inputs.chunked(full_chunked_sparse_kl)}
    return table("many tokens", setting, inputs, variants, compared, rounds=4)


def v32000_4k(setting: Setting) -> dict[str, Any]:
    inputs = draw_inputs(setting, 4096, 32000)
    variants = {
        FLOOR: three_products(inputs),
        "sparse_kl": inputs.chunked(unchecked_kl),
        "sparse_kl, values checked": inputs.chunked(sparse_kl),
    }
    compared = {
        "dense_sparse_kl": inputs.step(dense_sparse_kl),
        COMPILED: compiled_dense(inputs),
        LABELS: torch_cross_entropy(inputs),
        LIGER: liger_kl(inputs),
    }
    return table("few tokens", setting, inputs, variants, compared, rounds=20) | kernels(inputs)


def online(setting: Setting) -> dict[str, Any]:
    inputs = draw_inputs(setting, 32768, 131072)
    torch.manual_seed(2)
    teacher_hidden = torch.randn_like(inputs.hidden)

    def loss(hidden: torch.Tensor, head: torch.Tensor, *_: torch.Tensor, **options: Any) -> torch.Tensor:
        return hidden_kl(hidden, head, teacher_hidden, head.detach(), implementation="triton", **options)

    variants = {
        FOUR_FLOOR: four_products(inputs, teacher_hidden),
        "hidden_kl": inputs.chunked(loss),
        "hidden_kl, beta 1": inputs.chunked(loss, beta=1.0),
        "hidden_kl, beta 0.5": inputs.chunked(loss, beta=0.5),
    }
    compared = {"Liger fused linear JSD, beta 0": liger_jsd(inputs, teacher_hidden)}
    return table("online teacher", setting, inputs, variants, compared, rounds=6, floor=FOUR_FLOOR)


def ours(inputs: Inputs) -> dict[str, Work]:
    whole, half = inputs.chunk_tokens, max(inputs.chunk_tokens // 2, 1)

    def loss_alone() -> None:
        with torch.no_grad():
            unchecked_kl(inputs.hidden, inputs.weight, inputs.ids, inputs.logp, chunk_tokens=whole)

    return {
        "sparse_kl": inputs.chunked(unchecked_kl),
        "sparse_kl, values checked": inputs.chunked(sparse_kl, implementation="triton"),
        "sparse_kl, accumulate 4": inputs.chunked(unchecked_kl, accumulate=4),
        LEAN: inputs.chunked(unchecked_kl, chunk_tokens=half),
        "sparse_kl, ghost": inputs.chunked(unchecked_kl, tail="ghost"),
        "sparse_kl, float32 logits": inputs.chunked(unchecked_kl, logits_dtype=torch.float32),
        "sparse_kl, frozen head": inputs.with_frozen_head().chunked(unchecked_kl),
        "sparse_kl, no gradients": loss_alone,
        "sparse_kl, implementation torch": inputs.chunked(sparse_kl, validate=False, implementation="torch"),
    }


def baselines(inputs: Inputs) -> dict[str, Work]:
    return {
        "full_chunked_sparse_kl": inputs.chunked(full_chunked_sparse_kl),
        "forward_chunked_sparse_kl": inputs.chunked(forward_chunked_sparse_kl),
        "dense_sparse_kl": inputs.step(dense_sparse_kl),
        COMPILED: compiled_dense(inputs),
        LABELS: torch_cross_entropy(inputs),
    }


def kernels(inputs: Inputs) -> dict[str, Any]:
    """`kernels_ms` of one call with the defaults."""
    return {"kernels_ms": attempted(partial(printed_kernels, inputs.chunked(unchecked_kl)))}


def printed_kernels(work: Work) -> dict[str, float]:
    work()
    times = kernel_times_ms(work)
    print("\nkernels of one sparse_kl, ms", flush=True)
    for name, value in times.items():
        print(f"  {value:8.3f}  {name}", flush=True)
    return times


PARTS: dict[str, Callable[[Setting], Any]] = {
    "errors": error_rows,
    "sweep": sweep,
    "v65536-32k": v65536_32k,
    "v131072-32k": v131072_32k,
    "v32000-4k": v32000_4k,
    "online-v131072-32k": online,
    "v131072-64k": partial(many_tokens, 65536),
    "v131072-128k": partial(many_tokens, 131072),
    "v131072-256k": partial(many_tokens, 262144),
}
