"""Times and peaks of work on one GPU, and what they were measured on."""

import hashlib
import platform
import random
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from fxskip.errors import first_line
from fxskip.version import __version__

PACKAGE = Path(__file__).resolve().parents[1]
Work = Callable[[], object]


@dataclass(frozen=True)
class Measurement:
    """`peak_gib` is the largest sum of allocations during one call, above what was allocated before it."""

    samples_ms: list[float]
    peak_gib: float

    @property
    def median_ms(self) -> float:
        return statistics.median(self.samples_ms)


def measure(variants: Mapping[str, Work], *, rounds: int, warm_up: int = 2) -> dict[str, Measurement | str]:
    """Each variant once a round, in an order of its own, so that a GPU that gets hot slows all of them.

    Before each timed call comes one that is not: the first after another variant runs at that one's clock.

    A variant that runs out of memory, or is not installed, has the reason in place of a measurement.
    """
    failures: dict[str, str] = {}
    peaks: dict[str, float] = {}
    samples: dict[str, list[float]] = {name: [] for name in variants}
    for name, work in variants.items():
        try:
            for _ in range(warm_up):
                work()
            peaks[name] = peak_gib(work)
        except Exception as error:  # the other variants' times are still worth having
            failures[name] = f"{type(error).__name__}: {first_line(error)[:160]}"
            torch.cuda.empty_cache()
    order, shuffler = [name for name in variants if name not in failures], random.Random(0)
    for _ in range(rounds):
        shuffler.shuffle(order)
        for name in order:
            variants[name]()
            samples[name].append(elapsed_ms(variants[name]))
    return {n: failures[n] if n in failures else Measurement(samples[n], peaks[n]) for n in variants}


def elapsed_ms(work: Work) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    start.record()
    work()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end))


def peak_gib(work: Work) -> float:
    # What an earlier variant left in the cache may not fit the next one's sizes; fragments are not its peak.
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    work()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**30


def kernel_events(work: Work) -> list[tuple[str, float]]:
    """Name and milliseconds of each kernel that `work` runs, in order."""
    return [(event.name, event.time_range.elapsed_us() / 1000) for event in profiled(work)]


def kernel_times_ms(work: Work) -> dict[str, float]:
    """Time in each kernel of one call, the longest first, and `span`: from the first's start to the last's end."""
    events = profiled(work)
    totals: dict[str, float] = {}
    for event in events:
        totals[event.name[:90]] = totals.get(event.name[:90], 0.0) + event.time_range.elapsed_us() / 1000
    span = max(e.time_range.end for e in events) - min(e.time_range.start for e in events)
    return {"span": span / 1000, **dict(sorted(totals.items(), key=lambda item: -item[1])[:16])}


def profiled(work: Work) -> list[Any]:
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities, acc_events=True) as profile:
        work()
        torch.cuda.synchronize()
    return [event for event in profile.events() if event.device_type.name == "CUDA"]


def environment() -> dict[str, Any]:
    device = torch.cuda.get_device_properties(0)
    return {
        "command": " ".join(["fxskip", *sys.argv[1:]]),  # sys.argv[0] says where it is installed
        "fxskip": __version__,
        "commit": git("rev-parse", "--short", "HEAD") or "not a checkout",
        "changed_since_commit": git("status", "--porcelain", "--", "fxskip").splitlines(),
        "sources_sha256": sources_hash(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": triton_version(),
        "gpu": device.name,
        "gpu_gib": round(device.total_memory / 2**30, 1),
        "gpus": torch.cuda.device_count(),
    }


def git(*arguments: str) -> str:
    done = subprocess.run(
        ["git", *arguments], cwd=PACKAGE.parent, capture_output=True, text=True, check=False
    )
    return done.stdout.strip()


def sources_hash() -> str:
    """Of all Python files of the package: says what ran also where the commit beside it is not what ran."""
    digest = hashlib.sha256()
    for path in sorted(PACKAGE.rglob("*.py")):
        digest.update(f"{path.relative_to(PACKAGE).as_posix()}\0".encode() + path.read_bytes())
    return digest.hexdigest()


def triton_version() -> str:
    try:
        import triton
    except ImportError:
        return "not installed"
    return str(triton.__version__)


def as_json(measured: Mapping[str, Measurement | str]) -> dict[str, Any]:
    return {
        name: {"failed": result}
        if isinstance(result, str)
        else asdict(result) | {"median_ms": result.median_ms}
        for name, result in measured.items()
    }


def print_rows(title: str, measured: Mapping[str, Measurement | str], *, floor: str, tokens: int) -> None:
    """One line a variant: time, its ratio to the variant `floor`, tokens a second, peak."""
    print(f"\n{title}", flush=True)
    base = measured[floor]
    for name, result in measured.items():
        if isinstance(result, str):
            print(f"  {name:44s} {result}", flush=True)
            continue
        ratio = "" if isinstance(base, str) else f"x{result.median_ms / base.median_ms:6.3f}"
        spread = max(result.samples_ms) - min(result.samples_ms)
        print(
            f"  {name:44s} {result.median_ms:9.2f} ms  {ratio}  {tokens / result.median_ms:8.0f} tok/ms"
            f"  +{result.peak_gib:6.3f} GiB  (spread {spread:.2f} ms)",
            flush=True,
        )
