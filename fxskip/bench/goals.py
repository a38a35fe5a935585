"""What a benchmark is meant to reach: a bound on a quantity of its report, and the verdict.

A goal that is missed is a finding, which the report and the output show; it is no failure of the command.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Report = Mapping[str, Any]


@dataclass(frozen=True)
class Goal:
    """`quantity` of a report is at most `bound`, or at least. It is None where something in it was not measured.

    needs      parts of the report that the quantity is of
    decimals   of `bound`, where the quantity counts as rounded to as many
    """

    what: str
    needs: tuple[str, ...]
    quantity: Callable[[Report], float | None]
    bound: float
    at_least: bool = False
    decimals: int | None = None

    def verdict(self, report: Report) -> dict[str, Any]:
        measured = self.quantity(report)
        return {
            "goal": self.what,
            "bound": self.bound,
            "measured": measured,
            "verdict": self.judged(measured),
        }

    def judged(self, measured: float | None) -> str:
        if measured is None:
            return "not measured"
        counted = measured if self.decimals is None else round(measured, self.decimals)
        if counted >= self.bound if self.at_least else counted <= self.bound:
            return "met"
        by = f" by {100 * abs(measured / self.bound - 1):.2g} %" if self.bound else ""
        return f"missed{by}"


def verdicts(goals: Iterable[Goal], report: Report, measured: Iterable[str]) -> list[dict[str, Any]]:
    """Of those goals whose parts are all among `measured`."""
    known = set(measured)
    return [goal.verdict(report) for goal in goals if known.issuperset(goal.needs)]


def print_verdicts(found: Sequence[Mapping[str, Any]], *, is_tiny: bool) -> None:
    if not found:
        return
    print("\ngoals" + (" (of tiny sizes: they say nothing)" if is_tiny else ""), flush=True)
    for one in found:
        value = "" if one["measured"] is None else f"{one['measured']:.4g} against {one['bound']:.4g}"
        print(f"  {one['goal']:78s} {one['verdict']:16s} {value}", flush=True)
