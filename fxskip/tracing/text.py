"""A timeline as text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fxskip.schedule.timeline import timeline as lanes
from fxskip.tracing.timeline import Timeline


def text(timeline: Timeline, layer: int, width: int) -> str:
    """What was traced, figures, and the lanes of a layer and of each phase; estimated and measured one by one."""
    parts = [*head(timeline), "", *_table(timeline)]
    for phase in timeline.phases:
        if phase in timeline.estimated:
            start, end = timeline.window("estimated", phase, layer)
            schedule = timeline.estimated[phase].schedule
            title = f"layer {layer} {phase}"
            parts += ["", lanes(schedule, title=title, start_us=start, end_us=end, width=width)]
        if any(task.phase == phase for task in timeline.ranks[0]["as it is"].records[-1].tasks):
            start, end = timeline.window("measured", phase, layer)
            title = f"layer {layer} {phase}, rank 0"
            shown = timeline.measured(phase)
            parts += ["", lanes(shown, title=title, start_us=start, end_us=end, width=width)]
    for phase in timeline.phases:
        if phase in timeline.estimated:
            schedule = timeline.estimated[phase].schedule
            parts += ["", lanes(schedule, title=f"whole {phase}", width=width, records=False)]
        for rank in range(len(timeline.ranks)):
            shown = timeline.measured(phase, rank)
            parts += ["", lanes(shown, title=f"whole {phase}, rank {rank}", width=width, records=False)]
    return "\n".join(parts)


def head(timeline: Timeline) -> Iterator[str]:
    """What was traced, and what cannot be said of it."""
    about = timeline.about
    shapes = ", ".join(f"{name} {shape}" for name, shape in about.batch.items())
    processes = "1 process" if about.processes == 1 else f"{about.processes} processes"
    yield (
        f"{about.model}, {about.layers} layers, {processes} on {about.key.device}, {about.key.dtype}, {shapes}, "
        f"{len(timeline.ranks[0]['as it is'].times)} steps"
    )
    yield "forward and backward" if about.gradients else f"forward only: {about.why_no_gradients}"
    yield notes(timeline)
    if about.choice is not None:
        yield f"transport of rows: {about.choice}"


def notes(timeline: Timeline) -> str:
    """What is in flight, and what is not."""
    about = timeline.about
    if about.mode == "one process":
        return "one process: nothing is sent, and nothing is in flight"
    if not timeline.estimated:
        return f"runtime mode {about.mode}: collectives wait where they start, and nothing was scheduled"
    waits = "" if about.mode == "scheduled" else "; each collective waits where it starts"
    order = "" if about.backward == "mirrored" else f", schedule.backward: {about.backward}"
    return f"runtime mode {about.mode}, {about.exchange} by {about.transport}{order}{waits}"


def _table(timeline: Timeline) -> Iterator[str]:
    for title, rows in (("estimated", estimated_rows(timeline)), ("measured", measured_rows(timeline))):
        if rows:
            widths = [max(len(row[k]) for row in rows) for k in range(len(rows[0]))]
            yield title
            for row in rows:
                cells = [f"{row[0]:<{widths[0]}}"]
                cells += [f"{cell:>{w}}" for cell, w in zip(row[1:], widths[1:], strict=True)]
                yield "  " + "  ".join(cells)


def estimated_rows(timeline: Timeline) -> list[tuple[str, ...]]:
    """A head, and a row for each figure; columns are phases."""
    if not timeline.estimated:
        return []
    found = [one.figures for one in timeline.estimated.values()]
    return [
        ("", *timeline.estimated),
        ("time, us", *(_us(f.step_us) for f in found)),
        ("blocking, us", *(_us(f.blocking_us) for f in found)),
        ("nothing sent, us", *(_us(f.none_us) for f in found)),
        ("hidden by step time", *(_share(f.hidden) for f in found)),
        ("hidden by trace (coincidence)", *(_share(f.coincidence) for f in found)),
        ("collectives, us", *(_us(f.collective_us) for f in found)),
        ("exposed, us", *(_us(f.exposed_us) for f in found)),
        ("stretch of compute, us", *(_us(f.stretch_us) for f in found)),
    ]


def measured_rows(timeline: Timeline) -> list[tuple[str, ...]]:
    """A head, and a row for each figure; columns are phases and the step."""
    found = timeline.figures
    rows = [("", *(f.part for f in found)), ("time, us", *(_us(f.step_us) for f in found))]
    if found[0].blocking_us is not None:
        rows += [
            ("blocking, us", *(_us(f.blocking_us) for f in found)),
            ("nothing sent, us", *(_us(f.none_us) for f in found)),
            ("hidden by step time", *(_share(f.hidden) for f in found)),
            ("hidden by trace (coincidence)", *(_share(f.coincidence) for f in found)),
            ("collectives, us", *(_us(f.collective_us) for f in found)),
            ("of them without waits for others, us", *(_us(f.min_collective_us) for f in found)),
            ("exposed, us", *(_us(f.exposed_us) for f in found)),
            ("stretch of compute, us", *(_us(f.stretch_us) for f in found)),
        ]
    rows += [
        ("compute, us", *(_us(f.compute_us) for f in found)),
        ("idle, us", *(_us(f.idle_us) for f in found)),
    ]
    return [*rows, *_of_roles(timeline, len(found))]


def _of_roles(timeline: Timeline, columns: int) -> Sequence[tuple[str, ...]]:
    """Exposed time of the collectives of each role, in the last step of rank 0, summed over layers."""
    sums: dict[str, list[float]] = {}
    for k, phase in enumerate(timeline.phases):
        for record in timeline.measured(phase).collectives:
            role = record.name.partition(".")[2].removesuffix(".bwd")
            sums.setdefault(role, [0.0] * len(timeline.phases))[k] += record.exposed_us
    return [
        (f"exposed {role}, rank 0, us", *map(_us, [*parts, *([sum(parts)] if columns > len(parts) else [])]))
        for role, parts in sums.items()
    ]


def _us(us: float | None) -> str:
    return "unknown" if us is None else f"{us:,.0f}"


def _share(share: float | None) -> str:
    return "none to hide" if share is None else f"{share:.2f}"
