"""Who watches a step of a rewired model, and notes when each task and each collective began and ended.

    tasks        forward, the nodes of a region that belong to one task; backward, the autograd nodes that they made, or
                 what the region itself says, where its backward has an order of its own
    collectives  from the issue until the result is there. On a GPU the end is read in a stream that does nothing else

On a CPU times are those of the work. On a GPU they are those of the stream that the work is enqueued in, with what the
stream waits for its host between two kernels; tasks of the host are timed on the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from fxskip.collectives.measuring import Part, Place, Sent
from fxskip.schedule.order_region import RegionSchedule
from fxskip.schedule.tasks import COMPUTE, HOST
from fxskip.tracing.clocks import Clock, Mark, finish
from fxskip.tracing.records import Flight, Phase, StepRecord, Task

_ACCUMULATION = "AccumulateGrad"


@dataclass
class _Open:
    """A stretch of a task whose times are not read yet."""

    place: Place
    phase: Phase
    start: Mark
    end: Mark


class _FlightWatch:
    """Of one collective."""

    def __init__(self, recorder: Recorder, sent: Sent) -> None:
        self.recorder = recorder
        self.phase = recorder.phase
        self.place = recorder.place_of(sent)
        self.bytes = 0
        self.called = recorder.clock.mark()
        self.start: Mark | None = None
        self.done: Mark | None = None
        self.wait: Mark | None = None
        self.end: Mark | None = None

    def issued(self, buffer: Tensor, work: Any) -> None:
        if work is None:
            return
        recorder = self.recorder
        self.bytes = buffer.numel() * buffer.element_size()
        self.start = recorder.clock.mark()
        recorder.flights.append(self)
        if buffer.is_cuda:
            with torch.cuda.stream(recorder.side_stream(self.place.lane)):
                work.wait()
                self.done = recorder.clock.mark()
        else:
            work.get_future().add_done_callback(lambda _: self._is_done())

    def _is_done(self) -> None:
        self.done = self.recorder.clock.host_mark()

    def waits(self) -> None:
        self.wait = self.recorder.clock.mark()

    def landed(self) -> None:
        self.end = self.recorder.clock.mark()

    def read(self, clock: Clock) -> Flight:
        assert self.start is not None
        called, start = clock.us(self.called), clock.us(self.start)
        done = None if self.done is None else clock.us(self.done)
        end = None if self.end is None else clock.us(self.end)
        # The transport's thread may get to say so later than whoever waits goes on.
        known = [us for us in (done, end) if us is not None]
        wait = end if self.wait is None else clock.us(self.wait)
        return Flight(
            self.place.layer, self.place.role, self.place.lane, self.phase, self.bytes, called, start,
            max(start, min(known, default=start)), wait, end,
        )  # fmt: skip


class Recorder:
    """Watches one step; `record` reads the times when it is over."""

    def __init__(self, device: torch.device) -> None:
        self.clock = Clock.begin(device)
        self.phase: Phase = "forward"
        self.flights: list[_FlightWatch] = []
        self.schedules: dict[int, RegionSchedule | None] = {}
        self._tasks: list[_Open] = []
        self._place: Place | None = None
        """Of what runs: of the forward, or with another name of the backward or a recomputation."""
        self._places: dict[int, Place] = {}
        """Of the flights that were seen to start."""
        self._claimed: set[Any] = set()
        self._sides: dict[str, torch.cuda.Stream] = {}
        self._ends: dict[Phase, Mark] = {}

    # --- what `Watcher` asks for ---

    def enter_region(self, layer: int, schedule: Any, inputs: Sequence[Any]) -> None:
        """Whatever made the inputs belongs to no task of this region."""
        self.schedules[layer] = schedule
        for tensor in inputs:
            if isinstance(tensor, Tensor) and tensor.grad_fn is not None:
                self._claim(tensor.grad_fn, None)

    def enter(self, place: Place | None, part: Part = "forward") -> None:
        """End the task that runs, and begin that part of `place`."""
        self._switch(place and (self._again(place) if part == "forward" else _part(place, part)))

    def made(self, place: Place | None, values: Any) -> None:
        """Claim the autograd nodes that the values newly have, to know their task when they run backward."""
        if not torch.is_grad_enabled():
            return
        todo = [t.grad_fn for t in pytree.tree_leaves(values) if isinstance(t, Tensor)]
        while todo:
            node = todo.pop()
            # What adds up a parameter's gradient counts to the task that runs before it.
            if node is not None and node not in self._claimed and not node.name().endswith(_ACCUMULATION):
                self._claim(node, place)
                todo += [following for following, _ in node.next_functions]

    def flight(self, sent: Sent) -> _FlightWatch:
        """Begin to watch that collective."""
        return _FlightWatch(self, sent)

    # --- tasks ---

    def _claim(self, node: Any, place: Place | None) -> None:
        if node not in self._claimed:
            self._claimed.add(node)
            backward = place and _part(place, "bwd")
            node.register_prehook(lambda _: self._switch(backward))

    def _switch(self, place: Place | None) -> None:
        """What runs from here on belongs to `place`."""
        if place == self._place:
            return
        if self._place is not None and _is_timed(self._place):
            self._tasks[-1].end = self._mark(self._place)
        self._place = place
        if place is not None and _is_timed(place):
            now = self._mark(place)
            self._tasks.append(_Open(place, self.phase, now, now))

    def _again(self, place: Place) -> Place:
        """In a recomputation tasks run again, and are others."""
        return place if self.phase == "forward" else _part(place, "again")

    def _mark(self, place: Place) -> Mark:
        return self.clock.host_mark() if place.lane == HOST else self.clock.mark()

    # --- collectives ---

    def place_of(self, sent: Sent) -> Place:
        """Where a collective belongs: the task that runs, if it is one that sends; a reverse to what it reverses."""
        if sent.flight is None:  # whatever runs meanwhile
            return sent.place
        if sent.is_reverse:
            return _part(self._places.get(sent.flight, sent.place), "bwd")
        here = self._place
        if here is not None and not _is_timed(here):  # it has its number there, and ".again"
            return self._places.setdefault(sent.flight, here)
        return self._again(self._places.setdefault(sent.flight, sent.place))

    def side_stream(self, lane: str) -> torch.cuda.Stream:
        """A stream in which nothing but ends of that lane's collectives is noted: it waits for each in turn, and one of
        another lane may end before."""
        if lane not in self._sides:
            self._sides[lane] = torch.cuda.Stream(self.clock.device)
        return self._sides[lane]

    # --- the end ---

    def end_phase(self) -> None:
        """The forward, or the backward, is over."""
        self._switch(None)
        self._ends[self.phase] = self.clock.mark()
        self.phase = "backward"

    def record(self) -> StepRecord:
        """Wait for the device, and read all times."""
        finish(self.clock.device)
        self._claimed.clear()  # their hooks hold this object, which would keep them
        us = self.clock.us
        tasks = [
            Task(t.place.layer, t.place.role, t.place.lane, t.phase, us(t.start), us(t.end))
            for t in self._tasks
        ]
        flights = [watch.read(self.clock) for watch in self.flights]
        return StepRecord(
            tuple(sorted(tasks, key=lambda one: one.start_us)),
            tuple(sorted(flights, key=lambda one: one.issued_us)),
            {phase: us(mark) for phase, mark in self._ends.items()},
        )


def _is_timed(place: Place) -> bool:
    """Tasks of compute and host are; those of collectives are known by their flights."""
    return place.lane in (COMPUTE, HOST)


def _part(place: Place, ending: str) -> Place:
    return replace(place, role=f"{place.role}.{ending}")
