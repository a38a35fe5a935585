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
from fxskip.collectives.routing import Order, sort_pairs
from fxskip.parallel import running_axis


@dataclass(frozen=True)
class OwnChoices:
    """The (token, choice) pairs whose expert is one of this rank's."""

    order: Order
    """A row for each, in the order of pairs."""
    experts: Tensor
    """[R] int64: the own expert of each, counted from 0."""

    def own_expert_of_each_row(self) -> Tensor:
        """[R] int64, as `Routing` has it."""
        return self.experts

    def by_own_expert(self, experts: int) -> tuple[Order, Tensor]:
        """As `Routing` has it."""
        found = sort_pairs(self.experts.unsqueeze(1), experts)
        return found.order, found.counts.cumsum(0, dtype=torch.int32)


def own_choices(index: Tensor, experts: int, axis: str) -> OwnChoices:
    """What is routed to this rank's share of `experts` experts. The host waits for the device: R is known by then.

    index   [T, K] int64, the experts of each token
    """
    mesh = running_axis(axis)
    sizes = split_evenly(experts, mesh.size())
    own = index.flatten() - sum(sizes[: mesh.get_local_rank()])
    pairs = ((own >= 0) & (own < sizes[mesh.get_local_rank()])).nonzero().squeeze(1)
    return OwnChoices(Order.of(pairs, len(own), index.shape[1]), own[pairs])
