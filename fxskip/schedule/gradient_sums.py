"""All-reduces of gradients over processes with other tokens, as tasks of a backward pass."""

from __future__ import annotations

from collections.abc import Mapping

from fxskip.parallel import GradientSum
from fxskip.schedule.hardware import Hardware
from fxskip.schedule.tasks import DATA, EXPERT_DATA, Task

HEAD, EMBEDDING = "head_", "embedding_"
"""How the role of a sum begins whose parameters are used behind, or before, all layers."""

GRADIENT_LANES = (DATA, EXPERT_DATA)


def roofline_us(one: GradientSum, hardware: Hardware) -> float:
    """Estimated microseconds of a ring: each rank sends 2 (n - 1) / n of the bytes."""
    return hardware.transfer_us(one.ranks, 2 * one.bytes * (one.ranks - 1) / one.ranks)


def gradient_task(one: GradientSum, layer: int, us: float) -> Task:
    """Of that layer's backward pass."""
    return Task(
        f"{layer}.{one.role}",
        one.lane,
        us,
        layer=layer,
        role=one.role,
        phase="backward",
        bytes_in_flight=one.bytes,
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
