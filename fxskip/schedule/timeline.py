"""A schedule, or what was measured, as text: one row a lane, time to the right, a line for each collective below.

farskip forward   estimated   total 680 us   exposed 330 us   1 column = 10 us
us       0         100       200       300
compute  [attn0-------]         [r]
expert                 [dispatc]
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

from fxskip.errors import ScheduleError
from fxskip.schedule.result import CollectiveRecord, Placed
from fxskip.schedule.tasks import COMPUTE, HOST

WIDTH = 100
"""Columns of time unless the caller says otherwise."""
_NICE = (1, 2, 5)


class Shown(Protocol):
    """What is shown: a Schedule, or a measured phase."""

    @property
    def placed(self) -> Sequence[Placed]: ...
    @property
    def collectives(self) -> Sequence[CollectiveRecord]: ...
    @property
    def makespan_us(self) -> float: ...
    @property
    def exposed_us(self) -> float: ...
    @property
    def source(self) -> Literal["estimated", "measured"]:
        """Where the times are from."""


def timeline(
    schedule: Shown,
    *,
    title: str,
    start_us: float = 0.0,
    end_us: float | None = None,
    width: int = WIDTH,
    records: bool = True,
) -> str:
    """The text of a schedule, or of the part of it from `start_us` to `end_us`.

    A task is as wide as its time, at least one column, and its name is cut to what fits: from three columns on there is
    a box, below that a stroke a column. Boxes of collectives are filled with `=`, or with `.` where a part is exposed.

    width    columns of time, at most
    records  with a line for each collective

    Raises ScheduleError for a part that holds no time or lies outside the schedule.
    """
    end_us = schedule.makespan_us if end_us is None else min(end_us, schedule.makespan_us)
    if not 0 <= start_us < end_us:
        raise ScheduleError(
            "timeline",
            f"from {start_us:g} to {end_us:g} us there is nothing to show",
            hint=f"the schedule goes from 0 to {schedule.makespan_us:g} us",
        )
    column_us = _column(end_us - start_us, width)
    start_us -= start_us % column_us
    lanes = sorted(
        {one.lane for one in schedule.placed}, key=lambda lane: (lane != COMPUTE, lane != HOST, lane)
    )
    margin = max(map(len, [*lanes, "us"])) + 2
    columns = int((end_us - start_us) / column_us) + 1
    exposed = {record.name for record in schedule.collectives if record.exposed_us}
    rows = [f"{'us':<{margin}}" + _ruler(start_us, column_us, columns)]
    for lane in lanes:
        tasks = [
            one
            for one in schedule.placed
            if one.lane == lane and start_us < one.end_us and one.start_us < end_us
        ]
        rows.append(f"{lane:<{margin}}" + _row(tasks, start_us, column_us, columns, exposed))
    shown = [one for one in schedule.collectives if start_us < one.end_us and one.start_us < end_us]
    head = (
        f"{title}   {schedule.source}   total {schedule.makespan_us:.0f} us   exposed {schedule.exposed_us:.0f} us   "
        f"1 column = {column_us:g} us"
    )
    return "\n".join([head, *rows, *(_lines(shown) if records else ())])


def _column(span_us: float, width: int) -> float:
    """A round number of microseconds, such that the span fits into the width."""
    size = 1e-3
    while True:
        for step in _NICE:
            if span_us / (step * size) <= width:
                return step * size
        size *= 10


def _ruler(start_us: float, column_us: float, columns: int) -> str:
    text = ""
    for at in range(0, columns, 10):
        text = f"{text:<{at}}{start_us + at * column_us:g}"
    return text


def _row(tasks: Sequence[Placed], start_us: float, column_us: float, columns: int, exposed: set[str]) -> str:
    row = [" "] * columns
    for one in tasks:
        first = max(0, int((one.start_us - start_us) / column_us))
        last = min(columns, max(first + 1, round((one.end_us - start_us) / column_us)))
        fill = "-" if one.lane in (COMPUTE, HOST) else "." if one.name in exposed else "="
        for k, letter in enumerate(_box(one.name, last - first, fill)):
            row[first + k] = letter
    return "".join(row).rstrip()


def _box(name: str, width: int, fill: str) -> str:
    """`[name---]`, with as much of the name as fits; the last parts of a dotted name say most.

    That it is of the backward pass, the title says.
    """
    if width < 3:
        return "|" * width
    short = name if len(name) <= width - 2 else name.removesuffix(".bwd")
    while len(short) > width - 2 and "." in short:
        short = short.partition(".")[2]
    return "[" + short[: width - 2].ljust(width - 2, fill) + "]"


def _lines(records: Sequence[CollectiveRecord]) -> list[str]:
    """What hides each collective, or why nothing does."""
    if not records:
        return []
    rows = [("collective", "start", "end", "bytes", "us", "exposed", "waited by", "hidden by")]
    for one in records:
        hidden = ", ".join(f"{name} {us:.0f}" for name, us in one.hidden_by)
        why = "; ".join(part for part in (hidden, one.reason) if part)
        rows.append(
            (
                one.name,
                f"{one.start_us:.0f}",
                f"{one.end_us:.0f}",
                f"{one.bytes:,}",
                f"{one.cost_us:.0f}",
                f"{one.exposed_us:.0f}",
                one.waited_by or "the end",
                why,
            )
        )
    widths = [max(len(row[k]) for row in rows) for k in range(len(rows[0]) - 1)]
    return [
        "",
        *(
            "  ".join([*(f"{cell:<{w}}" for cell, w in zip(row, widths, strict=False)), row[-1]])
            for row in rows
        ),
    ]
