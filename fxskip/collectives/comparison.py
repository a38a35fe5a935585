"""A few numbers of each rank of a group, on their way to the hosts of all, so that ranks can see whether they agree."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fxskip.collectives.failures import PATIENCE_S, until
from fxskip.collectives.landing import Issued, launch
from fxskip.collectives.measuring import Sent


class Comparison:
    """Under way from its making to `get`, on a GPU to pinned memory; whatever the host has enqueued meanwhile is not
    waited for.

    sent    which collective it is, in errors and traces
    mine    [k] int64: the numbers of this rank
    """

    def __init__(self, sent: Sent, group: Any, mine: Tensor) -> None:
        self._name, self._group = sent.name, group
        self._landing = launch(sent, group, partial(_gather, group), mine)
        self._event: torch.cuda.Event | None = None
        self._host = self._landing.buffer
        if mine.is_cuda:
            self._copy_to_host(mine)

    def get(self) -> list[list[int]]:
        """The numbers of each rank, in the order of the group. Raises CollectiveError where another rank failed."""
        if self._event is None:
            self._landing.land()
        else:
            until(self._name, self._group, self._has_arrived, self._landing.number)
        found: list[list[int]] = self._host.tolist()
        return found

    def _copy_to_host(self, mine: Tensor) -> None:
        side = torch.cuda.Stream(mine.device)
        side.wait_stream(torch.cuda.current_stream(mine.device))
        with torch.cuda.stream(side):
            self._landing.land()
            buffer = self._landing.buffer
            self._host = torch.empty(buffer.shape, dtype=buffer.dtype, pin_memory=True)
            self._host.copy_(buffer, non_blocking=True)
            self._event = side.record_event()
        buffer.record_stream(side)

    def _has_arrived(self) -> bool:
        """Waits for a moment."""
        assert self._event is not None
        deadline = time.monotonic() + PATIENCE_S
        while not self._event.query():
            if time.monotonic() > deadline:
                return False
            time.sleep(0)  # lets other threads run
        return True


def _gather(group: Any, mine: Tensor) -> Issued:
    everyone = mine.new_empty((dist.get_world_size(group), *mine.shape))
    return Issued(everyone, dist.all_gather(list(everyone), mine, group, async_op=True), mine)
