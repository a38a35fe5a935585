"""Routed experts spread over ranks that all hold the same tokens: each rank runs its own on what is routed to them.

    index ── own_choices ─┬─ order ───────────┐
                          │                   │
    hidden ── enter ── permute ── run_own_experts ── unpermute ── partial ── reduce ── routed
    weights ── enter ──────────────────────────────────┘

No counts are exchanged and no token travels; the sum over the ranks does.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fxskip.collectives.all_to_all import split_evenly
from fxskip.collectives.routing import Order, SortedPairs, expert_of_each_row, sort_pairs
from fxskip.parallel import running_axis


@dataclass(frozen=True)
class OwnChoices:
    """The (token, choice) pairs whose expert is one of this rank's."""

    order: Order
    """A row for each, in the order of experts."""
    counts: Tensor
    """[own experts] int64: rows of each."""

    def own_expert_of_each_row(self) -> Tensor:
        """[R] int64, as `Routing` has it."""
        return expert_of_each_row(self.counts.unsqueeze(0), len(self.order.pair_of_row))

    def by_own_expert(self, experts: int) -> tuple[None, Tensor]:
        """As `Routing` has it: the rows lie in that order."""
        return None, self.counts.cumsum(0, dtype=torch.int32)


def own_choices(index: Tensor, experts: int, axis: str) -> OwnChoices:
    """What is routed to this rank's share of `experts` experts. The host waits for the device: R is known by then.

    index   [T, K] int32 or int64, the experts of each token
    """
    mesh = running_axis(axis)
    sizes = split_evenly(experts, mesh.size())
    first = sum(sizes[: mesh.get_local_rank()])
    end = first + sizes[mesh.get_local_rank()]
    return choices_of(sort_pairs(index, experts), first, end)


def choices_of(pairs: SortedPairs, first: int, end: int) -> OwnChoices:
    """Those of the experts from `first` to before `end`. The host waits for the device."""
    counts = pairs.counts
    begin, stop = torch.stack((counts[:first].sum(), counts[:end].sum())).tolist()
    row = pairs.order.row_of_pair - begin
    is_own = (row >= 0) & (row < stop - begin)
    order = Order(pairs.order.pair_of_row[begin:stop], row.where(is_own, -1), pairs.order.choices)
    return OwnChoices(order, counts[first:end])
