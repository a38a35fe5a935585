"""What was seen of one step on one rank. Times are microseconds from the step's beginning on that rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Phase = Literal["forward", "backward"]


@dataclass(frozen=True)
class Task:
    """One stretch of a task's work."""

    layer: int
    role: str
    """As in the schedule; with ".bwd" its backward (".dgrad" and ".wgrad" where weight gradients are split off), with
    ".again" its recomputation."""
    lane: str
    """"compute" or "host"."""
    phase: Phase
    start_us: float
    end_us: float

    @property
    def name(self) -> str:
        return f"{self.layer}.{self.role}"

    @property
    def us(self) -> float:
        return self.end_us - self.start_us


@dataclass(frozen=True)
class Flight:
    """One collective."""

    layer: int
    role: str
    lane: str
    phase: Phase
    bytes: int
    """Of its result."""
    called_us: float
    """The call that hands it to the transport begins."""
    issued_us: float
    """That call ends."""
    done_us: float
    """Its result is there."""
    wait_us: float | None
    """Somebody begins to wait for it; None where nobody did before the end of the step."""
    landed_us: float | None
    """That wait is over."""

    @property
    def name(self) -> str:
        return f"{self.layer}.{self.role}"

    @property
    def us(self) -> float:
        return self.done_us - self.issued_us


@dataclass(frozen=True)
class StepRecord:
    """All of one step."""

    tasks: tuple[Task, ...]
    """By start."""
    flights: tuple[Flight, ...]
    """In the order of issue."""
    phase_end_us: dict[Phase, float]
    """When the forward and, if there was one, the backward was over."""

    @property
    def step_us(self) -> float:
        return max(self.phase_end_us.values())


@dataclass(frozen=True)
class Kernel:
    """One piece of work of a GPU, as its profiler has it."""

    name: str
    communicates: bool
    phase: Phase
    start_us: float
    end_us: float
    stream: int
