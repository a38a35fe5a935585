"""Costs of tasks, measured while nothing else runs: from steps in which each collective is waited for at its start."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from fxskip.errors import ScheduleError
from fxskip.schedule.cost_table import CostKey, CostTable, merged_costs
from fxskip.schedule.gradient_sums import GRADIENT_LANES
from fxskip.tracing.figures import Rank
from fxskip.tracing.records import StepRecord

_LEAST_US = 0.01
"""Of a task none of whose operations is left in the graph that runs, or too short for the clock."""


def measured_costs(
    ranks: Sequence[Rank], roles: Mapping[str, str | None], key: CostKey, tokens: int
) -> CostTable:
    """By role: the median over steps and layers of a rank, then over ranks.

    roles    the roles of all tasks; for what arrives from the layer before, the role of the collective there
    tokens   of one rank

    Raises ScheduleError where no layer was scheduled.
    """
    if not roles:
        raise ScheduleError(
            "costs",
            "no layer runs by a schedule, so there are no tasks",
            hint="trace a student with parallel: {expert: {size: 2}} or more, and runtime: {mode: scheduled}",
        )
    found = merged_costs([_of_rank(rank["blocking"].records, roles) for rank in ranks])
    return CostTable(key=key, tokens=tokens, costs_us=found)


def _of_rank(records: Sequence[StepRecord], roles: Mapping[str, str | None]) -> dict[str, float]:
    samples: dict[str, list[float]] = {}
    for record in records:
        for role, us in _of_step(record):
            samples.setdefault(role, []).append(us)
    return {
        role: max(statistics.median(samples.get(stands_for or role, [0.0])), _LEAST_US)
        for role, stands_for in roles.items()
    }


def _of_step(record: StepRecord) -> list[tuple[str, float]]:
    """Role and time of each task of each layer in the forward, of each sum of parameters' gradients, and of what
    travels in the backward alone, by its forward role; what was cut is one."""
    sums: dict[tuple[int, str], float] = {}
    for task in record.tasks:
        if task.phase == "forward":
            sums[task.layer, task.role] = sums.get((task.layer, task.role), 0.0) + task.us
    forward = [(role, us) for (_, role), us in sums.items()]
    sent = [one for one in record.flights if one.phase == "forward" or one.lane in GRADIENT_LANES]
    known = {one.role for one in sent}
    back = [(one.role.removesuffix(".bwd"), one.us) for one in record.flights if one not in sent]
    return forward + [(one.role, one.us) for one in sent] + [(r, us) for r, us in back if r not in known]
