"""What the ranks of the simulated machine share: collectives in which they meet, and what they report."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

from fxskip.schedule.machine import Contention
from fxskip.schedule.tasks import Task

FaultKind = Literal["deadlock", "early read", "repeated", "missing", "unknown"]
"""deadlock    it waits for what never comes
early read  a task ran before something that it reads was there, or without waiting for it
repeated    a task was done twice
missing     a task was never done
unknown     a step names no task"""
NEVER = float("inf")
DONE = 1e-9
"""Microseconds of work that are rounding."""


@dataclass(frozen=True)
class Fault:
    """Something that must not happen."""

    kind: FaultKind
    rank: int
    task: str
    text: str

    def __str__(self) -> str:
        return f"{self.kind} on rank {self.rank}: {self.text}"


@dataclass(frozen=True)
class Interval:
    """When a task ran. A collective's interval begins when its kernel does, peers or not."""

    task: str
    lane: str
    start_us: float
    end_us: float


class Member(Protocol):
    """A rank, as a collective sees it."""

    running: Task | None
    """The kernel on its compute stream."""


class Transfer:
    """The n-th collective of a lane, in which all ranks meet."""

    def __init__(self, task: Task, left: float, contention: Contention, ranks: int) -> None:
        self.name = task.name
        self.left = left
        self._stretch = contention.collective_stretch
        self._expected = ranks
        self.inside: list[Member] = []

    @property
    def is_moving(self) -> bool:
        return len(self.inside) == self._expected

    @property
    def is_done(self) -> bool:
        return self.is_moving and self.left <= DONE

    @property
    def _slowness(self) -> float:
        return self._stretch if any(rank.running is not None for rank in self.inside) else 1.0

    def end(self, now: float) -> float:
        return now + self.left * self._slowness if self.is_moving else NEVER

    def advance(self, us: float) -> None:
        if self.is_moving:
            self.left -= us / self._slowness
