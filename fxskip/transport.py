"""What moves the rows of a student's experts between ranks, and why: the record, and the choice by measured times."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

Transport = Literal["nccl", "nccl_network", "copy_engine"]
"""What moves the bytes: NCCL over the links of a domain, NCCL over the network, or the copy engines in a domain."""
Moves = Transport | Literal["gloo"]
"""What can move rows."""
Asked = Literal["auto", "nccl", "gloo", "copy_engine", "measured"]
"""What a spec can say."""


@dataclass(frozen=True)
class Load:
    """What was timed on each rank: an exchange of rows, beside products of as many rows with an expert's matrices."""

    tokens: int
    choices: int
    """Experts that a token is sent to; 1 where the router does not show it."""
    rows: int
    """tokens x choices, or fewer where tensors would be too large; each rank sends equally many to each, itself too."""
    width: int
    dtype: str
    """Of the rows, as torch names it."""
    matrices: tuple[tuple[int, int], ...]
    """(in, out) of each product, one after the other."""


@dataclass(frozen=True)
class Candidate:
    """One way to move the rows, timed."""

    transport: Moves
    samples_ms: tuple[tuple[float, ...], ...]
    """Of each rank, in order: from the start of the exchange until it and the products are done, once a round."""

    @property
    def ms(self) -> float:
        """The median of the slowest rank."""
        return max(map(statistics.median, self.samples_ms))


@dataclass(frozen=True)
class TransportChoice:
    """What moves the rows of a student's experts, and why. It is the same on all ranks."""

    asked: Asked
    """The spec's `runtime.transport`."""
    chosen: Moves
    why: str
    timed: tuple[Candidate, ...] = ()
    """Empty where nothing was timed."""
    load: Load | None = None
    """None where nothing was timed."""

    def __str__(self) -> str:
        return f"{self.chosen} ({self.asked}: {self.why})"

    def as_data(self) -> dict[str, Any]:
        """For JSON: all fields, and `ms` of each candidate."""
        timed = [asdict(one) | {"ms": one.ms} for one in self.timed]
        return asdict(self) | {"timed": timed}


_WHY: Mapping[Asked, str] = {
    "auto": "the process group's backend",
    "nccl": "as the spec says; the process group runs over it",
    "gloo": "as the spec says; the process group runs over it",
    "copy_engine": "as the spec says",
}


def as_asked(asked: Asked, chosen: Moves) -> TransportChoice:
    """The record where nothing had to be measured."""
    return TransportChoice(asked, chosen, _WHY[asked])


def without_copies(group: Moves, why: str) -> TransportChoice:
    """The record of "measured" where copies could not be timed."""
    return TransportChoice("measured", group, why)


def faster(
    group: Moves, load: Load, by_group: Sequence[Sequence[float]], by_copies: Sequence[Sequence[float]]
) -> TransportChoice:
    """The record of "measured" where both were timed; of equal times, the process group's is taken.

    group       what the process group moves rows by
    by_group    milliseconds of each rank, once a round; `by_copies` likewise
    """
    timed = tuple(
        Candidate(name, tuple(map(tuple, samples)))
        for name, samples in ((group, by_group), ("copy_engine", by_copies))
    )
    chosen = min(timed, key=lambda one: one.ms)  # the first of equals
    times = ", ".join(f"{one.transport} {one.ms:.3f} ms" for one in timed)
    rounds = len(timed[0].samples_ms[0])
    why = f"{times}; exchange beside products, medians of {rounds} rounds, slowest rank"
    return TransportChoice("measured", chosen.transport, why, timed, load)
