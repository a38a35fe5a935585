"""What a measurement may change or watch while a parallel model runs. Switches hold for the whole process, for the
backward pass of a GPU runs in a thread of its own.

    waiting_at_once   each collective is waited for where it starts
    sending_nothing   a collective hands back local values of the right shape
    routing_in_turn   experts are chosen in turn, so that all get equally many tokens
    watched_by        somebody is told of layers, nodes and collectives

With `sending_nothing` the numbers that a model computes mean nothing, and with `routing_in_turn` they are those of
another model.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

import torch
from torch import Tensor


@dataclass(frozen=True)
class Place:
    """Where in the model a node is."""

    layer: int
    role: str
    """Of its task, such as "moe1.2" or "dispatch"."""
    lane: str
    """Of its task: "compute", "host", or the name of a process group."""


Part = Literal["forward", "bwd", "dgrad", "wgrad"]
"""Of a task: itself, its backward, or the two parts that an explicit backward may make of it: the gradients of what the
task read, and later those of its weights."""


@dataclass(frozen=True)
class Sent:
    """Which collective of a model it is."""

    name: str
    """In errors, such as "dispatch of decoder layer 3"."""
    place: Place
    """Where it belongs, as far as its sender knows: the second dispatch of a layer is "dispatch" as well."""
    flight: int | None = None
    """A number that a collective and its reverse have in common; None for what no task of a layer sends."""
    is_reverse: bool = False

    def of_flight(self, number: int) -> Sent:
        """The same, of the flight with this number."""
        return replace(self, flight=number)

    def reversed(self) -> Sent:
        """The one that its gradient goes through."""
        return replace(self, name=f"gradient of {self.name}", is_reverse=True)


class FlightWatch(Protocol):
    """Who is told what becomes of one collective."""

    def issued(self, buffer: Tensor, work: Any) -> None:
        """The transport has it. `work` is None where there was nothing to send."""

    def waits(self) -> None:
        """The host, or a device's stream, begins to wait for it."""

    def landed(self) -> None:
        """The wait is over."""


class Watcher(Protocol):
    """Who is told what a model does."""

    def enter_region(self, layer: int, schedule: Any, inputs: Sequence[Any]) -> None:
        """The graph of a decoder layer begins. `schedule` is the RegionSchedule that it runs by, or None."""

    def enter(self, place: Place | None, part: Part = "forward") -> None:
        """What runs from here on belongs to that part of `place`; None: to nothing that is measured."""

    def made(self, place: Place | None, values: Any) -> None:
        """What ran at `place` until now gave these values to others."""

    def flight(self, sent: Sent) -> FlightWatch:
        """That collective is about to be issued."""


class _Switches:
    waits_at_once = False
    sends_nothing = False
    routes_in_turn = False
    watcher: Watcher | None = None


_NOW = _Switches()


def waits_at_once() -> bool:
    """Whether each collective is to be waited for where it starts."""
    return _NOW.waits_at_once


def sends_nothing() -> bool:
    """Whether collectives are to hand back local values."""
    return _NOW.sends_nothing


def watcher() -> Watcher | None:
    """Who watches, if anybody."""
    return _NOW.watcher


@contextmanager
def waiting_at_once() -> Iterator[None]:
    """While it is open, all collectives block; the order of everything else is unchanged."""
    with _set("waits_at_once", True):
        yield


@contextmanager
def sending_nothing() -> Iterator[None]:
    """While it is open, nothing is sent: rows stay here, counts are taken to be the same on all ranks.

    All ranks open it, or none, between two steps. The host still reads counts from the device.
    """
    with _set("sends_nothing", True):
        yield


@contextmanager
def routing_in_turn() -> Iterator[None]:
    """While it is open, the choices of all tokens go through the experts in turn."""
    with _set("routes_in_turn", True):
        yield


@contextmanager
def watched_by(somebody: Watcher) -> Iterator[None]:
    """While it is open, `somebody` is told what the model does."""
    with _set("watcher", somebody):
        yield


@contextmanager
def _set(name: str, value: Any) -> Iterator[None]:
    before = getattr(_NOW, name)
    setattr(_NOW, name, value)
    try:
        yield
    finally:
        setattr(_NOW, name, before)


def chosen_experts(index: Tensor, experts: int) -> Tensor:
    """[T, K] int: the experts that a router has chosen; while routing goes in turn, others, equally often each."""
    if not _NOW.routes_in_turn:
        return index
    turn = torch.arange(index.numel(), device=index.device, dtype=index.dtype)
    return turn.remainder_(experts).view(index.shape)
