"""A timeline in Chrome's trace event format, which ui.perfetto.dev opens.

Each rank is a process, each lane a thread; the estimate is a process of its own. An arrow leads from where a collective
is handed to its transport to where it is waited for.

Format: "Trace Event Format", Google, https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from fxskip.schedule.tasks import COMPUTE, HOST
from fxskip.tracing.records import StepRecord
from fxskip.tracing.timeline import Timeline

_ESTIMATED = 1_000_000
"""Process number of the estimate: far behind all ranks."""
_KERNELS = "kernels, stream "

Event = dict[str, Any]


def trace_events(timeline: Timeline) -> dict[str, Any]:
    """The whole file; times are microseconds."""
    arrows = itertools.count(1)
    events: list[Event] = []
    for rank, modes in enumerate(timeline.ranks):
        writer = _Process(rank, f"rank {rank}, measured", arrows)
        writer.step(modes["as it is"].records[-1])
        events += writer.finished()
        for step in modes["as it is"].kernels[-1:]:
            # Steps under the profiler are others than those with the tasks, and their times begin at the first kernel.
            kernels = _Process(len(timeline.ranks) + rank, f"rank {rank}, measured by the profiler", arrows)
            for one in step:
                kernels.slice(f"{_KERNELS}{one.stream}", one.name, one.start_us, one.end_us, one.phase)
            events += kernels.finished()
    if timeline.estimated:
        writer = _Process(_ESTIMATED, "estimated", arrows)
        begin = 0.0
        for phase, estimate in timeline.estimated.items():
            writer.schedule(estimate.schedule, phase, begin)
            begin += estimate.schedule.makespan_us
        events += writer.finished()
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {"made_by": "fxskip.trace", "model": timeline.about.model},
    }


class _Process:
    """Collects the events of one process of the file."""

    def __init__(self, number: int, name: str, arrows: Iterator[int]) -> None:
        self.number, self.name, self.arrows = number, name, arrows
        self.lanes: dict[str, int] = {COMPUTE: 0, HOST: 1}
        self.events: list[Event] = []

    def finished(self) -> list[Event]:
        """Names of the process and its lanes, then what was collected, by time."""
        used = {event["tid"] for event in self.events}
        names = [
            self._event("M", 0, name="process_name", args={"name": self.name}),
            self._event("M", 0, name="process_sort_index", args={"sort_index": self.number}),
        ]
        for lane, tid in self.lanes.items():
            if tid in used:
                names.append(self._event("M", tid, name="thread_name", args={"name": lane}))
                names.append(self._event("M", tid, name="thread_sort_index", args={"sort_index": tid}))
        return names + sorted(self.events, key=lambda event: float(event["ts"]))

    def slice(self, lane: str, name: str, start_us: float, end_us: float, phase: str, **more: Any) -> None:
        """Something that takes time."""
        self.events.append(
            self._event(
                "X", self._tid(lane), name=name, cat=phase, ts=start_us, dur=end_us - start_us, args=more
            )
        )

    def arrow(self, name: str, at: tuple[str, float], to: tuple[str, float]) -> None:
        """From a time on one lane to a later one on another, each inside of a slice there."""
        number = next(self.arrows)
        for kind, (lane, us) in (("s", at), ("f", to)):
            # "e": the arrow ends at the slice that lies around its time, not at the next one
            more = {"bp": "e"} if kind == "f" else {}
            self.events.append(
                self._event(kind, self._tid(lane), name=name, cat="collective", id=number, ts=us, **more)
            )

    def step(self, record: StepRecord) -> None:
        """What was measured of one step."""
        for task in record.tasks:
            self.slice(task.lane, task.name, task.start_us, task.end_us, task.phase)
        for one in record.flights:
            self.slice(one.lane, one.name, one.issued_us, one.done_us, one.phase, bytes=one.bytes)
            self.slice(COMPUTE, f"start {one.name}", one.called_us, one.issued_us, one.phase)
            if one.wait_us is not None and one.landed_us is not None:
                self.slice(COMPUTE, f"wait {one.name}", one.wait_us, one.landed_us, one.phase)
                self.arrow(one.name, (COMPUTE, one.called_us), (COMPUTE, one.wait_us))

    def schedule(self, schedule: Any, phase: str, begin: float) -> None:
        """What was estimated of one phase, which begins at `begin`."""
        at = schedule.at
        for task in schedule.placed:
            self.slice(task.lane, task.name, begin + task.start_us, begin + task.end_us, phase)
        for one in schedule.collectives:
            if one.waited_by is not None:
                reader = at[one.waited_by]
                start, end = (one.lane, begin + one.start_us), (reader.lane, begin + reader.start_us)
                self.arrow(one.name, start, end)

    def _tid(self, lane: str) -> int:
        return self.lanes.setdefault(lane, len(self.lanes))

    def _event(self, kind: str, tid: int, **more: Any) -> Event:
        return {"ph": kind, "pid": self.number, "tid": tid, **more}
