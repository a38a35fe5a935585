"""How much of a step's communication is hidden: the same figures from a simulation that a measurement has.

Three runs of the same steps are compared: as they are (t), with each collective waited for right after its start
(t_blocking), and with collectives that take no time (t_none).

    hidden       1 - (t - t_none) / (t_blocking - t_none): the part of the cost of communication that is saved
    coincidence  |C and K| / |C|, with C the union of the times in which a collective runs and K that of compute. It
                 is what a profiler's trace shows, and flatters: a kernel beside a collective may be slowed
    exposed      |C| - |C and K|
    stretch      time of all compute tasks, minus that of the same tasks without communication
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fxskip.schedule.intervals import Span, length, uncovered, union
from fxskip.schedule.machine import Machine
from fxskip.schedule.simulate import Simulation, simulate
from fxskip.schedule.steps import Step, blocking
from fxskip.schedule.tasks import COMPUTE, HOST, TaskGraph
from fxskip.schedule.transfer import Interval


@dataclass(frozen=True)
class OverlapFigures:
    """Simulated; times in microseconds. Of several ranks the one with the most exposed time counts."""

    step_us: float
    blocking_us: float
    none_us: float
    collective_us: float
    """Of all collectives in the step, peers waited for and slowed as they are."""
    exposed_us: float
    stretch_us: float
    coincidence: float
    """1 where there is no collective."""

    @property
    def hidden(self) -> float:
        """1 where communication costs nothing even if it blocks."""
        cost = self.blocking_us - self.none_us
        return 1 - (self.step_us - self.none_us) / cost if cost > 0 else 1.0


def overlap_figures(
    graph: TaskGraph, steps: Sequence[Step], machine: Machine | None = None
) -> OverlapFigures:
    """Simulate the steps on every rank of the machine, and the two runs that they are compared with.

    Raises ScheduleError if the steps hang, read early, or miss or repeat a task.
    """
    run = simulate(graph, steps, machine).require_sound()
    none = simulate(graph, steps, machine, communication=False).require_sound()
    blocked = simulate(graph, blocking(steps), machine).require_sound()
    rank = max(range(len(run.intervals)), key=lambda r: _exposed(run, r))
    collective = length(union(_collectives(run, rank)))
    exposed = _exposed(run, rank)
    return OverlapFigures(
        run.step_us,
        blocked.step_us,
        none.step_us,
        length(_collectives(run, rank)),
        exposed,
        length(_compute(run, rank)) - length(_compute(none, rank)),
        1 - exposed / collective if collective else 1.0,
    )


def _exposed(run: Simulation, rank: int) -> float:
    """|C| - |C and K|."""
    return uncovered(_collectives(run, rank), _compute(run, rank))


def _collectives(run: Simulation, rank: int) -> list[Span]:
    return _spans(one for one in run.intervals[rank] if one.lane not in (COMPUTE, HOST))


def _compute(run: Simulation, rank: int) -> list[Span]:
    return _spans(one for one in run.intervals[rank] if one.lane == COMPUTE)


def _spans(intervals: Iterable[Interval]) -> list[Span]:
    return [(one.start_us, one.end_us) for one in intervals]
