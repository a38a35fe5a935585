"""What each process of `fxskip bench overlap` does: a setting's variants in turn, then each of them under watch."""

import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist

import fxskip
from fxskip.bench.measure import environment
from fxskip.bench.mirror import mirrored
from fxskip.bench.overlap_model import (
    RANKS,
    WIRINGS,
    Setting,
    Wiring,
    device_here,
    original,
    share_weights,
    stepper,
    student,
    zero,
)
from fxskip.bench.power import PowerLog, Window
from fxskip.collectives.measuring import routing_in_turn
from fxskip.schedule.cost_table import save_costs
from fxskip.tracing.figures import PARTS, Rank, figures
from fxskip.tracing.runs import MODES, Mode, ModeRuns, Stepper, Times, gathered, median_over_ranks

Part = tuple[tuple[str, ...], Any]
"""A place in the report of a setting, and what belongs there."""
MOVED_BY = "rows moved by"
"""Where a setting's report has what moves each wiring's rows, and why."""
Routing = Literal["real routing", "routing in turn"]
Data = Literal["real data", "zero data"]
ROUTINGS: dict[Routing, Callable[[], AbstractContextManager[None]]] = {
    "real routing": nullcontext,
    "routing in turn": routing_in_turn,
}


@dataclass(frozen=True)
class Variant:
    """One of the things that are compared."""

    wiring: Wiring
    routing: Routing
    data: Data
    mode: Mode

    @property
    def condition(self) -> str:
        return f"{self.routing}, {self.data}"


def _nothing() -> None:
    """Other ranks send what their models have."""


def measure_pair(setting: Setting, rank: int, send_zeros: Callable[[], None] = _nothing) -> Iterator[Part]:
    """Stock and FarSkip on two ranks, in all modes and conditions; what rank 0 yields is complete.

    send_zeros   has other ranks send zeros, where these do not come from their models
    """
    yield ("environment",), environment() | {"nccl": _nccl()}
    with tempfile.TemporaryDirectory() as folder:
        models = {wiring: _student(setting, wiring, rank, Path(folder)) for wiring in WIRINGS}
    steppers = {w: stepper(setting, model, rank=rank, together=True) for w, model in models.items()}
    for wiring, model in models.items():
        yield (MOVED_BY, wiring), fxskip.transport_of(model).as_data()
    yield from _measured(setting, steppers, rank, send_zeros)
    yield ("peak_gib",), _peak()


def measure_mirrored(setting: Setting, rank: int) -> Iterator[Part]:
    """The same by one process, whose other ranks are its mirror images."""
    with mirrored(RANKS) as memory:
        yield from measure_pair(setting, rank, _nothing if memory is None else memory.zero)


def _measured(
    setting: Setting, steppers: dict[Wiring, Stepper], rank: int, send_zeros: Callable[[], None]
) -> Iterator[Part]:
    """All conditions, one after the other."""
    for data, routings in _data_and_routings():
        if data == "zero data":
            zero(steppers.values())
            send_zeros()
        variants = [Variant(w, r, data, m) for r in routings for w in WIRINGS for m in MODES]
        times, windows, log = _in_turn(setting, steppers, variants, rank)
        everyone = gathered(times)
        for variant in variants:
            place = (variant.condition, variant.wiring, variant.mode)
            per_rank = [own[variant] for own in everyone]
            yield place, _row(per_rank) | {"clocks": log.summary(windows[variant])}
        for routing in routings:
            for wiring, one in steppers.items():
                found = _traced(setting, one, Variant(wiring, routing, data, "as it is"), everyone)
                yield (f"{routing}, {data}", wiring, "trace"), found


def measure_alone(setting: Setting, rank: int) -> Iterator[Part]:
    """One process without a mesh: the student against the original model, forward and backward."""
    yield ("environment",), environment()
    first = original(setting)
    second = fxskip.transform(original(setting), "farskip", inplace=True)
    share_weights(second, first)
    steppers = {
        "original": stepper(setting, first, rank=rank, together=False),
        "student": stepper(setting, second, rank=rank, together=False),
    }
    times: dict[str, list[Times]] = {name: [] for name in steppers}
    for one in steppers.values():
        one.timed(behind_another=True)
    shuffler, order = random.Random(0), list(steppers)
    for _ in range(setting.rounds):
        shuffler.shuffle(order)
        for name in order:
            times[name].append(steppers[name].timed(behind_another=True))
    for name, own in times.items():
        yield (name,), _row([own])
    ratio = _median_us(times["student"]) / _median_us(times["original"])
    yield ("student over original",), ratio
    yield ("peak_gib",), _peak()


