"""Clocks and power of all GPUs of the host while something runs, from nvidia-smi."""

import shutil
import statistics
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from fxskip.bench.measure import UNAVAILABLE
from fxskip.errors import first_line

PERIOD_MS = 20
_FIELDS = "timestamp,index,clocks.sm,power.draw.instant"
_FLUSHED_S = 1.0
"""How long the last lines may stay in a buffer of the program."""

Window = tuple[float, float]
"""Seconds since the epoch."""


@dataclass(frozen=True)
class Reading:
    at: float
    """Seconds since the epoch."""
    gpu: int
    mhz: float
    """Of the SMs."""
    watts: float
    """At this moment, not the average of the last second."""


class PowerLog:
    """Reads on, from `start` to `stop`."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self.readings: list[Reading] = []
        self.why_not = "it was not started"

    def start(self) -> None:
        """Begin to read. Where there is no nvidia-smi, `summary` says so."""
        program = shutil.which("nvidia-smi")
        if program is None:
            self.why_not = "nvidia-smi is not installed"
            return
        self._process = subprocess.Popen(
            [program, f"--query-gpu={_FIELDS}", "--format=csv,noheader,nounits", f"--loop-ms={PERIOD_MS}"],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip

    def stop(self) -> None:
        """End, and take what was read."""
        if self._process is None:
            return
        time.sleep(_FLUSHED_S)
        self._process.terminate()
        said, _ = self._process.communicate(timeout=10)
        self._process = None
        self.take(said.splitlines())

    def take(self, lines: Sequence[str]) -> None:
        """Read the lines of nvidia-smi; what is no reading is kept as the reason for there being none."""
        for line in lines:
            try:
                self.readings.append(_reading(line))
            except ValueError:
                self.why_not = first_line(line) or self.why_not

    def summary(self, windows: Sequence[Window]) -> dict[str, Any]:
        """For each GPU the median clock and power within the windows, and of how many readings."""
        found: dict[str, Any] = {}
        inside = [r for r in self.readings if any(begin <= r.at <= end for begin, end in windows)]
        for gpu in sorted({reading.gpu for reading in inside}):
            own = [reading for reading in inside if reading.gpu == gpu]
            found[f"gpu {gpu}"] = {
                "mhz": statistics.median(r.mhz for r in own),
                "watts": statistics.median(r.watts for r in own),
                "readings": len(own),
            }
        if found:
            return found
        return {UNAVAILABLE: "no reading within the steps" if self.readings else self.why_not}


def _reading(line: str) -> Reading:
    at, gpu, mhz, watts = (field.strip() for field in line.split(","))
    return Reading(
        datetime.strptime(at, "%Y/%m/%d %H:%M:%S.%f").timestamp(), int(gpu), float(mhz), float(watts)
    )
