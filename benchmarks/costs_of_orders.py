"""What an order by measured costs is worth against one by the roofline: the step of one rank and its mirror image.

    python benchmarks/costs_of_orders.py --out benchmarks/results/costs-of-orders.json [--micro-batch 4] [--choices 2]
        [--layers 8] [--rounds 6] [--tiny]

A FarSkip decoder of DeepSeek-V2-Lite's shapes, as `fxskip bench overlap --mirror` has it, scheduled by the roofline and
by costs that a trace of it measured; in turn with each collective blocking, and with nothing sent. Beside the times
stands what the second one's trace estimates. Needs one GPU; --tiny checks anywhere that it runs.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from provenance import ROOT, provenance

sys.path.insert(0, str(ROOT))

import fxskip
from fxskip.bench.mirror import mirrored
from fxskip.bench.overlap_model import MIRROR, RANKS, Setting, stepper, student
from fxskip.schedule.cost_table import save_costs
from fxskip.tracing.runs import MODES, Mode, Stepper


def scheduled_both_ways(setting: Setting) -> tuple[dict[str, Stepper], str]:
    """The two students, which have run, and the trace of the second."""
    first = student(setting, "farskip")
    by_roofline = stepper(setting, first, rank=0, together=False)
    costs = fxskip.trace(first, by_roofline.batch, steps=setting.traced_steps).costs()
    with tempfile.TemporaryDirectory() as folder:
        save_costs(costs, Path(folder) / "costs.json")
        second = student(setting, "farskip", Path(folder) / "costs.json")
    by_costs = stepper(setting, second, rank=0, together=False)
    trace = fxskip.trace(second, by_costs.batch, steps=setting.traced_steps)
    return {"roofline": by_roofline, "measured costs": by_costs}, str(trace)


def in_turn(steppers: dict[str, Stepper], rounds: int) -> dict[str, list[dict[str, float]]]:
    """Milliseconds of each variant, once a round, behind a step of its own; a first round is dropped."""
    variants: list[tuple[str, Mode]] = [(name, "as it is") for name in steppers]
    variants += [("roofline", "blocking"), ("roofline", "nothing sent")]
    times: dict[str, list[dict[str, float]]] = {f"{name}, {mode}": [] for name, mode in variants}
    shuffler = random.Random(0)
    for number in range(-1, rounds):
        shuffler.shuffle(variants)
        for name, mode in variants:
            with MODES[mode]():
                took = steppers[name].timed(behind_another=True)
            if number >= 0:
                own = {"forward": took.forward_us / 1e3, "step": took.step_us / 1e3}
                times[f"{name}, {mode}"].append(own)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    for name, value in (("--layers", 8), ("--micro-batch", 4), ("--choices", 2), ("--rounds", 6)):
        parser.add_argument(name, type=int, default=value)
    parser.add_argument("--tiny", action="store_true")
    given = parser.parse_args()
    tokens = 16 if given.tiny else 4096
    transport: Any = "copy_engine" if torch.cuda.is_available() else "auto"
    setting = Setting(
        layers=given.layers,
        micro_batch=given.micro_batch,
        tokens=tokens,
        rounds=given.rounds,
        traced_steps=1 if given.tiny else 2,
        link=MIRROR,
        measured_costs=False,
        is_tiny=given.tiny,
        transport=transport,
        choices=given.choices,
    )
    with mirrored(RANKS):
        steppers, trace = scheduled_both_ways(setting)
        times = in_turn(steppers, given.rounds)
    described = {
        "layers": given.layers,
        "micro_batch": given.micro_batch,
        "tokens": tokens,
        "choices": given.choices,
    }
    report = provenance() | described | {"milliseconds": times, "trace of measured costs": trace.splitlines()}
    given.out.write_text(json.dumps(report, indent=1) + "\n")
    for name, own in times.items():
        print(f"{name}: step {statistics.median(one['step'] for one in own):.2f} ms")


if __name__ == "__main__":
    main()
