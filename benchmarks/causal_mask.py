"""What a written-out causal mask costs: time and memory of a training step with `is_causal` and with a mask.

    python benchmarks/causal_mask.py --out benchmarks/results/causal-mask.json

One step is forward with labels and backward, batch 1, bfloat16, of a model like Qwen3-30B-A3B with few layers, 32
experts and a small vocabulary (so that attention and not the loss is what shows). All variants have the same
weights; memory is the peak of a step above what was allocated before it.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from provenance import provenance
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

import fxskip

WARM_UP = 2
Step = Callable[[Tensor], Tensor]


def original(hidden: int, layers: int, device: str) -> PreTrainedModel:
    """A qwen3_moe with random weights: heads of 128, 8 query heads to a key head, 8 of 32 experts a token."""
    config = AutoConfig.for_model(
        "qwen3_moe",
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=max(hidden // 512, 1),
        head_dim=128,
        moe_intermediate_size=hidden * 3 // 8,
        num_experts=32,
        num_experts_per_tok=8,
        norm_topk_prob=True,
        vocab_size=8192,
        max_position_embeddings=1 << 17,
    )
    torch.manual_seed(0)
    with torch.device(device):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    return model.train()


def causal_mask(ids: Tensor) -> Tensor:
    """The mask that transformers writes out for a compiler: [1, 1, S, S], True where attention looks."""
    length = ids.shape[1]
    return torch.ones(1, 1, length, length, dtype=torch.bool, device=ids.device).tril()


def step_of(call: Callable[..., Any], masked: bool = False) -> Step:
    """Forward and backward; the loss, [], fp32."""

    def step(ids: Tensor) -> Tensor:
        mask = causal_mask(ids) if masked else None
        loss: Tensor = call(input_ids=ids, attention_mask=mask, labels=ids, use_cache=False).loss
        loss.backward()
        return loss.detach()

    return step


def variants(model: PreTrainedModel, spec: str, compiled: bool) -> dict[str, tuple[PreTrainedModel, Step]]:
    """What is compared, by name, with the module whose gradients a step leaves behind."""
    student = fxskip.transform(model, spec)
    found = {
        "student, is_causal": (student, step_of(student)),
        "student, mask written out": (student, step_of(student, masked=True)),
        "original, eager": (model, step_of(model)),
    }
    if compiled:
        found["student, torch.compile around it"] = (student, step_of(torch.compile(student, dynamic=True)))
        found["original, torch.compile"] = (model, step_of(torch.compile(model, dynamic=True)))
    return found


def measure(module: PreTrainedModel, step: Step, ids: Tensor, samples: int) -> dict[str, Any]:
    """Seconds of each sample, peak memory above the start in bytes (None without a GPU), attention kernels, loss."""
    on_gpu = ids.is_cuda
    started = time.perf_counter()
    for _ in range(WARM_UP):
        loss = step(ids)
        module.zero_grad()
    result: dict[str, Any] = {"warm_up_s": time.perf_counter() - started, "loss": loss.item()}
    seconds = []
    for _ in range(samples):
        if on_gpu:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        started = time.perf_counter()
        step(ids)
        if on_gpu:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
        module.zero_grad()
    result |= {"seconds": seconds, "median_s": statistics.median(seconds)}
    result["peak_bytes"] = torch.cuda.max_memory_allocated() - before if on_gpu else None
    result["kernels"] = attention_kernels(step, ids)
    module.zero_grad()
    return result


def attention_kernels(step: Step, ids: Tensor) -> list[str]:
    """The implementations that SDPA chose in one step."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        step(ids)
    names = {event.name for event in profile.events()}
    return sorted(name for name in names if "_scaled_dot_product_" in name and "backward" not in name)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--spec", default="farskip", help="spec of the student")
    parser.add_argument("--hidden", type=int, default=2048, help="hidden size; a multiple of 64")
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--samples", type=int, default=5, help="measured steps of each variant and length")
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096, 8192, 16384, 32768])
    parser.add_argument("--no-compile", action="store_true", help="leave the variants with torch.compile out")
    arguments = parser.parse_args()

    settings = {k: v for k, v in vars(arguments).items() if k != "out"}
    report: dict[str, Any] = provenance() | {"settings": settings, "dtype": "bfloat16", "cells": []}
    model = original(arguments.hidden, arguments.layers, arguments.device)
    for name, (module, step) in variants(model, arguments.spec, not arguments.no_compile).items():
        for length in arguments.lengths:
            ids = torch.randint(0, 8192, (1, length), generator=torch.Generator().manual_seed(0))
            cell: dict[str, Any] = {"variant": name, "length": length}
            try:
                cell |= measure(module, step, ids.to(arguments.device), arguments.samples)
            except torch.OutOfMemoryError as error:  # a result, not a failure
                cell["out_of_memory"] = str(error).splitlines()[0]
                module.zero_grad()
            report["cells"].append(cell)
            print({k: v for k, v in cell.items() if k != "seconds"}, flush=True)
            arguments.out.write_text(json.dumps(report, indent=1))
            gc.collect()
            if arguments.device == "cuda":
                torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
