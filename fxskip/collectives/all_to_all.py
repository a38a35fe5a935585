"""Exchange of rows between the ranks of a group, with as many rows for each rank as there are.

Ranks need each other's counts before the rows. `exchange_counts` starts that early; `Counts.get` waits for it where
the numbers are needed, on the host. On a GPU they travel to pinned memory meanwhile (`to_host`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Self

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from fxskip.collectives.failures import Work
from fxskip.collectives.in_flight import Flight, Issued, start, wait
from fxskip.collectives.kept import made_once
from fxskip.collectives.measuring import Sent, sends_nothing
from fxskip.collectives.to_host import ToHost


@dataclass(frozen=True)
class AllToAll:
    """Sends `sent[r]` rows to rank r of the group and receives `received[r]` rows from it, in the order of ranks."""

    group: Any
    sent: tuple[int, ...]
    received: tuple[int, ...]

    @property
    def reversed(self) -> Self:
        """The exchange that sends everything back."""
        return replace(self, sent=self.received, received=self.sent)

    def issue(self, tensor: Tensor) -> Issued:
        """Start it with [sum(sent), ...]; the buffer is [sum(received), ...]."""
        tensor = tensor.contiguous()
        if sends_nothing():
            own = _resized(tensor, sum(self.received))
            return Issued(own, None, own)
        buffer = tensor.new_empty((sum(self.received), *tensor.shape[1:]))
        return Issued(buffer, self.send(buffer, tensor), tensor)

    def send(self, buffer: Tensor, rows: Tensor) -> Work:
        """Hand the exchange of `rows` to the process group; both tensors are contiguous."""
        work: Work = dist.all_to_all_single(
            buffer, rows, list(self.received), list(self.sent), group=self.group, async_op=True
        )
        return work

    def issue_reverse(self, gradient: Tensor) -> Issued:
        """Start the exchange of the gradients of what was received."""
        return self.reversed.issue(gradient)


def _resized(rows: Tensor, count: int) -> Tensor:
    """The first `count` rows; zeros where there are fewer."""
    missing = count - rows.shape[0]
    return rows if missing == 0 else F.pad(rows, (*(0, 0) * (rows.dim() - 1), 0, missing))


class Counts:
    """What each rank tells the owner of each part, under way from `exchange_counts` to `get`."""

    def __init__(self, sent: Sent, own: Tensor, group: Any) -> None:
        ones = (1,) * own.shape[0]
        self._own, self._flight = own, Flight(sent, AllToAll(group, ones, ones))
        self.received: Tensor
        self._to_host: ToHost | None = None
        if own.is_cuda:
            self._to_host = ToHost(sent.name, group, own, self._exchanged)
            self.received.record_stream(torch.cuda.current_stream(own.device))
        else:
            self.received = start(own, self._flight)
        self._table: list[list[list[int]]] | None = None

    def _exchanged(self) -> Tensor:
        self.received = start(self._own, self._flight)
        return self._both()

    def _both(self) -> Tensor:
        return torch.stack((self._own, wait(self.received, self._flight)))

    def get(self) -> tuple[list[list[int]], list[list[int]]]:
        """What this rank told each, and what each told this one. Raises CollectiveError where another rank failed."""
        if self._table is None:
            self._table = (self._both() if self._to_host is None else self._to_host.get()).tolist()
        if self._to_host is not None:  # `received` was made beside the compute stream
            torch.cuda.current_stream(self._own.device).wait_event(self._to_host.event)
        own, received = self._table
        return own, received


def exchange_counts(sent: Sent, counts: Tensor, group: Any) -> Counts:
    """Start telling each rank of `group` how many rows it will get.

    sent     what it is for
    counts   [ranks, parts] int64: for the rank that owns the parts, rows of each
    """
    return made_once(lambda: Counts(sent, counts.contiguous(), group))


def split_evenly(total: int, ranks: int) -> tuple[int, ...]:
    """How many of `total` things each rank owns, as torch.chunk and DTensor's Shard have it: the last may own fewer."""
    each = -(-total // ranks)
    return tuple(max(0, min(each, total - rank * each)) for rank in range(ranks))
