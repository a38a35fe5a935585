"""What averaging gradients in the backward pass costs: `schedule: {gradients: in_backward}`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from fxskip.schedule.costs import Costs, ModelCosts
from fxskip.schedule.roofline import Deployment
from fxskip.schedule.sizes import total
from fxskip.spec import Schedule
from fxskip.wiring import SubBlock

BACKWARD_FACTOR = 2.0
"""Compute of a backward pass, in forwards: each matrix product has a gradient for both of its operands."""


@dataclass(frozen=True)
class GradientCosts:
    """All-reduces of gradients in one backward pass on one rank, estimated; None where the graph does not show it."""

    ranks: int
    """With tokens of their own, that hold the same parameters: those of the expert group. Further ranks that only the
    mesh knows are not counted."""
    bytes: float | None
    """Of the gradients of all parameters but routed experts, as if all of them train."""
    est_us: float | None
    """Of the all-reduces, one after the other."""
    compute_us: float | None
    """Of the backward pass, beside which they run."""


def gradient_costs(
    schedule: Schedule | None,
    blocks: Sequence[SubBlock],
    costs: ModelCosts,
    chosen: Deployment,
    forward_us: float | None,
) -> GradientCosts | None:
    """None where the spec does not ask for them, or all ranks have the same tokens.

    forward_us   of all compute in one forward pass
    """
    if schedule is None or schedule.gradients != "in_backward":
        return None
    if chosen.exchange != "all_to_all" or chosen.expert == 1:
        return None
    layers: dict[int, list[float | None]] = {}
    for block, of_block in zip(blocks, costs.blocks, strict=True):
        layers.setdefault(block.layer, []).append(_bytes_held(of_block, chosen))
    outside = None if costs.outside is None else float(costs.outside * chosen.bytes)
    sections = [*(total(held) for held in layers.values()), outside]
    cap = schedule.bucket_mib << 20
    times = [None if held is None else _rings_us(held, cap, chosen) for held in sections]
    compute = None if forward_us is None else BACKWARD_FACTOR * forward_us
    return GradientCosts(chosen.expert, total(sections), total(times), compute)


def _bytes_held(costs: Costs, chosen: Deployment) -> float | None:
    """Of the parameters of a sub-block that are no routed experts; matrices are cut over the tensor group."""
    if any(part.name == "moe" for part in costs.parts):
        return None
    cut = {part.name: 1 if part.name == "gate" else chosen.tensor for part in costs.parts}
    held = sum(part.parameters / cut[part.name] for part in costs.parts if part.name != "routed")
    return held * chosen.bytes


def _rings_us(held: float, cap: int, chosen: Deployment) -> float:
    """Of buckets of at most `cap` bytes: each rank sends 2 (n - 1) / n of each."""
    buckets = max(1, math.ceil(held / cap))
    sent = 2 * held * (chosen.expert - 1) / chosen.expert
    return buckets * chosen.hardware.transfer_us(chosen.expert, sent / buckets)
