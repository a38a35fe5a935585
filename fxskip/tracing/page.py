"""The page about a timeline: figures, and pictures (SVG) of one layer and of the whole step."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from collections.abc import Iterator, Sequence

from fxskip.planning.legend import legend
from fxskip.planning.markup import document, element
from fxskip.schedule.result import CollectiveRecord, Placed
from fxskip.schedule.tasks import COMPUTE, HOST
from fxskip.schedule.timeline import Shown
from fxskip.tracing.records import Phase
from fxskip.tracing.text import estimated_rows, head, measured_rows
from fxskip.tracing.timeline import Timeline

_WIDTH, _MARGIN, _ROW, _GAP = 920.0, 70.0, 22.0, 4.0
_LETTER = 6.2
"""Pixels, on average, of the page's small print."""
_TICKS = 8
_SIGNS = {
    "Box": "a task; as wide as its time",
    "Filled box": "a collective with compute beside all of its time",
    "Dashed box": "a collective of which a part is exposed: nothing computes meanwhile",
}


def page(timeline: Timeline) -> str:
    """Self-contained HTML. Estimated and measured stand apart, and say which they are."""
    title = f"Timeline of {timeline.about.model}"
    layer = timeline.about.layers // 2
    return document(
        title,
        element("h1", title),
        *(element("p", line, class_="lead") for line in head(timeline)),
        *_table("Estimated", estimated_rows(timeline)),
        *_table("Measured", measured_rows(timeline)),
        *(part for phase in timeline.phases for part in _layer(timeline, phase, layer)),
        *(part for phase in timeline.phases for part in _whole(timeline, phase)),
        element("section", element("h2", "Signs"), legend(_SIGNS)),
    )


def _table(title: str, rows: Sequence[Sequence[str]]) -> Iterator[ET.Element]:
    if rows:
        heads = [element("th", cell, scope="col", class_="number") for cell in rows[0][1:]]
        body = [
            element(
                "tr",
                element("th", row[0], scope="row"),
                *(
                    element("td", cell, class_="number", data_name=name)
                    for cell, name in zip(row[1:], rows[0][1:], strict=True)
                ),
            )
            for row in rows[1:]
        ]
        table = element(
            "table",
            element("thead", element("tr", element("th", "Figure", scope="col"), *heads)),
            element("tbody", *body),
        )
        yield element("section", element("h2", title), table)


def _layer(timeline: Timeline, phase: Phase, layer: int) -> Iterator[ET.Element]:
    figures = []
    if phase in timeline.estimated:
        shown = timeline.estimated[phase].schedule
        figures.append(_figure(shown, "Estimated", timeline.window("estimated", phase, layer)))
    if any(task.phase == phase for task in timeline.ranks[0]["as it is"].records[-1].tasks):
        for rank in range(len(timeline.ranks)):
            shown_here = timeline.measured(phase, rank)
            window = timeline.window("measured", phase, layer, rank)
            figures.append(_figure(shown_here, f"Measured, rank {rank}", window))
    if figures:
        yield element("section", element("h2", f"Layer {layer}, {phase}"), *figures)


def _whole(timeline: Timeline, phase: Phase) -> Iterator[ET.Element]:
    figures = []
    if phase in timeline.estimated:
        shown = timeline.estimated[phase].schedule
        figures.append(_figure(shown, "Estimated", (0.0, shown.makespan_us)))
    for rank in range(len(timeline.ranks)):
        seen = timeline.measured(phase, rank)
        figures.append(_figure(seen, f"Measured, rank {rank}", (0.0, seen.makespan_us)))
    yield element("section", element("h2", f"Whole {phase}"), *figures)


def _figure(shown: Shown, title: str, window: tuple[float, float]) -> ET.Element:
    caption = f"{title}: {window[1] - window[0]:,.0f} us"
    return element("figure", element("figcaption", caption), picture(shown, caption, window))


def picture(shown: Shown, title: str, window: tuple[float, float]) -> ET.Element:
    """Lanes as rows, time to the right; each box says its name and times to who points at it."""
    start, end = window
    lanes = sorted({one.lane for one in shown.placed}, key=lambda lane: (lane != COMPUTE, lane != HOST, lane))
    scale = (_WIDTH - _MARGIN) / max(end - start, 1e-9)
    records = {(one.name, one.start_us): one for one in shown.collectives}
    height = _ROW * (len(lanes) + 1) + _GAP
    parts: list[ET.Element] = [element("title", title)]
    for row, lane in enumerate(lanes):
        top = _ROW * row
        parts.append(element("text", lane, class_="end", x=0, y=top + _ROW - 8))
        for one in shown.placed:
            if one.lane == lane and start < one.end_us and one.start_us < end:
                box = (_MARGIN + scale * max(0.0, one.start_us - start), top)
                width = scale * (min(one.end_us, end) - max(one.start_us, start))
                parts.append(_box(one, box, width, records.get((one.name, one.start_us))))
    parts += _ruler(start, end, scale, height)
    return element(
        "svg", *parts, class_="lanes", viewBox=f"0 0 {_WIDTH:g} {height:g}", width=_WIDTH, role="img",
        aria_label=f"{title}. The same is in words in timeline.txt.",
    )  # fmt: skip


def _box(one: Placed, at: tuple[float, float], width: float, record: CollectiveRecord | None) -> ET.Element:
    what = f"{one.name}, {one.start_us:,.1f} to {one.end_us:,.1f} us"
    kind = _kind(one.name)
    if record is not None:
        what += f", {record.bytes:,} bytes, exposed {record.exposed_us:,.1f} us"
        kind = f"trip {'exposed' if record.exposed_us else 'hidden'}"
    x, y = at
    group = element(
        "g",
        element("title", what),
        element("rect", class_="box", x=x, y=y + _GAP / 2, width=max(width, 0.5), height=_ROW - _GAP, rx=2),
        class_=kind,
    )
    short = one.name.removesuffix(".bwd")
    if len(short) * _LETTER > width:
        short = short.partition(".")[2]
    if short and len(short) * _LETTER <= width:
        anchor = width / 2 if record is not None else 3  # the style sheet centres the text of trips
        group.append(element("text", short, x=x + anchor, y=y + _ROW - 8))
    return group


def _kind(name: str) -> str:
    """Class of a task, which gives it its colour: that of its sub-block."""
    block = name.partition(".")[2]
    return next(
        (kind for kind in ("attention", "moe", "dense", "mixer") if block.startswith(kind)), "stream-task"
    )


def _ruler(start: float, end: float, scale: float, height: float) -> Iterator[ET.Element]:
    step = (end - start) / _TICKS
    for k in range(_TICKS):
        x = _MARGIN + scale * step * k
        yield element("path", class_="write", d=f"M{x:g} {height - _ROW:g}v4")
        label = f"{start + step * k:,.0f}" + (" us" if k == 0 else "")
        yield element("text", label, class_="end", x=x, y=height - 6)
