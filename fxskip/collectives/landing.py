"""Collectives that a transport works on, from their issue until the host, or a device's stream, has waited for them.

All that are under way in this process are listed here, so that nothing stays in flight when a pass ends by an error:
a buffer that nobody waits for would be written into when its memory is long reused.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fxskip.collectives.failures import Work, issuing, tell, wait_until_done
from fxskip.collectives.measuring import FlightWatch, Sent, watcher
from fxskip.errors import CollectiveError


@dataclass(frozen=True)
class Issued:
    """A collective that was handed to its transport."""

    buffer: Tensor
    """Where its result will be."""
    work: Work | None
    """None where it is done already."""
    source: Tensor
    """What it reads, kept until it is done."""


_UNDER_WAY: dict[Landing, None] = {}
_WATCHED: set[int] = set()
"""The backward passes at whose end somebody looks."""
_POISONED = False


class Landing:
    """An issued collective and, in the debug mode, the buffer full of NaN that is shown until it has landed."""

    def __init__(self, name: str, number: int, group: Any, issued: Issued, watch: FlightWatch | None) -> None:
        self.name = name
        self.number = number
        self._watch = watch
        self.buffer = issued.buffer
        self.in_pass = backward_pass()
        self._group = group
        self._issued: Issued | None = issued
        # Its memory goes back to the allocator in this stream's order.
        self._stream = torch.cuda.current_stream(issued.buffer.device) if issued.buffer.is_cuda else None
        if _POISONED and issued.work is not None and issued.buffer.is_floating_point():
            self.buffer = torch.full_like(issued.buffer, torch.nan)
        if issued.work is not None:
            _UNDER_WAY[self] = None
            _look_at_end_of(self.in_pass)

    @property
    def is_under_way(self) -> bool:
        """Whether the transport still works on it, as far as the host knows without waiting."""
        issued = self._issued
        return issued is not None and issued.work is not None and not issued.work.is_completed()

    def land(self) -> None:
        """Wait, once. Raises CollectiveError where another rank failed."""
        issued, self._issued = self._issued, None
        _UNDER_WAY.pop(self, None)
        if issued is None or issued.work is None:
            return
        if self._watch is not None:
            self._watch.waits()
        if self._stream is not None:
            issued.work.wait()  # the stream waits, the host does not
            if self._stream != torch.cuda.current_stream(
                issued.buffer.device
            ):  # a callback's, or another thread's
                with torch.cuda.stream(self._stream):
                    issued.work.wait()
        else:
            wait_until_done(self.name, self._group, issued.work, self.number)
        if self._watch is not None:
            self._watch.landed()
        if self.buffer is not issued.buffer:
            self.buffer.data.copy_(issued.buffer)


def launch(sent: Sent, group: Any, issue: Callable[[Tensor], Issued], tensor: Tensor) -> Landing:
    """Hand a collective on `tensor` to its transport. Raises CollectiveError where that fails."""
    seen_by = watcher()
    watch = seen_by.flight(sent) if seen_by is not None else None
    with issuing(sent.name, group) as number:
        issued = issue(tensor)
    if watch is not None:
        watch.issued(issued.buffer, issued.work)
    return Landing(sent.name, number, group, issued, watch)


def drain(in_pass: int | None = None) -> list[str]:
    """Wait for all that is under way in this process, or for that of one backward pass; returns their names.

    What cannot land because another rank failed is given up. Landing early is harmless: a later wait finds it done.
    """
    landed = []
    for landing in list(_UNDER_WAY):
        if in_pass in (None, landing.in_pass):
            landed.append(landing.name)
            try:
                landing.land()
            except CollectiveError as error:
                landed[-1] += f" (given up: {error.found})"
    return landed


def under_way() -> list[str]:
    """The names of the collectives that were started and not waited for."""
    return sorted(landing.name for landing in _UNDER_WAY)


@contextmanager
def poisoned_buffers() -> Iterator[None]:
    """While it is open, buffers hold NaN until they are waited for, so that an early read cannot hide."""
    global _POISONED
    before, _POISONED = _POISONED, True
    try:
        yield
    finally:
        _POISONED = before


def buffers_are_poisoned() -> bool:
    """Whether `poisoned_buffers` is open."""
    return _POISONED


_OUTERMOST: ContextVar[int | None] = ContextVar("fxskip_outermost_pass", default=None)


def backward_pass() -> int:
    """The number of the backward pass that runs in this thread; -1 outside of any."""
    outermost = _OUTERMOST.get()
    return int(torch._C._current_graph_task_id()) if outermost is None else outermost


@contextmanager
def one_backward_pass() -> Iterator[None]:
    """While it is open, backward passes inside the one that runs belong to it: what they start may outlast them."""
    number = backward_pass()
    _look_at_end_of(number)
    token = _OUTERMOST.set(number)
    try:
        yield
    finally:
        _OUTERMOST.reset(token)


def _look_at_end_of(backward: int) -> None:
    if backward != -1 and backward not in _WATCHED:
        _WATCHED.add(backward)
        torch.autograd.Variable._execution_engine.queue_callback(_EndOfBackward(backward))


class _EndOfBackward:
    """Autograd calls it when a backward pass ends, and drops it without a call when the pass ends by an error."""

    def __init__(self, backward: int) -> None:
        self._backward: int | None = backward

    def __call__(self) -> None:
        backward, self._backward = self._backward, None
        assert backward is not None
        _WATCHED.discard(backward)
        drain(backward)

    def __del__(self) -> None:
        if self._backward is None:
            return
        _WATCHED.discard(self._backward)
        names = ", ".join(landing.name for landing in _UNDER_WAY if landing.in_pass == self._backward)
        place = f"a backward pass, with {names} in flight" if names else "a backward pass"
        tell("an error in the backward pass; its own output says which", place)
        if landed := drain(self._backward):
            warnings.warn(f"fxskip: an error ended {place}; waited for {', '.join(landed)}", stacklevel=2)
