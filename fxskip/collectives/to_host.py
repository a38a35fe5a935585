"""Small results of collectives on their way from a GPU to its host, beside the compute stream."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fxskip.collectives.failures import PATIENCE_S, issued, until
from fxskip.collectives.measuring import waits_at_once

_SIDE_STREAMS: dict[torch.device, torch.cuda.Stream] = {}


class ToHost:
    """A tensor that a collective makes and the host reads, under way from here to `get`.

    All of it is enqueued in a stream of its own, behind what the compute stream has now. The collective is issued
    there, too: whoever waits for one makes the stream wait that it was issued in, and the compute stream is to wait for
    nothing.
    """

    def __init__(self, name: str, group: Any, source: Tensor, make: Callable[[], Tensor]) -> None:
        """
        name     of the collective, in errors
        source   on a CUDA device, made in the current stream: what is sent
        make     issues the collective, waits for it, and returns what the host is to read
        """
        self._name, self._group = name, group
        compute, side = torch.cuda.current_stream(source.device), _side_stream(source.device)
        side.wait_stream(compute)
        with torch.cuda.stream(side):
            made = make()
            self._number = issued(group)
            self._host = torch.empty(made.shape, dtype=made.dtype, pin_memory=True)
            self._host.copy_(made, non_blocking=True)
            self.event = side.record_event()
            """What was made is there."""
        source.record_stream(side)
        if waits_at_once():
            compute.wait_stream(side)

    def get(self) -> Tensor:
        """It, on the host, as soon as it is there. Raises CollectiveError where another rank failed."""
        until(self._name, self._group, self._has_arrived, self._number)
        return self._host

    def _has_arrived(self) -> bool:
        """Waits for a moment."""
        deadline = time.monotonic() + PATIENCE_S
        while not self.event.query():
            if time.monotonic() > deadline:
                return False
            time.sleep(0)  # lets other threads run
        return True


def _side_stream(device: torch.device) -> torch.cuda.Stream:
    if device not in _SIDE_STREAMS:
        _SIDE_STREAMS[device] = torch.cuda.Stream(device)
    return _SIDE_STREAMS[device]
