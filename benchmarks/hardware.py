"""What a GPU reaches of its peaks, for specs/hardware, and how long parts of a DeepSeek-V3 layer really take.

    python benchmarks/hardware.py --out benchmarks/results/hardware-h200.json
    torchrun --nproc-per-node 2 benchmarks/hardware.py --links --out benchmarks/results/links-h200.json

It needs torch and transformers, not fxskip. Each figure is the median of SAMPLES times, by CUDA events; the raw
times are in the file. `fxskip.plan` reads the fractions from the hardware files, where they were put by hand.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

SAMPLES, WARM_UP = 20, 5
TOKENS = 4096
# (name, inner, outer) of products in the layers of DeepSeek-V3, Qwen3-235B and Llama-4-Scout.
PRODUCTS = [
    ("deepseek q_b", 1536, 24576),
    ("deepseek kv_b", 512, 32768),
    ("deepseek o", 16384, 7168),
    ("deepseek dense up", 7168, 18432),
    ("deepseek dense down", 18432, 7168),
    ("deepseek shared up", 7168, 2048),
    ("qwen q", 4096, 8192),
    ("qwen o", 8192, 4096),
    ("llama q", 5120, 5120),
    ("llama shared up", 5120, 8192),
]


def seconds(run: Callable[[], object]) -> list[float]:
    """Times of `run` on the GPU, one after the other."""
    for _ in range(WARM_UP):
        run()
    events = [
        (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(SAMPLES)
    ]
    for start, end in events:
        start.record()
        run()
        end.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) / 1e3 for start, end in events]


def figure(name: str, times: list[float], **amounts: float) -> dict[str, Any]:
    """A row of the report; `amounts` (flop, bytes) become rates."""
    median = statistics.median(times)
    rates = {f"{unit}_per_s": amount / median for unit, amount in amounts.items()}
    row = {
        "name": name,
        "median_us": round(1e6 * median, 2),
        **rates,
        "samples_us": [round(1e6 * t, 2) for t in times],
    }
    print({k: v for k, v in row.items() if k != "samples_us"}, flush=True)
    return row


def random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=dtype)


def products(dtype: torch.dtype) -> list[dict[str, Any]]:
    rows = []
    for name, inner, outer in PRODUCTS:
        x, w = random(TOKENS, inner, dtype=dtype), random(outer, inner, dtype=dtype)
        rows.append(figure(name, seconds(lambda x=x, w=w: F.linear(x, w)), flop=2.0 * TOKENS * inner * outer))
    return rows


def products_float8() -> list[dict[str, Any]]:
    one, rows = torch.ones((), device="cuda"), []
    for name, inner, outer in PRODUCTS:
        x, w = (random(n, inner).to(torch.float8_e4m3fn) for n in (TOKENS, outer))

        def run(x: torch.Tensor = x, w: torch.Tensor = w) -> object:
            return torch._scaled_mm(x, w.t(), one, one, out_dtype=torch.bfloat16, use_fast_accum=True)

        rows.append(figure(name, seconds(run), flop=2.0 * TOKENS * inner * outer))
    return rows


def grouped(experts: int, rows: int, inner: int, outer: int) -> dict[str, Any]:
    """Routed experts, all with the same number of rows."""
    x, w = random(rows, inner), random(experts, outer, inner)
    ends = torch.arange(1, experts + 1, device="cuda", dtype=torch.int32) * (rows // experts)
    times = seconds(lambda: F.grouped_mm(x, w.transpose(-2, -1), offs=ends))
    return figure(
        f"{experts} experts, {rows} rows, {inner} to {outer}", times, flop=2.0 * rows * inner * outer
    )


def attention(name: str, heads: int, groups: int, key: int, value: int) -> dict[str, Any]:
    q, k = random(1, heads, TOKENS, key), random(1, groups, TOKENS, key)
    v = random(1, groups, TOKENS, value)
    times = seconds(
        lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=heads != groups)
    )
    return figure(name, times, flop=2.0 * heads * TOKENS * TOKENS / 2 * (key + value))


def copy() -> dict[str, Any]:
    source = random(1 << 29)
    target = torch.empty_like(source)
    return figure("copy of 1 GiB", seconds(lambda: target.copy_(source)), bytes=2.0 * source.numel() * 2)


def kernel_start() -> dict[str, Any]:
    """Time from one kernel to the next where the host is ahead: 200 tiny kernels behind a long one."""
    x, big = random(256), random(16384, 16384)
    torch.cuda.synchronize()
    times = []
    for _ in range(SAMPLES):
        torch.mm(big, big)  # some 13 ms, in which all the tiny ones are queued
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(200):
            x.add_(1.0)
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / 200 / 1e3)
    return figure("tiny kernels in a row", times)


def deepseek_parts() -> list[dict[str, Any]]:
    """Modules of transformers at DeepSeek-V3's width, with the 32 experts that one of 8 ranks holds."""
    from transformers import DeepseekV3Config
    from transformers.models.deepseek_v3 import modeling_deepseek_v3 as m

    config = DeepseekV3Config(n_routed_experts=32, n_group=1, topk_group=1)
    config._attn_implementation, config._experts_implementation = "sdpa", "grouped_mm"
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        own = m.DeepseekV3Attention(config, 0), m.DeepseekV3MLP(config), m.DeepseekV3MoE(config)
        rotary = m.DeepseekV3RotaryEmbedding(config)
        for module in own:
            for parameter in module.parameters():
                torch.nn.init.normal_(parameter, std=0.02)
    block, dense, moe = own
    x = random(1, TOKENS, config.hidden_size)
    place = rotary(x, torch.arange(TOKENS, device="cuda")[None])
    flat = x.view(TOKENS, -1)
    chosen = torch.stack([torch.randperm(32, device="cuda")[:8] for _ in range(TOKENS)])
    weights = torch.full((TOKENS, 8), 0.125, device="cuda")
    with torch.no_grad():
        return [
            figure("attention", seconds(lambda: block(x, position_embeddings=place, attention_mask=None))),
            figure("dense", seconds(lambda: dense(x))),
            figure("gate", seconds(lambda: F.linear(flat.float(), moe.gate.weight.float()))),
            figure("routed", seconds(lambda: moe.experts(flat, chosen, weights))),
            figure("shared", seconds(lambda: moe.shared_experts(x))),
        ]


