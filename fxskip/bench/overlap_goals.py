"""The goals of overlap: how much of the communication a step hides, by link and transport."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from fxskip.bench.goals import Goal, Report
from fxskip.bench.overlap_model import DEFAULT, MIRROR, SLOW

REAL, TURN, ZERO = "real routing, real data", "routing in turn, real data", "routing in turn, zero data"
"""The conditions of a setting, named after routing and data."""

BOUNDS: Mapping[tuple[str, str], tuple[float, float]] = {
    ("copy_engine", DEFAULT): (0.97, 1.03),
    ("auto", DEFAULT): (0.62, 1.08),
    ("auto", SLOW): (0.82, 1.025),
}
"""By transport and link: least hidden share at constant clock, largest step over that with nothing sent."""


def goals_of(setting: Report) -> list[Goal]:
    """Those of one setting of the report."""
    if "student over original" in setting:
        return [Goal("one process: student over original", (), _alone, 1.02)]
    if setting["link"] == MIRROR:
        return [Goal("mirror image: step with real routing over routing in turn", (), _routing, 1.03)]
    bounds = BOUNDS.get((setting.get("transport", ""), setting["link"]))
    if bounds is None:
        return []
    hidden, over_none = bounds
    name = f"{setting['transport']}, link {setting['link']}"
    found = [
        Goal(f"{name}: hidden at constant clock", (), partial(_hidden, ZERO), hidden, at_least=True),
        Goal(
            f"{name}: step over that with nothing sent, real data", (), partial(_over_none, TURN), over_none
        ),
        Goal(f"{name}: step with real routing over routing in turn", (), _routing, 1.03),
    ]
    if setting["transport"] == "auto":  # by NCCL, whose kernels a trace sees
        found += [
            Goal(f"{name}: coincidence, {part}", (), partial(_coincidence, part), 0.93, at_least=True)
            for part in ("forward", "backward")
        ]
    return found


def _alone(setting: Report) -> float | None:
    found: float = setting["student over original"]
    return found


def _steps(condition: str, setting: Report) -> tuple[float, float, float] | None:
    """Of FarSkip: blocking, as it is, nothing sent; in milliseconds."""
    own: Mapping[str, Any] = setting.get(condition, {}).get("farskip", {})
    modes = ("blocking", "as it is", "nothing sent")
    if any(mode not in own for mode in modes):
        return None
    blocking, scheduled, none = (float(own[mode]["step_ms"]) for mode in modes)
    return blocking, scheduled, none


def _hidden(condition: str, setting: Report) -> float | None:
    steps = _steps(condition, setting)
    if steps is None or steps[0] <= steps[2]:
        return None
    return 1 - (steps[1] - steps[2]) / (steps[0] - steps[2])


def _over_none(condition: str, setting: Report) -> float | None:
    steps = _steps(condition, setting)
    return None if steps is None else steps[1] / steps[2]


def _routing(setting: Report) -> float | None:
    real, turn = _steps(REAL, setting), _steps(TURN, setting)
    return None if real is None or turn is None else real[1] / turn[1]


def _coincidence(part: str, setting: Report) -> float | None:
    trace: Mapping[str, Any] = setting.get(REAL, {}).get("farskip", {}).get("trace", {})
    found: float | None = trace.get(part, {}).get("coincidence")
    return found
