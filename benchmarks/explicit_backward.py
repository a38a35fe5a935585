"""What an explicit backward costs the host, beside a mirrored one: one training step on two gloo processes.

    torchrun --nproc-per-node 2 benchmarks/explicit_backward.py --out benchmarks/results/explicit-backward.json

A tiny model, so that time is overhead. Samples are taken in pairs, mirrored then explicit, forward and backward timed
apart; figures are medians of rank 0 in microseconds a decoder layer, of the thread's processor time, in which waits
for the other process and gloo's own threads do not count.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from provenance import ROOT, provenance
from torch import nn

import fxskip
from fxskip.schedule import order_region

sys.path.insert(0, str(ROOT))

from tests.zoo import tiny

KIND, LAYERS, BATCH, LENGTH = "deepseek_v2", 6, 1, 8
FORMS = ("mirrored", "explicit")
DIRECTIONS = ("forward", "backward")


def students(preset: str) -> dict[str, nn.Module]:
    """The same weights, spread over both processes, with either backward."""
    original = tiny(KIND, layers=LAYERS).train()
    spec = {"fxskip": 1, "preset": preset, "parallel": {"expert": {"size": 2}}}
    return {form: fxskip.transform(original, {**spec, "schedule": {"backward": form}}) for form in FORMS}


def sample(student: nn.Module, ids: torch.Tensor) -> tuple[float, float]:
    """Microseconds a layer of a forward and of its backward, by this thread's processor."""
    student.zero_grad(set_to_none=True)
    begin = time.thread_time()
    loss = student(input_ids=ids, labels=ids, use_cache=False).loss
    middle = time.thread_time()
    loss.backward()
    end = time.thread_time()
    return (middle - begin) * 1e6 / LAYERS, (end - middle) * 1e6 / LAYERS


def measure(preset: str, pairs: int) -> dict[str, Any]:
    """Medians and samples of both forms, and of the differences in each pair."""
    both = students(preset)
    ids = torch.randint(0, 100, (BATCH, LENGTH), generator=torch.Generator().manual_seed(dist.get_rank()))
    samples: dict[str, list[tuple[float, float]]] = {form: [] for form in FORMS}
    for pair in range(-3, pairs):
        gc.collect()
        gc.disable()
        for form, student in both.items():
            taken = sample(student, ids)
            if pair >= 0:
                samples[form].append(taken)
        gc.enable()
    found: dict[str, Any] = {"preset": preset, "events_of_a_layer": _events()}
    for at, direction in enumerate(DIRECTIONS):
        pairs_us = list(zip(*([s[at] for s in samples[form]] for form in FORMS), strict=True))
        found[direction] = {
            **{f"{form}_us": round(statistics.median(s[at] for s in samples[form]), 1) for form in FORMS},
            "added_us": round(statistics.median(explicit - mirrored for mirrored, explicit in pairs_us), 1),
            "samples_us": {form: [round(s[at], 1) for s in samples[form]] for form in FORMS},
        }
    return found


def _events() -> list[int]:
    """How many events the backward passes of the layers have that were captured so far."""
    schedules = [schedule for found in order_region._FOUND.values() for schedule in found]
    return [len(schedule.backward.events) for schedule in schedules if schedule.backward is not None]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--pairs", type=int, default=40, help="pairs of samples")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    report: dict[str, Any] = provenance() | {
        "model": f"{KIND}, {LAYERS} layers, batch {BATCH} x {LENGTH} tokens a process, 2 gloo processes",
        "unit": "microseconds of processor time a layer, rank 0",
        "runs": [],
    }
    report["command"] = f"torchrun --nproc-per-node 2 {' '.join(sys.argv)}"
    for preset in ("farskip", "identity"):
        run = measure(preset, arguments.pairs)
        report["runs"].append(run)
        if dist.get_rank() == 0:
            for direction in DIRECTIONS:
                figures = {k: v for k, v in run[direction].items() if k != "samples_us"}
                print(f"{preset}, {direction}: {figures}", flush=True)
    if dist.get_rank() == 0:
        arguments.out.write_text(json.dumps(report, indent=1) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
