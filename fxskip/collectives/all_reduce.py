"""Sums over the ranks of a group, and where values enter what only a part of a rank's work depends on.

The two are each other's reverse. A *partial* value is one whose sum over the ranks is meant. Reducing it needs an
all-reduce in the forward pass and nothing in the backward, for each rank's part adds to the sum as it is. A
replicated value that ranks use for different parts *enters*: nothing to do forward, but each rank then knows only a
part of its gradient, and the backward pass adds these up.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fxskip.collectives.in_flight import Issued
from fxskip.collectives.measuring import sends_nothing


@dataclass(frozen=True)
class Reduce:
    """Adds a partial value up over the ranks of `group`; its gradient is the same on all of them."""

    group: Any

    def issue(self, tensor: Tensor) -> Issued:
        """Start the sum of `tensor`, which is left alone."""
        return _sum(tensor, self.group)

    def issue_reverse(self, gradient: Tensor) -> Issued:
        """Nothing to send."""
        return Issued(gradient, None, gradient)


@dataclass(frozen=True)
class Enter:
    """Hands a replicated value on to where each rank of `group` uses it for its own part."""

    group: Any

    def issue(self, tensor: Tensor) -> Issued:
        """Nothing to send."""
        return Issued(tensor, None, tensor)

    def issue_reverse(self, gradient: Tensor) -> Issued:
        """Start the sum of the gradients."""
        return _sum(gradient, self.group)


def _sum(tensor: Tensor, group: Any) -> Issued:
    if sends_nothing():
        return Issued(tensor, None, tensor)
    # Autograd and other readers may hold `tensor`, so the sum is taken in a copy.
    return reduce_in_place(tensor.clone(memory_format=torch.contiguous_format), group)


def reduce_in_place(buffer: Tensor, group: Any, how: Any = dist.ReduceOp.SUM) -> Issued:
    """Start the sum of `buffer`, contiguous, over the ranks of `group`, or what `how` says; it overwrites `buffer`."""
    if sends_nothing():
        return Issued(buffer, None, buffer)
    return Issued(buffer, dist.all_reduce(buffer, how, group=group, async_op=True), buffer)
