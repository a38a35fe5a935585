"""When something happened: on the host, or in the current stream of a GPU."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch

Mark = float | torch.cuda.Event
"""A time of the host in microseconds, or an event of a stream, whose time is known when the device is done."""


@dataclass(frozen=True)
class Clock:
    """One step's time. Zero is when the step began."""

    device: torch.device
    zero_us: float
    zero_event: torch.cuda.Event | None

    @staticmethod
    def begin(device: torch.device, *, idle: bool = True) -> Clock:
        """Begin to count, where the device has nothing left to do, or behind what it still does.

        Marks of the device and of the host have one zero in the first case alone.
        """
        if idle:
            finish(device)
        event = _event() if device.type == "cuda" else None
        return Clock(device, _host_us(), event)

    def mark(self) -> Mark:
        """Now, in the order of the current stream where there is one."""
        return _event() if self.zero_event is not None else self.host_mark()

    def host_mark(self) -> Mark:
        """Now, on the host."""
        return _host_us()

    def us(self, mark: Mark) -> float:
        """Microseconds from the beginning of the step; call it after `finish`."""
        if isinstance(mark, float):
            return mark - self.zero_us
        assert self.zero_event is not None
        return 1e3 * float(self.zero_event.elapsed_time(mark))


def finish(device: torch.device) -> None:
    """Wait until the device has done all that it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _host_us() -> float:
    return time.perf_counter_ns() / 1e3


def _event() -> Any:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event
