"""What `fxskip.trace` returns: estimated beside measured, as data, text, JSON, a page, a Perfetto file, and costs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from os import PathLike
from pathlib import Path
from typing import Any, Literal

from fxskip.errors import ScheduleError
from fxskip.schedule.cost_table import CostKey, CostTable
from fxskip.schedule.timeline import WIDTH
from fxskip.tracing.costs import measured_costs
from fxskip.tracing.estimate import Estimate
from fxskip.tracing.figures import PARTS, Figures, Rank, figures
from fxskip.tracing.measured import Measured, measured
from fxskip.tracing.records import Phase
from fxskip.transport import TransportChoice


@dataclass(frozen=True)
class About:
    """What was traced."""

    model: str
    layers: int
    processes: int
    mode: str
    """Of the student: "scheduled", "reference", "eager_wait", or "one process"."""
    exchange: str
    """"all_to_all", "all_reduce", or "" in one process."""
    transport: str
    """What moves the rows; "" in one process."""
    choice: TransportChoice | None
    """Why that does; None where no rows travel."""
    backward: str
    """"explicit" where layers have an order of their own for it, else "mirrored"."""
    gradients: bool
    why_no_gradients: str
    """"" where there are."""
    batch: Mapping[str, list[int]]
    """Shapes of the tensors that the model was called with, on rank 0."""
    tokens: int
    """Of rank 0 in a step; 0 in one process, where no cost depends on it."""
    key: CostKey
    """What costs depend on beside tokens, as rank 0 sees it."""


@dataclass(frozen=True)
class Timeline:
    """A few steps of a student. Estimated and measured times are never mixed, and always labelled."""

    about: About
    estimated: Mapping[Phase, Estimate]
    """Of the layers' schedules; empty where nothing was scheduled."""
    ranks: tuple[Rank, ...]
    """What each rank measured, in each mode."""
    roles: Mapping[str, str | None]
    """Of the tasks of all layers, see `measured_costs`."""

    @property
    def phases(self) -> tuple[Phase, ...]:
        return ("forward", "backward") if self.about.gradients else ("forward",)

    @property
    def figures(self) -> tuple[Figures, ...]:
        """Measured: of each phase, and of the step."""
        return tuple(figures(self.ranks, part) for part in (PARTS if self.about.gradients else PARTS[:1]))

    def measured(self, phase: Phase, rank: int = 0) -> Measured:
        """The last step of a rank, as it is."""
        return measured(self.ranks[rank]["as it is"].records[-1], phase)

    def window(
        self, source: Literal["estimated", "measured"], phase: Phase, layer: int, rank: int = 0
    ) -> tuple[float, float]:
        """From when to when tasks and collectives of a layer run, in microseconds.

        Raises ScheduleError for a layer without any.
        """
        shown = self.estimated[phase].schedule if source == "estimated" else self.measured(phase, rank)
        own = [one for one in shown.placed if one.name.partition(".")[0] == str(layer)]
        if not own:
            raise ScheduleError(
                "timeline",
                f"layer {layer} ran no task in the {phase}",
                hint=f"layers are 0 to {self.about.layers - 1}",
            )
        return max(0.0, min(one.start_us for one in own)), max(one.end_us for one in own)

    def text(self, layer: int | None = None, *, width: int = WIDTH) -> str:
        """Figures, the timeline of one layer (of the middle one by default) and that of the step."""
        from fxskip.tracing.text import text  # it imports Timeline

        return text(self, self.about.layers // 2 if layer is None else layer, width)

    def __str__(self) -> str:
        return self.text()

    def to_json(self) -> str:
        """Everything as one JSON value: what was traced, estimates, figures, raw times, and the last steps."""
        return json.dumps(self._as_data(), indent=1) + "\n"

    def _as_data(self) -> dict[str, Any]:
        return {
            "fxskip_timeline": 1,
            "about": asdict(self.about)
            | {
                "key": self.about.key.model_dump(mode="json"),
                "choice": self.about.choice.as_data() if self.about.choice is not None else None,
            },
            "estimated": {
                phase: {
                    "figures": asdict(one.figures) | {"hidden": one.figures.hidden},
                    "placed": [asdict(task) for task in one.schedule.placed],
                    "collectives": [asdict(record) for record in one.schedule.collectives],
                }
                for phase, one in self.estimated.items()
            },
            "measured": {
                "figures": [asdict(one) | {"hidden": one.hidden} for one in self.figures],
                "ranks": [
                    {mode: {"times": [asdict(t) for t in runs.times]} for mode, runs in rank.items()}
                    for rank in self.ranks
                ],
                "last_step": [asdict(rank["as it is"].records[-1]) for rank in self.ranks],
                "last_kernels": [
                    [asdict(k) for steps in rank["as it is"].kernels[-1:] for k in steps]
                    for rank in self.ranks
                ],
            },
        }

    def to_html(self, path: str | PathLike[str]) -> Path:
        """Write a self-contained page with figures and pictures."""
        from fxskip.tracing.page import page  # it imports Timeline

        target = Path(path)
        target.write_text(page(self), encoding="utf-8")
        return target

    def to_perfetto(self, path: str | PathLike[str]) -> Path:
        """Write a file for ui.perfetto.dev (or chrome://tracing), in Chrome's trace event format."""
        from fxskip.tracing.perfetto import trace_events  # it imports Timeline

        target = Path(path)
        target.write_text(json.dumps(trace_events(self)), encoding="utf-8")
        return target

    def costs(self) -> CostTable:
        """Measured costs by role, for `schedule: {costs: path}`; `save_costs` writes them.

        Raises ScheduleError where no layer was scheduled.
        """
        return measured_costs(self.ranks, self.roles, self.about.key, self.about.tokens)
