"""How much of the measured communication is hidden. Formulas stand at each figure.

C is the set of times in which a collective of a rank runs, K that in which it computes, |.| the length of a set. Where
there is a GPU, both are the kernels of steps under its profiler; else tasks and collectives as the host sees them.

t is a step's time on its slowest rank, without anybody watching: as it is, blocking (t_blocking), and with nothing sent
(t_none); the median over steps. Of several ranks the one with the most exposed time counts, for all figures of one row.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from fxskip.schedule.intervals import Span, length, uncovered, union
from fxskip.tracing.records import Phase
from fxskip.tracing.runs import Mode, ModeRuns, median_over_ranks

Part = Literal["forward", "backward", "step"]
PARTS: tuple[Part, ...] = ("forward", "backward", "step")
Rank = Mapping[Mode, ModeRuns]


@dataclass(frozen=True)
class Figures:
    """Measured, of a phase or of the whole step. Times are microseconds."""

    part: Part
    source: Literal["kernels", "host"]
    """Where C and K are from: the profiler of a GPU, or what the host saw."""
    step_us: float
    """t."""
    blocking_us: float | None
    """t_blocking. None where there is nothing to send, or it was not measured."""
    none_us: float | None
    """t_none."""
    collective_us: float
    """Sum of the collectives' times, each with its wait for the other ranks."""
    min_collective_us: float | None
    """Sum over the collectives of the least time on any rank: the rank that comes last waits for nobody. None where
    ranks had different numbers of collectives."""
    exposed_us: float
    """|C without K|."""
    compute_us: float
    """|K|."""
    idle_us: float
    """From the first to the last of C and K: that, minus |C or K|."""
    stretch_us: float | None
    """|K| minus |K| with nothing sent."""
    coincidence: float
    """|C and K| / |C|: the hidden part by trace. 1 without collectives. It flatters, for what runs beside a collective
    may be slowed, and a collective that waits for its peers looks hidden."""

    @property
    def hidden(self) -> float | None:
        """1 - (t - t_none) / (t_blocking - t_none): the hidden part by step time. None where blocking costs nothing."""
        if self.blocking_us is None or self.none_us is None or self.blocking_us <= self.none_us:
            return None
        return 1 - (self.step_us - self.none_us) / (self.blocking_us - self.none_us)


def figures(ranks: Sequence[Rank], part: Part) -> Figures:
    """Of `part`, from what all ranks measured."""
    modes = ranks[0]
    views = [_views(rank["as it is"], part) for rank in ranks]
    exposed = [statistics.median(view.exposed for view in rank) for rank in views]
    worst = max(range(len(ranks)), key=exposed.__getitem__)
    own = views[worst]
    stretch = None
    if "nothing sent" in modes:
        quiet = _views(ranks[worst]["nothing sent"], part)
        stretch = _median(own, _View.busy) - _median(quiet, _View.busy)
    total = _median(own, lambda view: length(union(view.collectives)))
    return Figures(
        part,
        "kernels" if ranks[0]["as it is"].kernels else "host",
        step_us(ranks, "as it is", part),
        step_us(ranks, "blocking", part) if "blocking" in modes else None,
        step_us(ranks, "nothing sent", part) if "nothing sent" in modes else None,
        _median(own, lambda view: length(view.collectives)),
        _least(views),
        exposed[worst],
        _median(own, _View.busy),
        _median(own, lambda view: view.idle),
        stretch,
        1 - exposed[worst] / total if total else 1.0,
    )


def step_us(ranks: Sequence[Rank], mode: Mode, part: Part) -> float:
    """Median over steps of the time on the slowest rank."""
    return median_over_ranks([[times.of(part) for times in rank[mode].times] for rank in ranks])


@dataclass(frozen=True)
class _View:
    """C and K of one step on one rank."""

    collectives: tuple[Span, ...]
    compute: tuple[Span, ...]

    def busy(self) -> float:
        return length(union(self.compute))

    @property
    def exposed(self) -> float:
        return uncovered(self.collectives, self.compute)

    @property
    def idle(self) -> float:
        both = union([*self.collectives, *self.compute])
        return both[-1][1] - both[0][0] - length(both) if both else 0.0


def _views(runs: ModeRuns, part: Part) -> list[_View]:
    """One a step."""
    phases: tuple[Phase, ...] = ("forward", "backward") if part == "step" else (part,)
    if runs.kernels:
        return [
            _View(
                tuple((k.start_us, k.end_us) for k in step if k.communicates and k.phase in phases),
                tuple((k.start_us, k.end_us) for k in step if not k.communicates and k.phase in phases),
            )
            for step in runs.kernels
        ]
    return [
        _View(
            tuple((f.issued_us, f.done_us) for f in record.flights if f.phase in phases),
            tuple((t.start_us, t.end_us) for t in record.tasks if t.phase in phases and t.lane == "compute"),
        )
        for record in runs.records
    ]


def _median(views: Sequence[_View], of: Callable[[_View], float]) -> float:
    return statistics.median(map(of, views))


def _least(views: Sequence[Sequence[_View]]) -> float | None:
    """Median over steps of the sum of each collective's least time on any rank."""
    sums = []
    for step in zip(*views, strict=True):
        if len({len(view.collectives) for view in step}) > 1:
            return None
        same = zip(*(view.collectives for view in step), strict=True)
        sums.append(sum(min(end - start for start, end in spans) for spans in same))
    found: float = statistics.median(sums)
    return found
