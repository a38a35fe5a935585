"""What rewiring costs: seconds of transform, and the student's step time beside the original's.

    python benchmarks/transform_cost.py --out benchmarks/results/transform-cost.json [--threads 2] [--pairs 20]

Step times are taken in pairs, original then student, so that a machine that slows down slows both; the
figure is the median of the ratios. Captures happen before the first pair.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from provenance import ROOT, provenance
from transformers import AutoModelForCausalLM, PreTrainedModel

import fxskip

sys.path.insert(0, str(ROOT))

from tests.zoo import tiny

TYPES = [
    "deepseek_v2",
    "deepseek_v3",
    "qwen2_moe",
    "qwen3_moe",
    "mixtral",
    "olmoe",
    "glm4_moe",
    "llama4_text",
]
BATCH, LENGTH = 4, 256
LAYERS, SAMPLES = (4, 48), 3


def transform_seconds(model_type: str, layers: int) -> dict[str, Any]:
    """CPU seconds of SAMPLES transforms, and of the student's first forward and backward, which capture."""
    model = tiny(model_type, layers=layers)
    ids = torch.randint(3, 100, (2, 16))
    samples = []
    for _ in range(SAMPLES):
        started = time.process_time()
        student = fxskip.transform(model, "farskip")
        samples.append(time.process_time() - started)
    started = time.process_time()
    student(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    return {
        "model_type": model_type,
        "layers": layers,
        "transform_cpu_s": [round(s, 3) for s in samples],
        "median_per_layer_cpu_s": statistics.median(samples) / layers,
        "first_step_cpu_s": time.process_time() - started,
    }


def step_ratio(device: str, dtype: torch.dtype, pairs: int) -> dict[str, Any]:
    """Forward and backward of student and original on the bundled model, in turn."""
    folder = ROOT / "examples/plays/model"
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(device).train()
    student = fxskip.transform(model, "farskip")
    ids = torch.randint(3, 4000, (BATCH, LENGTH), generator=torch.Generator().manual_seed(0)).to(device)
    for _ in range(3):
        step(model, ids)
        step(student, ids)
    samples = [(step(model, ids), step(student, ids)) for _ in range(pairs)]
    return {
        "device": torch.cuda.get_device_name()
        if device == "cuda"
        else platform.processor() or platform.machine(),
        "dtype": str(dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
        "batch": [BATCH, LENGTH],
        "original_s": [round(a, 5) for a, _ in samples],
        "student_s": [round(b, 5) for _, b in samples],
        "median_ratio": statistics.median(b / a for a, b in samples),
        "ratio_quartiles": statistics.quantiles((b / a for a, b in samples), n=4),
    }


def step(model: PreTrainedModel, ids: torch.Tensor) -> float:
    if ids.is_cuda:
        torch.cuda.synchronize()
    started = time.perf_counter()
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    if ids.is_cuda:
        torch.cuda.synchronize()
    elapsed = time.perf_counter() - started
    model.zero_grad()
    return elapsed


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--threads", type=int, default=2, help="threads of one CPU operation")
    parser.add_argument("--pairs", type=int, default=20, help="pairs of steps")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    report: dict[str, Any] = provenance() | {"transform": [], "step": []}
    tiny("mixtral")
    fxskip.transform(tiny("mixtral"), "identity")  # start-up of Dynamo is not a layer's cost
    for model_type in TYPES:
        for layers in LAYERS:
            report["transform"].append(transform_seconds(model_type, layers))
            print(report["transform"][-1], flush=True)
    runs = [("cpu", torch.float32)]
    if torch.cuda.is_available():
        runs += [("cuda", torch.float32), ("cuda", torch.bfloat16)]
    for device, dtype in runs:
        report["step"].append(step_ratio(device, dtype, arguments.pairs))
        print({k: v for k, v in report["step"][-1].items() if not k.endswith("_s")}, flush=True)
        arguments.out.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
