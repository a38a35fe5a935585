"""Who watches a step of a rewired model, and notes when each task and each collective began and ended.

    tasks        forward, the nodes of a region that belong to one task; backward, the autograd nodes that they made
    collectives  from the issue until the result is there. On a GPU the end is read in a stream that does nothing else

On the host of a CPU times are those of the work. On a GPU they are those of the stream that the work is enqueued in,
and `host` tasks are timed on the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from fxskip.collectives.measuring import Place
from fxskip.schedule.order_region import RegionSchedule
from fxskip.schedule.tasks import HOST
from fxskip.tracing.clocks import Clock, Mark, finish
from fxskip.tracing.records import Flight, Phase, StepRecord, Task

_REVERSE = "gradient of "
_LEAF_NODE = "AccumulateGrad"


@dataclass
class _Open:
    """Something whose times are not read yet. `parts` are its single stretches of work."""

    place: Place
    phase: Phase
    start: Mark
    end: Mark
    parts: list[tuple[Mark, Mark]] = field(default_factory=list)


class _FlightWatch:
    """Of one collective."""

    def __init__(self, recorder: Recorder, name: str) -> None:
        self.recorder = recorder
        self.name, self.phase = name, recorder.phase
        self.place = recorder.place_of(name)
        recorder.interrupt()
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
            with torch.cuda.stream(recorder.side_stream()):
                work.wait()
                self.done = recorder.clock.mark()
        else:
            work.get_future().add_done_callback(lambda _: self._is_done())

    def _is_done(self) -> None:
        self.done = self.recorder.clock.host_mark()

    def waits(self) -> None:
        self.recorder.interrupt()
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
        self._roles: dict[str, list[Place]] = {}
        self._claimed: set[Any] = set()
        self._side: torch.cuda.Stream | None = None
        self._may_join = False
        self._running: list[_Open] = []
        self._ends: dict[Phase, Mark] = {}

    # --- what `Watcher` asks for ---

    def enter_region(self, layer: int, schedule: Any, inputs: Sequence[Any]) -> None:
        """Whatever made the inputs belongs to no task of this region."""
        self.schedules[layer] = schedule
        self._claimed |= {t.grad_fn for t in inputs if isinstance(t, Tensor) and t.grad_fn is not None}

    def enter(self, place: Place | None) -> None:
        """End the task that runs, and begin that of `place`; one that goes on goes on."""
        if place == self._place:
            return
        self._close()
        self._place = place
        if place is not None and self._is_timed(place):
            now = self._mark(place)
            self._tasks.append(_Open(self._named(place), self.phase, now, now))

    def made(self, value: Any) -> None:
        """Claim the autograd nodes that the value newly has, to know their task when they run backward."""
        if not torch.is_grad_enabled():
            return
        todo = [t.grad_fn for t in pytree.tree_leaves(value) if isinstance(t, Tensor)]
        while todo:
            node = todo.pop()
            if node is None or node in self._claimed or node.name().endswith(_LEAF_NODE):
                continue
            self._claimed.add(node)
            if self._place is not None and self._is_timed(self._place):
                node.register_prehook(partial(self._begin_backward, self._place))
                node.register_hook(partial(self._end_backward))
            todo += [following for following, _ in node.next_functions]

    def flight(self, name: str) -> _FlightWatch:
        """Begin to watch the collective of that name."""
        return _FlightWatch(self, name)

    # --- forward ---

    def _close(self) -> None:
        if self._place is not None and self._is_timed(self._place):
            task = self._tasks[-1]
            task.end = self._mark(self._place)
            task.parts.append((task.start, task.end))

    def interrupt(self) -> None:
        """A collective is issued or waited for: what runs is cut in two, so that no task holds the time of a wait."""
        self._may_join = False

    def _named(self, place: Place) -> Place:
        """In a recomputation tasks run again, and are others."""
        again = self.phase == "backward"
        return Place(place.layer, f"{place.role}.again", place.lane) if again else place

    def _mark(self, place: Place) -> Mark:
        return self.clock.host_mark() if place.lane == HOST else self.clock.mark()

    def _is_timed(self, place: Place) -> bool:
        """Tasks of compute and host; those of collectives are known by their flights."""
        return place.lane in ("compute", HOST)

    # --- backward ---

    def _begin_backward(self, place: Place, gradients: Any) -> None:
        of = Place(place.layer, f"{place.role}.bwd", place.lane)
        now = self.clock.mark()
        last = self._tasks[-1] if self._tasks else None
        if last is None or not self._may_join or last.place != of:
            self._tasks.append(_Open(of, "backward", now, now))
            self._may_join = True
        self._tasks[-1].parts.append((now, now))
        self._running.append(self._tasks[-1])

    def _end_backward(self, inputs: Any, outputs: Any) -> None:
        task = self._running.pop()  # a recomputation inside of it has added others
        task.end = self.clock.mark()
        task.parts[-1] = (task.parts[-1][0], task.end)

    # --- collectives ---

    def place_of(self, name: str) -> Place:
        """Where a collective belongs: forward, the task that runs; its reverse, the last one of its name."""
        known = self._roles.setdefault(name.removeprefix(_REVERSE), [])
        if name.startswith(_REVERSE):
            place = known.pop() if known else _by_name(name.removeprefix(_REVERSE))
            return Place(place.layer, f"{place.role}.bwd", place.lane)
        here = self._place
        place = here if here is not None and not self._is_timed(here) else _by_name(name)
        known.append(place)
        return self._named(place)

    def side_stream(self) -> torch.cuda.Stream:
        """A stream in which nothing but ends of collectives is noted."""
        if self._side is None:
            self._side = torch.cuda.Stream(self.clock.device)
        return self._side

    # --- the end ---

    def end_phase(self) -> None:
        """The forward, or the backward, is over."""
        self.enter(None)
        self._may_join = False
        self._ends[self.phase] = self.clock.mark()
        self.phase = "backward"

    def record(self) -> StepRecord:
        """Wait for the device, and read all times."""
        finish(self.clock.device)
        us = self.clock.us
        tasks = [
            Task(
                t.place.layer, t.place.role, t.place.lane, t.phase, us(t.start), us(t.end),
                sum(us(end) - us(start) for start, end in t.parts),
            )
            for t in self._tasks
        ]  # fmt: skip
        flights = [watch.read(self.clock) for watch in self.flights]
        return StepRecord(
            tuple(sorted(tasks, key=lambda one: one.start_us)),
            tuple(sorted(flights, key=lambda one: one.issued_us)),
            {phase: us(mark) for phase, mark in self._ends.items()},
        )


def _by_name(name: str) -> Place:
    """Role, lane and layer as the names of collectives have them: "reduce (tensor) of decoder layer 3"."""
    what, _, layer = name.rpartition(" of decoder layer ")
    kind, _, axis = what.removesuffix(")").partition(" (")
    return Place(int(layer), {"expert counts": "counts"}.get(kind, kind), axis or "expert")
