"""Collectives under way: started in one place of a graph and waited for in another, forward and backward.

A start gives a buffer, an ordinary tensor that nobody may read yet, and a `Flight`, which knows when it may be
read. Both travel to the wait, also across the border of a decoder layer. The backward pass mirrors the forward:
the gradient of a wait starts the reverse collective, the gradient of a start waits for it. Between the two travels
a token, one element without strides, because the reverse buffer has the shape of the start's input:

    forward    x --start--> buffer ............ --wait--> received
    backward   dx <--wait-- token ............. <--start-- d received

With uneven splits buffer and input differ in shape. Neither function keeps a tensor for the backward pass.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from fxskip.errors import PassError


class Work(Protocol):
    """What torch.distributed returns for a collective that runs by itself."""

    def wait(self) -> Any:
        """Block the host, or the current stream of a device, until the collective is done."""


@dataclass(frozen=True)
class Issued:
    """A collective that was handed to its transport."""

    buffer: Tensor
    """Where its result will be."""
    work: Work | None
    """None where it is done already."""
    source: Tensor
    """What it reads, kept until it is done."""


Issue = Callable[[Tensor], Issued]


class Collective(Protocol):
    """What may be started: an operation on a tensor and the one that its gradient goes through."""

    def issue(self, tensor: Tensor) -> Issued:
        """Start it."""

    def issue_reverse(self, gradient: Tensor) -> Issued:
        """Start what the gradient of its result goes through."""


_UNDER_WAY: weakref.WeakSet[Flight] = weakref.WeakSet()
_POISONED = False


class Flight:
    """One collective from its start to its wait, and its reverse.

    name   says in errors which collective of which layer it is
    """

    def __init__(self, name: str, collective: Collective, *, at_once: bool = False) -> None:
        self.name = name
        self._collective = collective
        self._at_once = at_once
        self._forward: _Landing | None = None
        self._reverse: _Landing | None = None
        self._token: Tensor | None = None

    def start(self, tensor: Tensor) -> Tensor:
        """Issue it; returns the buffer, which holds nothing yet."""
        self._forward = self._launch(self._collective.issue(tensor))
        return self._forward.buffer

    def wait(self, buffer: Tensor) -> None:
        """Make sure that the buffer holds the result. Waiting again, as a recomputation does, does nothing."""
        landing, self._forward = self._forward, None
        if landing is None:
            if not _in_backward():
                raise self._lost("a value that was never in flight", "its buffer was waited for before")
            return
        if not _same_memory(buffer, landing.buffer):
            self._forward = landing
            raise self._lost("another tensor", "a cast, a copy or a hook between start and wait replaced it")
        landing.land()
        _UNDER_WAY.discard(self)

    def start_reverse(self, gradient: Tensor) -> Tensor:
        """Issue the reverse collective; returns the token that stands for its result."""
        self._reverse = self._launch(self._collective.issue_reverse(gradient))
        self._token = _token_like(gradient)
        return self._token

    def wait_reverse(self, token: Tensor) -> Tensor:
        """The result of the reverse collective that `token` stands for."""
        landing, expected = self._reverse, self._token
        self._reverse = self._token = None
        if landing is None or expected is None or not _same_memory(token, expected):
            raise self._lost(
                "another gradient",
                "a hook, a cast, or a second use of the buffer read or changed the gradient",
            )
        landing.land()
        _UNDER_WAY.discard(self)
        return landing.buffer

    def abandon(self) -> None:
        """Wait for what is under way and forget it."""
        for landing in (self._forward, self._reverse):
            if landing is not None:
                landing.land()
        self._forward = self._reverse = self._token = None

    def _launch(self, issued: Issued) -> _Landing:
        landing = _Landing(issued, poisoned=_POISONED)
        _UNDER_WAY.add(self)
        if self._at_once:
            landing.land()
        return landing

    def _lost(self, found: str, why: str) -> PassError:
        return PassError(
            self.name,
            f"{found} arrived where a collective in flight was expected: {why}",
            hint="nothing may touch the values between two layers of a parallel model: see docs/overlap.md, and "
            "runtime: {mode: reference} to run without values in flight",
        )


class _Landing:
    """An issued collective and, in the debug mode, the buffer full of NaN that is shown until it has landed."""

    def __init__(self, issued: Issued, *, poisoned: bool) -> None:
        self._issued: Issued | None = issued
        self.buffer = issued.buffer
        if poisoned and issued.buffer.is_floating_point():
            self.buffer = torch.full_like(issued.buffer, torch.nan)

    def land(self) -> None:
        """Wait, once."""
        issued, self._issued = self._issued, None
        if issued is None:
            return
        if issued.work is not None:
            issued.work.wait()
        if self.buffer is not issued.buffer:
            self.buffer.data.copy_(issued.buffer)


class _Start(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, flight: Flight) -> Tensor:
        ctx.flight = flight
        return flight.start(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return ctx.flight.wait_reverse(gradients[0]), None


class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, buffer: Tensor, flight: Flight) -> Tensor:
        ctx.flight = flight
        flight.wait(buffer)
        return buffer.view_as(buffer)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return ctx.flight.start_reverse(gradients[0]), None


def start(tensor: Tensor, flight: Flight) -> Tensor:
    """Start a collective on `tensor`; its buffer may be read after `wait(buffer, flight)` only."""
    return _Start.apply(tensor, flight)  # type: ignore[no-any-return,no-untyped-call]


def start_of_next(tensor: Tensor, flight: Flight) -> Tensor:
    """`start` for a collective that the next layer waits for.

    A recomputation of this layer alone must not start it again: the next layer has the buffer, and nobody would wait.
    """
    if _in_backward():
        return tensor.new_full((1,), torch.nan).expand_as(tensor)
    return start(tensor, flight)


def wait(buffer: Tensor, flight: Flight) -> Tensor:
    """The result of the collective whose start returned `buffer`."""
    return _Wait.apply(buffer, flight)  # type: ignore[no-any-return,no-untyped-call]


def drain() -> int:
    """Wait for everything that is under way in this process and forget it; returns how many there were.

    After an exception nothing may stay in flight: its buffers would be written into when they are long reused.
    """
    flights = list(_UNDER_WAY)
    _UNDER_WAY.clear()
    for flight in flights:
        flight.abandon()
    return len(flights)


def under_way() -> list[str]:
    """The names of the collectives that were started and not waited for."""
    return sorted(flight.name for flight in _UNDER_WAY)


@contextmanager
def poisoned_buffers() -> Iterator[None]:
    """While it is open, buffers hold NaN until they are waited for, so that an early read cannot hide."""
    global _POISONED
    before, _POISONED = _POISONED, True
    try:
        yield
    finally:
        _POISONED = before


def _token_like(gradient: Tensor) -> Tensor:
    # NaN, so that whoever computes with it notices; anomaly detection looks for NaN itself.
    content = 0.0 if torch.is_anomaly_enabled() else torch.nan
    return gradient.new_full((1,), content).as_strided(gradient.shape, (0,) * gradient.dim())


def _same_memory(one: Tensor, other: Tensor) -> bool:
    return (
        one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
        and one.shape == other.shape
        and one.dtype == other.dtype
    )


def _in_backward() -> bool:
    """Whether autograd runs a backward pass in this thread, which recomputes a checkpointed forward."""
    return torch._C._current_graph_task_id() != -1