def _student(setting: Setting, wiring: Wiring, rank: int, folder: Path) -> Any:
    """By measured costs, it is made twice: first to measure."""
    model = student(setting, wiring)
    if not setting.measured_costs:
        return model
    one = stepper(setting, model, rank=rank, together=True)
    costs = fxskip.trace(model, one.batch, steps=2).costs()
    path = gathered(folder / f"{wiring}.json")[0]  # the spec names the file, so it is one for all ranks
    if rank == 0:
        save_costs(costs, path)
    dist.barrier()
    del model, one
    return student(setting, wiring, path)


def _data_and_routings() -> list[tuple[Data, list[Routing]]]:
    """With zero data every router chooses the first experts, so routing goes in turn."""
    return [("real data", list(ROUTINGS)), ("zero data", ["routing in turn"])]


def _in_turn(
    setting: Setting, steppers: dict[Wiring, Stepper], variants: Sequence[Variant], rank: int
) -> tuple[dict[Variant, list[Times]], dict[Variant, list[Window]], PowerLog]:
    """Each variant once a round, in an order that all ranks draw alike."""
    times: dict[Variant, list[Times]] = {variant: [] for variant in variants}
    windows: dict[Variant, list[Window]] = {variant: [] for variant in variants}
    for variant in variants:  # captures and allocations
        _timed(steppers, variant)
    log, order, shuffler = PowerLog(), list(variants), random.Random(0)
    if rank == 0:
        log.start()
    try:
        for _ in range(setting.rounds):
            shuffler.shuffle(order)
            for variant in order:
                begin = time.time()
                times[variant].append(_timed(steppers, variant))
                windows[variant].append((begin, time.time()))
    finally:
        log.stop()
    return times, windows, log


def _timed(steppers: dict[Wiring, Stepper], variant: Variant) -> Times:
    with ROUTINGS[variant.routing](), MODES[variant.mode]():
        return steppers[variant.wiring].timed(behind_another=True)


def _traced(
    setting: Setting, one: Stepper, variant: Variant, everyone: list[dict[Variant, list[Times]]]
) -> dict[str, Any]:
    """Figures of a wiring in a condition: step times from before, C and K from steps under watch."""
    own: dict[Mode, ModeRuns] = {}
    for mode in MODES:
        with ROUTINGS[variant.routing](), MODES[mode]():
            on_gpu = one.device.type == "cuda"
            steps = range(setting.traced_steps)
            kernels = tuple(one.profiled() for _ in steps) if on_gpu else ()
            records = () if on_gpu else tuple(one.recorded()[0] for _ in steps)
        own[mode] = ModeRuns((), records, kernels)
    watched: list[Rank] = gathered(own)
    timed: list[Rank] = [
        {
            mode: ModeRuns(
                tuple(times[Variant(variant.wiring, variant.routing, variant.data, mode)]),
                runs.records,
                runs.kernels,
            )
            for mode, runs in rank.items()
        }
        for rank, times in zip(watched, everyone, strict=True)
    ]
    found = {part: figures(timed, part) for part in PARTS}
    return {part: asdict(one) | {"hidden": one.hidden} for part, one in found.items()}


def _row(per_rank: Sequence[Sequence[Times]]) -> dict[str, Any]:
    """Medians of the slower rank, and all samples of all ranks, in milliseconds."""
    medians = {
        f"{part}_ms": median_over_ranks([[t.of(part) / 1e3 for t in own] for own in per_rank])
        for part in PARTS
    }
    samples = [[{"forward": t.forward_us / 1e3, "step": t.step_us / 1e3} for t in own] for own in per_rank]
    return medians | {"samples_ms": samples}


def _median_us(times: Sequence[Times]) -> float:
    return statistics.median(one.step_us for one in times)


def _peak() -> float | None:
    """Of all allocations of this process so far, in GiB; None on a CPU."""
    return torch.cuda.max_memory_allocated() / 2**30 if device_here().type == "cuda" else None


def _nccl() -> str | None:
    return ".".join(map(str, torch.cuda.nccl.version())) if torch.cuda.is_available() else None
