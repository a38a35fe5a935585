"""Which layers the text and the picture show: of layers that repeat, only as many as the arrows reach back over."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from fxskip.planning.plan import Plan
from fxskip.planning.words import back

LONGEST_PERIOD = 8
"""Layers in one repeating pattern, at most: hybrid models alternate over two to eight layers."""


@dataclass(frozen=True)
class Fold:
    """`period` layers from layer `first` on, wired alike `times` times; the first `drawn` times are drawn."""

    first: int
    period: int
    times: int
    drawn: int

    @property
    def layers(self) -> range:
        return range(self.first, self.first + self.period * self.times)

    @property
    def drawn_layers(self) -> range:
        return range(self.first, self.first + self.period * self.drawn)


def fold(plan: Plan) -> list[Fold]:
    """All layers in order, in as few folds as a greedy search finds."""
    wirings, reach = _wirings(plan), _reach(plan)
    folds: list[Fold] = []
    first = 0
    while first < len(wirings):
        candidates = [_repeat(wirings, first, period, reach) for period in range(1, LONGEST_PERIOD + 1)]
        found = max(candidates, key=_saved)
        folds.append(found if _saved(found) else Fold(first, 1, 1, 1))
        first = folds[-1].layers.stop
    return folds


def _repeat(wirings: Sequence[Hashable], first: int, period: int, reach: int) -> Fold:
    times = 1
    while wirings[first : first + period] == wirings[(start := first + period * times) : start + period]:
        times += 1
    # Arrows out of what follows must find the layers that they come from, so that many are drawn.
    return Fold(first, period, times, min(times, -(-reach // period)))


def _saved(found: Fold) -> int:
    return len(found.layers) - len(found.drawn_layers)


def _wirings(plan: Plan) -> list[tuple[Hashable, ...]]:
    """One value a layer, equal for layers whose drawings and rows are equal."""
    layers: dict[int, list[Hashable]] = {}
    for block in plan.blocks:
        windows = len(block.window.dispatch_under), len(block.window.combine_under)
        drawing = (block.kind, block.adds, block.without, block.refused is None, windows, block.costs)
        layers.setdefault(block.layer, []).append(drawing)
    for row in plan.layers:
        exposures = (row.exposed_before_us, row.exposed_after_us)
        layers[row.layer].append(tuple(None if us is None else round(us, 1) for us in exposures))
    return [tuple(layer) for layer in layers.values()]


def _reach(plan: Plan) -> int:
    """Layers that the longest arrow goes back, at least 1."""
    layers = [
        block.layer - plan.blocks[number - back(dropped)[1]].layer
        for number, block in enumerate(plan.blocks)
        for dropped in block.without
    ]
    return max([1, *layers])
