"""Collectives under way: started in one place of a graph and waited for in another, forward and backward.

A start gives a buffer, an ordinary tensor that nobody may read yet, and a `Flight`, which knows when it may be
read. Both travel to the wait, also across the border of a decoder layer. The backward pass mirrors the forward:
the gradient of a wait starts the reverse collective, the gradient of a start waits for it. Between the two travels
a token, one element without strides, because the reverse buffer has the shape of the start's input:

    forward    x --start--> buffer ............ --wait--> received
    backward   dx <--wait-- token ............. <--start-- d received

With uneven splits buffer and input differ in shape. Neither function keeps a tensor for the backward pass.

A layer that is computed again in the backward pass starts its collectives again, unless `kept` has what they brought.
One that the next layer waits for is put off: only if that layer runs again too does it wait, and then it is issued.
"""

from __future__ import annotations

import itertools
import weakref
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fxskip.collectives.kept import kept_now
from fxskip.collectives.landing import (
    Issued,
    Landing,
    backward_pass,
    drain,
    launch,
    poisoned_buffers,
    under_way,
)
from fxskip.collectives.measuring import Sent, waits_at_once
from fxskip.errors import PassError

__all__ = [
    "Collective",
    "Flight",
    "Issued",
    "drain",
    "poisoned_buffers",
    "start",
    "start_of_next",
    "under_way",
    "wait",
]


class Collective(Protocol):
    """What may be started: an operation on a tensor and the one that its gradient goes through."""

    @property
    def group(self) -> Any:
        """The process group that it runs in."""

    def issue(self, tensor: Tensor) -> Issued:
        """Start it."""

    def issue_reverse(self, gradient: Tensor) -> Issued:
        """Start what the gradient of its result goes through."""


_FLIGHTS: weakref.WeakValueDictionary[int, Flight] = weakref.WeakValueDictionary()
_numbers = itertools.count()


class Flight:
    """One collective from its start to its wait, and its reverse.

    sent   which collective of which layer it is
    """

    def __init__(self, sent: Sent, collective: Collective, *, at_once: bool = False) -> None:
        self.number = next(_numbers)
        self.sent = sent.of_flight(self.number)
        _FLIGHTS[self.number] = self
        self._collective = collective
        self._at_once = at_once
        kept = kept_now()
        self._kept = weakref.ref(kept) if kept is not None else None
        self._put_off: Tensor | None = None
        self._forward: Landing | None = None
        self._reverse: Landing | None = None
        self._token: Tensor | None = None
        self._started = False

    @property
    def name(self) -> str:
        """In errors."""
        return self.sent.name

    def start(self, tensor: Tensor, *, of_next: bool) -> Tensor:
        """Issue it; returns the buffer, which holds nothing yet.

        of_next   the next layer waits for it
        """
        kept = self._kept() if self._kept is not None else None
        if kept is not None and self.number in kept.buffers:
            return kept.buffers[self.number]
        if of_next and backward_pass() != -1:
            self._put_off = tensor if kept is None or not self._started else None
            return tensor.new_full((1,), torch.nan).expand_as(tensor)
        self._started = True
        self._forward = self._launch(self.sent, self._collective.issue, tensor)
        if kept is not None and not of_next:
            kept.buffers[self.number] = self._forward.buffer
        return self._forward.buffer

    def wait(self, buffer: Tensor) -> Tensor:
        """The result. Waiting again, as a recomputation does, gives what the buffer holds since."""
        if self._put_off is not None:
            tensor, self._put_off = self._put_off, None
            buffer = torch.ops.fxskip.issue(tensor, self.number, False)
        landing, self._forward = self._forward, None
        if landing is None:
            if backward_pass() == -1:
                raise self._lost("a value that was never in flight", "its buffer was waited for before")
            return buffer
        if not _same_memory(buffer, landing.buffer):
            self._forward = landing
            raise self._lost("another tensor", "a cast, a copy or a hook between start and wait replaced it")
        landing.land()
        return buffer

    def start_reverse(self, gradient: Tensor) -> Tensor:
        """Issue the reverse collective; returns the token that stands for its result."""
        self._reverse = self._launch(self.sent.reversed(), self._collective.issue_reverse, gradient)
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
        return landing.buffer

    def _launch(self, sent: Sent, issue: Any, tensor: Tensor) -> Landing:
        landing = launch(sent, self._collective.group, issue, tensor)
        if self._at_once or waits_at_once():
            landing.land()
        return landing

    def _lost(self, found: str, why: str) -> PassError:
        return PassError(
            self.name,
            f"{found} arrived where a collective in flight was expected: {why}",
            hint="nothing may touch the values between two layers of a parallel model: see docs/overlap.md, and "
            "runtime: {mode: reference} to run without values in flight",
        )


def _issue(tensor: Tensor, flight: int, of_next: bool) -> Tensor:
    return _FLIGHTS[flight].start(tensor, of_next=of_next)


# An operator of its own, so that a policy of selective checkpointing can keep what a collective brings. It may return
# its argument where nothing is to be sent, which torch.library.custom_op refuses.
_LIBRARY = torch.library.Library("fxskip", "FRAGMENT")
_LIBRARY.define("issue(Tensor tensor, int flight, bool of_next) -> Tensor")
_LIBRARY.impl("issue", _issue, "CompositeExplicitAutograd")


class _Start(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, flight: Flight, of_next: bool) -> Tensor:
        ctx.flight = flight
        buffer: Tensor = torch.ops.fxskip.issue(tensor, flight.number, of_next)
        return buffer

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return ctx.flight.wait_reverse(gradients[0]), None, None


class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, buffer: Tensor, flight: Flight) -> Tensor:
        ctx.flight = flight
        result = flight.wait(buffer)
        return result.view_as(result)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return ctx.flight.start_reverse(gradients[0]), None


def start(tensor: Tensor, flight: Flight) -> Tensor:
    """Start a collective on `tensor`; its buffer may be read after `wait(buffer, flight)` only."""
    return _Start.apply(tensor, flight, False)  # type: ignore[no-any-return,no-untyped-call]


def start_of_next(tensor: Tensor, flight: Flight) -> Tensor:
    """`start` for a collective that the next layer waits for."""
    return _Start.apply(tensor, flight, True)  # type: ignore[no-any-return,no-untyped-call]


def wait(buffer: Tensor, flight: Flight) -> Tensor:
    """The result of the collective whose start returned `buffer`."""
    return _Wait.apply(buffer, flight)  # type: ignore[no-any-return,no-untyped-call]


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
