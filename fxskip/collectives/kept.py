"""What the collectives of one call of a layer brought, kept for a second run of the same call."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

from torch import Tensor

Thing = TypeVar("Thing")


class Kept:
    """The things that the first run made, in order, for every later run of the same graph."""

    def __init__(self) -> None:
        self.buffers: dict[int, Tensor] = {}
        """What was received, by the number of the flight. Here and nowhere else: this is gone when the backward pass is
        over, while a flight lives as long as somebody holds the loss."""
        self._things: list[Any] = []
        self._next: int | None = None

    @contextmanager
    def run(self) -> Iterator[None]:
        """While it is open, `made_once` keeps what it makes; opened again, it gives the same things in turn."""
        token = _KEPT.set(self)
        try:
            yield
        finally:
            _KEPT.reset(token)
            self._next = 0

    def take(self, make: Callable[[], Thing]) -> Thing:
        """The next thing."""
        if self._next is None:
            self._things.append(make())
            thing: Thing = self._things[-1]
            return thing
        thing = self._things[self._next]
        self._next += 1
        return thing


_KEPT: ContextVar[Kept | None] = ContextVar("fxskip_kept", default=None)


def made_once(make: Callable[[], Thing]) -> Thing:
    """`make()`; in a second run of a layer's call, for the spec's `runtime.recompute`, what the first run made."""
    kept = _KEPT.get()
    return make() if kept is None else kept.take(make)


def kept_now() -> Kept | None:
    """Where what is made now is kept for a second run."""
    return _KEPT.get()
