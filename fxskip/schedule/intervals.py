"""Times in which something runs: disjoint spans, their length, and what two sets of them have in common."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

Span = tuple[float, float]
"""Start and end, in any one unit."""


def union(spans: Iterable[Span]) -> list[Span]:
    """Disjoint spans, by time, that cover the same times."""
    found: list[Span] = []
    for start, end in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((start, end))
    return found


def length(spans: Iterable[Span]) -> float:
    """Sum of the lengths."""
    return sum(end - start for start, end in spans)


def uncovered(spans: Iterable[Span], by: Iterable[Span]) -> float:
    """|A without B|: time in which one of `spans` runs and none of `by`; as |A or B| - |B|."""
    covering: Sequence[Span] = union(by)
    return length(union([*spans, *covering])) - length(covering)
