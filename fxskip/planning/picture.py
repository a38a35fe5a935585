"""The wiring before and after as two pictures (SVG) of the same layout."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from collections.abc import Iterator

from fxskip.planning.fold import fold
from fxskip.planning.layout import (
    BOX_WIDTH,
    NOTE_AT,
    NOTE_STEP,
    STREAM_X,
    TRIP_WIDTH,
    Card,
    Layout,
    Row,
    SideStream,
    Trip,
    layout_after,
    layout_before,
)
from fxskip.planning.markup import element
from fxskip.planning.plan import Plan
from fxskip.planning.words import kind, mflop, module_name

CORNER = 6.0


def pictures(plan: Plan) -> tuple[ET.Element, ET.Element]:
    """The original wiring and the planned one; sub-blocks and layers stand at the same heights in both."""
    after = layout_after(plan, fold(plan))
    original = "Every sub-block reads the full residual stream, so each waits for the one before it."
    rewired = f"{plan.rewired} of {len(plan.blocks)} sub-blocks read a stream that lacks earlier outputs."
    return (
        _picture("before", "The original wiring", original, layout_before(after)),
        _picture("after", f"The wiring under {plan.spec}", rewired, after),
    )


def _picture(name: str, title: str, description: str, layout: Layout) -> ET.Element:
    return element(
        "svg",
        element("title", title, id=f"{name}-title"),
        element("desc", f"{description} The table below says the same in words.", id=f"{name}-desc"),
        *(part for card in layout.cards for part in _card(card, layout)),
        *_stream(layout),
        *(_full_read(row, layout) for row in layout.rows if not row.block.without),
        *(_writes(row, layout) for row in layout.rows),
        *(_side_stream(stream, layout) for stream in layout.side_streams),
        *(_sub_block(row, layout) for row in layout.rows),
        *(_trip(trip, layout) for trip in layout.trips),
        class_=f"wiring {name}",
        viewBox=f"0 0 {layout.width:g} {layout.height:g}",
        width=layout.width,
        role="img",
        aria_labelledby=f"{name}-title {name}-desc",
    )


def _card(card: Card, layout: Layout) -> Iterator[ET.Element]:
    place = {"x": 1.0, "width": layout.width - 8, "height": card.bottom - card.top, "rx": 8.0}
    if card.repeated:
        yield element("rect", class_="card behind", y=card.top + 5, **(place | {"x": 6.0}))
    yield element("rect", class_="card", y=card.top, **place)
    yield element("text", card.title, class_="layers", x=layout.box_x, y=card.top + 18)


def _stream(layout: Layout) -> Iterator[ET.Element]:
    yield element("text", "embeddings", class_="end", x=STREAM_X - 18, y=14)
    yield element("path", class_="stream", d=f"M{STREAM_X:g} 20V{layout.height - 22:g}")
    yield _arrow_head("stream", STREAM_X, layout.height - 14, down=True)
    yield element("text", "final norm", class_="end", x=STREAM_X + 12, y=layout.height - 14)


def _full_read(row: Row, layout: Layout) -> ET.Element:
    line = f"M{STREAM_X:g} {row.read_y:g}H{layout.box_x - 7:g}"
    return element(
        "g",
        element("path", class_="read", d=line, data_reader=row.block.path),
        element("circle", class_="tap", cx=STREAM_X, cy=row.read_y, r=3.5),
        _arrow_head("read", layout.box_x, row.read_y, down=None),
    )


def _writes(row: Row, layout: Layout) -> ET.Element:
    """The lines from a sub-block back to the stream, with what they carry where it is not the whole output."""
    group = element("g", class_="writes")
    for name in row.addends:
        y = row.add_y(name)
        group.append(element("path", class_="write", d=f"M{layout.box_x:g} {y:g}H{STREAM_X + 13:g}"))
        group.append(_arrow_head("write", STREAM_X + 7, y, down=False))
        if len(row.addends) > 1:
            group.append(element("text", name, class_="addend", x=layout.box_x - 4, y=y - 4))
        group.append(_plus(STREAM_X, y, f"{row.block.path} {name}"))
    return group


def _plus(x: float, y: float, adds: str) -> ET.Element:
    circle = element("circle", class_="sum", cx=x, cy=y, r=6.5, data_adds=adds)
    cross = element("path", class_="cross", d=f"M{x - 3.5:g} {y:g}h7M{x:g} {y - 3.5:g}v7")
    return element("g", circle, cross)


def _side_stream(stream: SideStream, layout: Layout) -> ET.Element:
    """Leaves the stream, runs down beside it over or through the lines of later outputs, ends in its reader."""
    x, top, bottom = stream.x, stream.top, stream.bottom
    line = (
        f"M{STREAM_X:g} {top:g}H{x - CORNER:g}q{CORNER:g} 0 {CORNER:g} {CORNER:g}V{bottom - CORNER:g}"
        f"q0 {CORNER:g} {CORNER:g} {CORNER:g}H{layout.box_x - 7:g}"
    )
    bridges = [element("path", class_="bridge", d=f"M{x:g} {y - 6:g}v12") for y in stream.passes]
    return element(
        "g",
        *bridges,
        element("path", class_="read rewired", d=line, data_reader=stream.reader.block.path),
        element("circle", class_="tap rewired", cx=STREAM_X, cy=top, r=3.5),
        *(_plus(x, y, "") for y in stream.joins),
        _arrow_head("rewired", layout.box_x, bottom, down=None),
    )


def _sub_block(row: Row, layout: Layout) -> ET.Element:
    block, x = row.block, layout.box_x
    cost = f"{block.costs.parameters:,} parameters, {mflop(block.costs)} MFLOP a token"
    group = element(
        "g",
        element("title", f"{block.path}: {kind(block)}, {cost}"),
        class_=f"block {block.kind}",
        data_block=block.path,
    )
    box = {"x": x, "y": row.top, "width": BOX_WIDTH, "height": row.bottom - row.top, "rx": 6.0}
    group.append(element("rect", class_="box", **box))
    group.append(element("text", kind(block), class_="kind", x=x + 10, y=row.top + 20))
    group.append(element("text", module_name(block), class_="module", x=x + BOX_WIDTH - 8, y=row.top + 20))
    if block.without:
        for i, note in enumerate(row.notes):
            group.append(element("text", note, class_="note", x=x + 10, y=row.top + NOTE_AT + NOTE_STEP * i))
    return group


def _trip(trip: Trip, layout: Layout) -> ET.Element:
    x, width = layout.trips_x + TRIP_WIDTH * trip.column, TRIP_WIDTH - 4
    beside = "other sub-blocks can run meanwhile" if trip.hidden else "no other sub-block can run meanwhile"
    return element(
        "g",
        element("title", f"{trip.name} of {trip.owner.block.path}: {beside}"),
        element("rect", x=x, y=trip.top, width=width, height=trip.bottom - trip.top, rx=5.0),
        element("text", trip.name, x=x + width / 2, y=(trip.top + trip.bottom) / 2 + 3.5),
        class_=f"trip {'hidden' if trip.hidden else 'exposed'}",
    )


def _arrow_head(name: str, x: float, y: float, *, down: bool | None) -> ET.Element:
    """Its tip is at (x, y); it points down, left (False) or right (None)."""
    if down:
        shape = f"M{x:g} {y:g}l-5 -9h10z"
    else:
        side = 8 if down is False else -8
        shape = f"M{x:g} {y:g}l{side} -4.5v9z"
    return element("path", class_=f"head {name}", d=shape)
