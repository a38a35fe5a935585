"""One measured phase of one rank, in the form in which a schedule is shown."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from fxskip.schedule.intervals import uncovered
from fxskip.schedule.result import CollectiveRecord, Placed, tasks_beside
from fxskip.schedule.tasks import COMPUTE
from fxskip.tracing.records import Flight, Phase, StepRecord, Task


@dataclass(frozen=True)
class Measured:
    """Times are microseconds from the beginning of the phase."""

    placed: tuple[Placed, ...]
    collectives: tuple[CollectiveRecord, ...]
    makespan_us: float

    @property
    def source(self) -> Literal["measured"]:
        """Where times are from."""
        return "measured"

    @property
    def exposed_us(self) -> float:
        """|C without K|: two collectives that are exposed together count once."""
        compute = [(one.start_us, one.end_us) for one in self.placed if one.lane == COMPUTE]
        return uncovered([(one.start_us, one.end_us) for one in self.collectives], compute)


def measured(record: StepRecord, phase: Phase) -> Measured:
    """What ran in `phase`, by start."""
    begin = 0.0 if phase == "forward" else record.phase_end_us["forward"]
    tasks = [_placed(one, one.start_us, one.end_us, begin) for one in record.tasks if one.phase == phase]
    flights = [one for one in record.flights if one.phase == phase]
    compute = [one for one in tasks if one.lane == COMPUTE]
    places = [_placed(one, one.issued_us, one.done_us, begin) for one in flights]
    records = [
        _record(flight, place, tasks, compute, begin) for flight, place in zip(flights, places, strict=True)
    ]
    return Measured(
        tuple(sorted([*tasks, *places], key=lambda one: one.start_us)),
        tuple(records),
        record.phase_end_us[phase] - begin,
    )


def _placed(one: Task | Flight, start_us: float, end_us: float, begin: float) -> Placed:
    return Placed(one.name, one.lane, start_us - begin, end_us - begin)


def _record(
    flight: Flight, place: Placed, tasks: Sequence[Placed], compute: Sequence[Placed], begin: float
) -> CollectiveRecord:
    starts = [one.start_us for one in tasks]
    before = bisect_left(starts, place.start_us)
    after = None if flight.landed_us is None else bisect_left(starts, flight.landed_us - begin)
    beside = tasks_beside(place, compute)
    exposed = uncovered([(place.start_us, place.end_us)], [(one.start_us, one.end_us) for one in compute])
    return CollectiveRecord(
        place.name, place.lane, flight.layer,
        tasks[before - 1].name if before else None,
        tasks[after].name if after is not None and after < len(tasks) else None,
        flight.bytes, flight.us, place.start_us, place.end_us, beside, exposed, "",
    )  # fmt: skip