def links() -> list[dict[str, Any]]:
    """All-to-all between the ranks of one domain; `bytes` is what a rank sends to others."""
    rows, ranks = [], dist.get_world_size()
    for kib in (1, 64, 1024, 16384, 98304, 401408, 802816):
        x = torch.zeros(kib * 512, device="cuda", dtype=torch.bfloat16)
        y = torch.empty_like(x)
        times = seconds(lambda x=x, y=y: dist.all_to_all_single(y, x))
        rows.append(figure(f"all-to-all of {kib} KiB", times, bytes=kib * 1024 * (ranks - 1) / ranks))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--links", action="store_true", help="measure collectives, under torchrun")
    arguments = parser.parse_args()
    report: dict[str, Any] = {
        "command": " ".join(["python", *sys.argv]),
        "date": time.strftime("%Y-%m-%d"),
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        "driver": subprocess.run(
            ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"],
            capture_output=True, text=True, check=False,
        ).stdout.strip(),
    }  # fmt: skip
    if arguments.links:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl", device_id=torch.device("cuda", int(os.environ["LOCAL_RANK"])))
        report["ranks"] = dist.get_world_size()
        report["all_to_all"] = links()
        if dist.get_rank() == 0:
            arguments.out.write_text(json.dumps(report, indent=1))
        dist.destroy_process_group()
        return
    report["bfloat16"] = products(torch.bfloat16)
    report["float16"] = products(torch.float16)
    report["float8"] = products_float8()
    torch.backends.cuda.matmul.allow_tf32 = True
    report["float32"] = products(torch.float32)
    report["grouped"] = [
        grouped(32, 32768, 7168, 4096),
        grouped(32, 32768, 2048, 7168),
        grouped(16, 32768, 4096, 3072),
        grouped(2, 4096, 5120, 16384),
    ]
    report["attention"] = [
        attention("deepseek", 128, 128, 192, 128),
        attention("qwen", 64, 4, 128, 128),
        attention("llama", 40, 8, 128, 128),
    ]
    report["copy"], report["kernel_start"] = copy(), kernel_start()
    report["deepseek_v3_parts"] = deepseek_parts()
    arguments.out.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
