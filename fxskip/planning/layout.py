"""Where everything in a picture of the wiring stands. Nothing here draws; `picture` does, from these numbers.

Top to bottom in the order in which the model computes. The residual stream is a vertical line at the left, side
streams (variants that lack something) run beside it, then come the sub-blocks, and at the right what travels
between processes. A sub-block reads at its upper left and adds to the stream at its lower left.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from fxskip.planning.fold import Fold
from fxskip.planning.plan import Plan, PlannedBlock
from fxskip.planning.words import back, span, unseen

STREAM_X = 24.0
FIRST_COLUMN = 10.0
COLUMN = 16.0
LABELS = 50.0
BOX_WIDTH = 180.0
TRIP_WIDTH = 64.0
MARGIN = 8.0

START = 34.0
CARD_TITLE = 28.0
CARD_MARGIN = 10.0
GAP = 30.0
READ_AT = 16.0
ADD_AT = 38.0
ADD_STEP = 20.0
LEAVE_ABOVE = 10.0
NOTE_AT = 38.0
NOTE_STEP = 13.0
NOTE_LETTERS = 26
END = 30.0


@dataclass(frozen=True)
class Row:
    """One sub-block as drawn. `number` is its place in the plan, which differs where layers are folded."""

    block: PlannedBlock
    number: int
    notes: tuple[str, ...]
    """Lines of text that say what the sub-block does not see."""
    top: float

    @property
    def addends(self) -> list[str]:
        """Routed experts come last: most variants that lack something lack them, and can leave just before."""
        return sorted(self.block.adds, key=lambda name: name == "routed")

    @property
    def read_y(self) -> float:
        return self.top + READ_AT

    def add_y(self, addend: str) -> float:
        """Height at which the addend joins the stream."""
        return self.top + ADD_AT + ADD_STEP * self.addends.index(addend)

    @property
    def bottom(self) -> float:
        adds = ADD_AT + ADD_STEP * (len(self.addends) - 1) + 12
        return self.top + max(adds, NOTE_AT + NOTE_STEP * len(self.notes))


@dataclass(frozen=True)
class SideStream:
    """A variant of the stream on its way to the one sub-block that reads it."""

    reader: Row
    top: float
    """It leaves the stream here, before the first addend that it lacks."""
    joins: tuple[float, ...]
    """Heights of the later addends that it does have."""
    passes: tuple[float, ...]
    """Heights of the lines that it crosses: addends that it lacks, and reads of the full stream."""
    column: int = 0

    @property
    def bottom(self) -> float:
        return self.reader.read_y

    @property
    def x(self) -> float:
        return STREAM_X + FIRST_COLUMN + COLUMN * (self.column + 1)


@dataclass(frozen=True)
class Trip:
    """Something that travels between processes, from `top` to `bottom`."""

    name: str
    owner: Row
    top: float
    bottom: float
    hidden: bool
    """Whether a sub-block can run meanwhile."""
    column: int = 0


@dataclass(frozen=True)
class Card:
    """The frame around the layers of one fold."""

    title: str
    top: float
    bottom: float
    repeated: bool


@dataclass(frozen=True)
class Layout:
    rows: tuple[Row, ...]
    cards: tuple[Card, ...]
    side_streams: tuple[SideStream, ...]
    trips: tuple[Trip, ...]
    side_columns: int
    trip_columns: int

    @property
    def box_x(self) -> float:
        return STREAM_X + FIRST_COLUMN + COLUMN * self.side_columns + LABELS

    @property
    def trips_x(self) -> float:
        return self.box_x + BOX_WIDTH + MARGIN

    @property
    def width(self) -> float:
        return self.trips_x + TRIP_WIDTH * self.trip_columns + MARGIN

    @property
    def height(self) -> float:
        return self.cards[-1].bottom + END


def layout_after(plan: Plan, folds: Sequence[Fold]) -> Layout:
    """The wiring of the plan."""
    rows, cards = _rows(plan, folds)
    side_streams = _in_columns([s for i in range(len(rows)) if (s := _side_stream(rows, i))])
    trips = _trips(rows, original=False)
    return Layout(rows, cards, side_streams, trips, _columns(side_streams), _columns(trips))


def layout_before(after: Layout) -> Layout:
    """The original wiring with every sub-block at the same place."""
    rows = tuple(replace(row, block=replace(row.block, without=())) for row in after.rows)
    return replace(after, rows=rows, side_streams=(), trips=_trips(rows, original=True))


def _rows(plan: Plan, folds: Sequence[Fold]) -> tuple[tuple[Row, ...], tuple[Card, ...]]:
    rows: list[Row] = []
    cards: list[Card] = []
    y = START
    for fold in folds:
        top = y
        y += CARD_TITLE
        for number, block in enumerate(plan.blocks):
            if block.layer in fold.drawn_layers:
                rows.append(Row(block, number, _notes(plan, number), y))
                y = rows[-1].bottom + GAP
        cards.append(Card(_title(fold), top, y, fold.times > fold.drawn))
        y += CARD_MARGIN
    return tuple(rows), tuple(cards)


def _notes(plan: Plan, number: int) -> tuple[str, ...]:
    phrases = unseen(plan, number)
    return tuple(textwrap.wrap("without " + ", ".join(phrases), NOTE_LETTERS)) if phrases else ()


def _title(fold: Fold) -> str:
    where = span(fold.layers)
    if fold.times == fold.drawn:
        return where
    if fold.drawn > 1:
        return f"{where}: all wired like these {len(fold.drawn_layers)}"
    what = "one layer" if fold.period == 1 else f"these {fold.period} layers"
    return f"{where}: {what}, {fold.times} times"


def _side_stream(rows: Sequence[Row], index: int) -> SideStream | None:
    reader = rows[index]
    lacks = {(index - writes, name) for name, writes in map(back, reader.block.without)}
    if not lacks:
        return None
    first = min(rows[i].add_y(name) for i, name in lacks)
    later = [(i, name) for i in range(index) for name in rows[i].addends if rows[i].add_y(name) >= first]
    joins = tuple(rows[i].add_y(name) for i, name in later if (i, name) not in lacks)
    passes = [rows[i].add_y(name) for i, name in later if (i, name) in lacks]
    passes += [row.read_y for row in rows[:index] if not row.block.without and row.read_y > first]
    return SideStream(reader, first - LEAVE_ABOVE, joins, tuple(passes))


def _trips(rows: Sequence[Row], *, original: bool) -> tuple[Trip, ...]:
    """The dispatch and combine of expert parallelism and the all-reduces of tensor parallelism.

    Original: without a rule every block waits for the one before it.
    """
    dispatches, results = [], []
    for i, row in enumerate(rows):
        before = 0 if original else len(row.block.window.dispatch_under)
        after = 0 if original else len(row.block.window.combine_under)
        if row.block.kind == "moe":
            top = rows[i - before].top if before else row.top - GAP + 5
            dispatches.append(Trip("dispatch", row, top, row.top - 5, before > 0))
        bottom = rows[i + after].bottom if after else row.bottom + GAP - 5
        name = "combine" if row.block.kind == "moe" else "all-reduce"
        results.append(Trip(name, row, row.bottom + 5, bottom, after > 0))
    first = _in_columns(dispatches)
    return (*first, *(replace(trip, column=trip.column + _columns(first)) for trip in _in_columns(results)))


Placed = TypeVar("Placed", SideStream, Trip)


def _in_columns(things: Sequence[Placed]) -> tuple[Placed, ...]:
    """Each in the first column where nothing else stands at its height."""
    ends: list[float] = []
    placed: list[Placed] = []
    for thing in sorted(things, key=lambda t: t.top):
        column = next((i for i, end in enumerate(ends) if end < thing.top), len(ends))
        ends[column : column + 1] = [thing.bottom]
        placed.append(replace(thing, column=column))
    return tuple(placed)


def _columns(things: Sequence[SideStream] | Sequence[Trip]) -> int:
    return max((thing.column + 1 for thing in things), default=0)
