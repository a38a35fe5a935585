"""What a step of a scheduled region costs the host, beside the same step under plain autograd.

    python benchmarks/scheduled_backward.py --out benchmarks/results/scheduled-backward.json [--steps 200] [--pairs 30]

A chain of steps on [1, 1] tensors, so that time is overhead. Samples are taken in pairs, plain then scheduled, forward
and backward timed apart; figures are medians in microseconds a step, of CPU time, which other processes do not change
much. A step's operations are elementwise; every other step reads a parameter of its own.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from provenance import provenance
from torch import Tensor

from fxskip.backward.program import Program, Step
from fxskip.backward.scheduled_region import ScheduledRegion

OPERATIONS = (1, 8)
MODES = ("train", "no_grad")


def chain(steps: int, operations: int) -> Program:
    """Steps in a chain; every other one reads a parameter."""

    def plain(x: Tensor) -> tuple[Tensor]:
        for _ in range(operations):
            x = x.sin()
        return (x,)

    def scaled(x: Tensor, weight: Tensor) -> tuple[Tensor]:
        return (plain(x)[0] * weight,)

    made = []
    for i in range(steps):
        reads = (f"v{i}", f"w{i}") if i % 2 else (f"v{i}",)
        made.append(Step(f"step{i}", scaled if i % 2 else plain, reads, (f"v{i + 1}",)))
    weights = [f"w{i}" for i in range(1, steps, 2)]
    return Program(tuple(made), ("v0", *weights), (f"v{steps}",))


def run_plainly(program: Program, inputs: Sequence[Tensor]) -> tuple[Any, ...]:
    """The steps one after the other."""
    values: dict[str, Any] = dict(zip(program.inputs, inputs, strict=True))
    for step in program.steps:
        values.update(zip(step.outputs, step.function(*(values[name] for name in step.inputs)), strict=True))
    return tuple(values[name] for name in program.outputs)


def sample(
    call: Callable[..., tuple[Any, ...]], inputs: Sequence[Tensor], train: bool
) -> tuple[float, float]:
    """CPU seconds of a forward, and of its backward (0 without gradients)."""
    for leaf in inputs:
        leaf.grad = None
    with torch.set_grad_enabled(train):
        started = time.process_time()
        [out] = call(*inputs)
        forward = time.process_time() - started
    if not train:
        return forward, 0.0
    started = time.process_time()
    out.backward(torch.ones_like(out))
    return forward, time.process_time() - started


def measure(steps: int, operations: int, mode: str, pairs: int) -> dict[str, Any]:
    """Medians and samples of both forms, microseconds a step."""
    program = chain(steps, operations)
    inputs = [torch.rand(1, 1).add_(0.5).requires_grad_() for _ in program.inputs]
    region = ScheduledRegion(program)
    forms = {"plain": lambda *given: run_plainly(program, given), "scheduled": region}
    samples: dict[str, list[tuple[float, float]]] = {name: [] for name in forms}
    gc.disable()
    for pair in range(-3, pairs):
        for name, call in forms.items():
            seconds = sample(call, inputs, mode == "train")
            if pair >= 0:
                samples[name].append((seconds[0] * 1e6 / steps, seconds[1] * 1e6 / steps))
        gc.collect()
    gc.enable()
    found: dict[str, Any] = {"operations": operations, "mode": mode}
    for at, direction in enumerate(("forward", "backward") if mode == "train" else ("forward",)):
        medians = {name: statistics.median(s[at] for s in taken) for name, taken in samples.items()}
        found[direction] = {
            **{f"{name}_us": round(value, 2) for name, value in medians.items()},
            "added_us": round(medians["scheduled"] - medians["plain"], 2),
            "samples_us": {name: [round(s[at], 2) for s in taken] for name, taken in samples.items()},
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--steps", type=int, default=200, help="steps of the chain")
    parser.add_argument("--pairs", type=int, default=30, help="pairs of samples")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    report: dict[str, Any] = provenance() | {
        "steps": arguments.steps,
        "unit": "CPU microseconds a step",
        "runs": [],
    }
    for operations in OPERATIONS:
        for mode in MODES:
            run = measure(arguments.steps, operations, mode, arguments.pairs)
            report["runs"].append(run)
            for direction in ("forward", "backward"):
                if direction in run:
                    figures = {k: v for k, v in run[direction].items() if k != "samples_us"}
                    print(f"{operations} operations, {mode}, {direction}: {figures}", flush=True)
    arguments.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
