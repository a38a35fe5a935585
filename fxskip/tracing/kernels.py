"""Kernels of one step on a GPU, from the profiler of PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from fxskip.tracing.records import Kernel

_PHASE_ENDS = "fxskip: a phase ends"


def kernels_of(
    step: Callable[[Callable[[], None]], None], exchanges: tuple[str, ...] = ()
) -> tuple[Kernel, ...]:
    """The kernels of `step`, by start, in microseconds from the first one.

    step        runs, and calls what it is given at the end of the forward and of the backward: the device is waited for
                there, so that each kernel belongs to one of the two
    exchanges   how names of further pieces of work begin that communicate, in small letters

    NCCL kernels, copies between GPUs and the meetings before these communicate; other copies and fills are neither that
    nor compute, and are left out. The time of an NCCL kernel, or of a meeting, includes its wait for the other ranks.
    """

    def phase_ends() -> None:
        with torch.profiler.record_function(_PHASE_ENDS):
            torch.cuda.synchronize()

    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities, acc_events=True) as profile:
        step(phase_ends)
    return read_events(profile.events(), exchanges)


def read_events(events: Iterable[Any], exchanges: tuple[str, ...] = ()) -> tuple[Kernel, ...]:
    """The kernels among events of the profiler, and in which phase each ran."""

    def kind(name: str) -> str:
        return "communication" if name.lower().startswith(exchanges) else kind_of(name)

    events = list(events)
    marks = [e.time_range.end for e in events if e.name == _PHASE_ENDS and e.device_type.name == "CPU"]
    found = [e for e in events if e.device_type.name == "CUDA" and not e.is_user_annotation and kind(e.name)]
    first = min((event.time_range.start for event in found), default=0.0)
    kernels = [
        Kernel(
            event.name,
            kind(event.name) == "communication",
            "forward" if event.time_range.start < min(marks) else "backward",
            event.time_range.start - first,
            event.time_range.end - first,
            event.device_resource_id,
        )
        for event in found
    ]
    return tuple(sorted(kernels, key=lambda one: one.start_us))


def kind_of(name: str) -> str:
    """What a piece of work of a GPU is, by its name: "communication", "compute", or "" for neither."""
    low = name.lower()
    if "nccl" in low or "symmetric_memory" in low or low.startswith(("memcpy ptop", "memcpy peer")):
        return "communication"
    if low.startswith(("memcpy", "memset")):
        return ""
    return "compute"
