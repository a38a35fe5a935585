"""Times and peaks of work on one GPU, and what they were measured on.

Without a GPU, where only a tiny run makes sense, times are the host's and peaks are not known.
"""

import hashlib
import platform
import random
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from fxskip.errors import FxskipError, first_line
from fxskip.version import __version__

PACKAGE = Path(__file__).resolve().parents[1]
Work = Callable[[], object]
# What stands in a report in place of a result, with the reason. That another library is not installed, or that a
# baseline needs more memory than there is, are findings; anything else is a failure of the run, and of its exit status.
UNAVAILABLE, FAILED = "unavailable", "failed"
COMPARED_PACKAGES = ("liger-kernel",)


def reason(error: Exception, *, is_comparison: bool = False) -> dict[str, str]:
    """`is_comparison`: what ended so is a baseline or another library's, not what is measured."""
    is_finding = is_comparison and isinstance(error, torch.OutOfMemoryError | ImportError)
    return {UNAVAILABLE if is_finding else FAILED: f"{type(error).__name__}: {first_line(error)[:300]}"}


def attempted(work: Callable[[], Any]) -> Any:
    """What `work` returns, or the reason why it failed: the rest of a report is still worth having."""
    try:
        return work()
    except Exception as error:
        traceback.print_exc()
        return reason(error)


def failures(report: Any, place: str = "") -> Iterator[str]:
    """Place and message of everything in a report that failed."""
    if isinstance(report, Mapping):
        for name, value in report.items():
            if name == FAILED:
                yield f"{place}: {value}"
            else:
                yield from failures(value, f"{place}, {name}" if place else str(name))
    elif isinstance(report, list):
        for number, value in enumerate(report):
            yield from failures(value, f"{place}[{number}]")


def require_no_failures(report: Any, *, who: str, repeat: str) -> None:
    """`repeat` says how to run less than all again."""
    found = list(failures(report))
    if found:
        raise FxskipError(
            who,
            f"{len(found)} measurements failed",
            where="\n".join(found),
            hint=f"all others are in the file; {repeat}",
        )


@dataclass(frozen=True)
class Measurement:
    """`peak_gib` is the largest sum of allocations during one call, above what was allocated before it; None without
    a GPU."""

    samples_ms: list[float]
    peak_gib: float | None

    @property
    def median_ms(self) -> float:
        return statistics.median(self.samples_ms)


Measured = dict[str, Measurement | dict[str, str]]


def measure(
    variants: Mapping[str, Work], comparisons: Mapping[str, Work], *, rounds: int, warm_up: int = 2
) -> Measured:
    """Each once a round, in an order of its own, so that a GPU that gets hot slows all of them.

    Before each timed call comes one that is not: the first after another variant runs at that one's clock.

    What cannot run has the reason in place of a measurement. It failed, unless it is one of `comparisons` (baselines,
    other libraries) that is not installed or does not fit: that is unavailable.
    """
    every = {**variants, **comparisons}
    reasons: dict[str, dict[str, str]] = {}
    peaks: dict[str, float | None] = {}
    samples: dict[str, list[float]] = {name: [] for name in every}
    for name, work in every.items():
        try:
            for _ in range(warm_up):
                work()
            peaks[name] = peak_gib(work)
        except Exception as error:  # the other variants' times are still worth having
            reasons[name] = reason(error, is_comparison=name in comparisons)
            torch.cuda.empty_cache()
    order, shuffler = [name for name in every if name not in reasons], random.Random(0)
    for _ in range(rounds):
        shuffler.shuffle(order)
        for name in order:
            every[name]()
            samples[name].append(elapsed_ms(every[name]))
    return {n: reasons[n] if n in reasons else Measurement(samples[n], peaks[n]) for n in every}


def elapsed_ms(work: Work) -> float:
    if not torch.cuda.is_available():
        began = time.perf_counter()
        work()
        return 1000 * (time.perf_counter() - began)
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    start.record()
    work()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end))


def peak_gib(work: Work) -> float | None:
    if not torch.cuda.is_available():
        work()
        return None
    # What an earlier variant left in the cache may not fit the next one's sizes; fragments are not its peak.
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    work()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**30


def kernel_ms(name: str, work: Work, *, repeats: int = 10) -> float:
    """Median time of the kernel with `name` in its name; what launches it may take longer than the kernel. Without a
    GPU the time of `work`."""
    work()
    if not torch.cuda.is_available():
        return elapsed_ms(work)

    def often() -> None:
        for _ in range(repeats):
            work()

    events = profiled(often)
    times: list[float] = [event.time_range.elapsed_us() / 1000 for event in events if name in event.name]
    if not times:
        raise FxskipError(
            "kernel_ms",
            f"no kernel with {name} in its name ran",
            hint=f"these did: {', '.join({event.name[:90] for event in events})}",
        )
    return statistics.median(times)


def kernel_times_ms(work: Work) -> dict[str, float]:
    """Time in each kernel of one call, the longest first, and `span`: from the first's start to the last's end."""
    if not torch.cuda.is_available():
        return {"span": elapsed_ms(work)}
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
    report: dict[str, Any] = {
        "command": " ".join(["fxskip", *sys.argv[1:]]),  # sys.argv[0] says where it is installed
        "fxskip": __version__,
        "commit": git("rev-parse", "--short", "HEAD") or "not a checkout",
        "changed_since_commit": git("status", "--porcelain", "--", "fxskip").splitlines(),
        "sources_sha256": sources_hash(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": triton_version(),
        **{package: installed_version(package) for package in COMPARED_PACKAGES},
        "gpus": torch.cuda.device_count(),
    }
    if torch.cuda.is_available():
        device = torch.cuda.get_device_properties(0)
        report |= {"gpu": device.name, "gpu_gib": round(device.total_memory / 2**30, 1)}
    return report


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


def installed_version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def triton_version() -> str:
    try:
        import triton
    except ImportError:
        return "not installed"
    return str(triton.__version__)


def as_json(measured: Measured) -> dict[str, Any]:
    return {
        name: result if isinstance(result, dict) else asdict(result) | {"median_ms": result.median_ms}
        for name, result in measured.items()
    }


def print_rows(title: str, measured: Measured, *, floor: str, tokens: int) -> None:
    """One line a variant: time, its ratio to the variant `floor`, tokens a second, peak."""
    print(f"\n{title}", flush=True)
    base = measured[floor]
    for name, result in measured.items():
        if isinstance(result, dict):
            print(f"  {name:44s} {' '.join(result.values())[:160]}", flush=True)
            continue
        ratio = "" if isinstance(base, dict) else f"x{result.median_ms / base.median_ms:6.3f}"
        spread = max(result.samples_ms) - min(result.samples_ms)
        peak = "" if result.peak_gib is None else f"  +{result.peak_gib:6.4f} GiB"
        print(
            f"  {name:44s} {result.median_ms:9.2f} ms  {ratio}  {tokens / result.median_ms:8.0f} tok/ms{peak}"
            f"  (spread {spread:.2f} ms)",
            flush=True,
        )
