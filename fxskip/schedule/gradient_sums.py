"""All-reduces of gradients over processes with other tokens, as tasks of a backward pass."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fxskip.schedule.hardware import Hardware
from fxskip.schedule.tasks import DATA, EXPERT_DATA, Task

HEAD, EMBEDDING = "head_", "embedding_"
"""How the role of a sum begins whose parameters are used behind, or before, all layers."""

GRADIENT_LANES = (DATA, EXPERT_DATA)


@dataclass(frozen=True)
class GradientSum:
    """One of them, on one rank."""

    role: str
    """Of the task in its layer, such as "gradients", "expert_gradients.2", "head_gradients"."""
    lane: str
    bytes: int
    ranks: int
    """That add up."""

    def roofline_us(self, hardware: Hardware) -> float:
        """Estimated microseconds of a ring: each rank sends 2 (n - 1) / n of the bytes."""
        return hardware.transfer_us(self.ranks, 2 * self.bytes * (self.ranks - 1) / self.ranks)

    def task(self, layer: int, us: float) -> Task:
        """Of that layer's backward pass."""
        return Task(
            f"{layer}.{self.role}",
            self.lane,
            us,
            layer=layer,
            role=self.role,
            phase="backward",
            bytes_in_flight=self.bytes,
        )


def behind_its_gradients(order: list[str], reductions: Mapping[str, tuple[str, ...]]) -> list[str]:
    """An order with each of the reductions put right behind the last task that it needs, and those before it.

    reductions   what each needs, by name, in the order in which they are to start
    """
    found, at = list(order), 0
    for name, needs in reductions.items():
        at = max(at, *(found.index(one) + 1 for one in needs), 0)
        found.insert(at, name)
        at += 1
    return found
