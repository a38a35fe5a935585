"""How one decoder layer runs on several ranks: plain data that decides, with the wiring, which graph runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Mode = Literal["scheduled", "reference", "eager_wait"]


@dataclass(frozen=True)
class RegionParallel:
    """What is spread over ranks in a layer, and how its collectives are waited for."""

    experts: tuple[tuple[str, int], ...]
    """Path in the layer and number of experts of each module of routed experts."""
    mode: Mode
    defers: bool
    """Whether the layer's last exchange may arrive in the next layer."""
