"""What crosses the border between two decoder layers beside finished streams."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from fxskip.ir import show


class Tail:
    """What is left to compute of a layer's streams when its last exchange arrives. Equal tails compare equal."""

    def __init__(self, graph: fx.Graph, streams: tuple[int, ...]) -> None:
        self.graph = graph
        """Placeholders: what crosses the border, in order. Output: the streams that were not finished."""
        self.streams = streams
        """Their numbers."""
        self.digest = hashlib.sha256(f"{streams}\n{show(graph)}".encode()).hexdigest()
        _TAILS[self.digest] = self

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Tail) and other.digest == self.digest

    def __hash__(self) -> int:
        return hash(self.digest)


_TAILS: dict[str, Tail] = {}
"""All tails by their digests: a graph names what it leaves by a string, for its code is text."""


@dataclass(frozen=True)
class Pending:
    """What crosses the border beside the streams: the tail, and the values that it reads."""

    tail: Tail
    values: tuple[Any, ...]

    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors among the values, which whoever looks at the border has to see."""
        return tuple(v for v in self.values if isinstance(v, Tensor))

    def with_tensors(self, tensors: tuple[Tensor, ...]) -> Pending:
        """The same with the tensors as they arrived."""
        arrived = iter(tensors)
        return Pending(self.tail, tuple(next(arrived) if isinstance(v, Tensor) else v for v in self.values))

    def without_tensors(self) -> Pending:
        """The same without holding the tensors: they travel apart."""
        return Pending(self.tail, tuple(_HERE if isinstance(v, Tensor) else v for v in self.values))


_HERE = torch.empty(0)


class Border:
    """The two borders of the layer that runs: what arrived, and what it leaves behind for the next."""

    def __init__(self, arrived: Pending | None) -> None:
        self.arrived = arrived
        self.left: Pending | None = None


_BORDER: ContextVar[Border] = ContextVar("fxskip_border")


@contextmanager
def at_border(arrived: Pending | None) -> Iterator[Border]:
    """While it is open, the graph that runs finds what arrived, and leaves what is pending."""
    border = Border(arrived)
    token = _BORDER.set(border)
    try:
        yield border
    finally:
        _BORDER.reset(token)


def arrived_value(index: int) -> Any:
    """One of the values that crossed the border into this layer."""
    pending = _BORDER.get().arrived
    assert pending is not None
    return pending.values[index]


def leave_pending(digest: str, *values: Any) -> None:
    """Leave the values that the tail of this digest reads for the next layer."""
    _BORDER.get().left = Pending(_TAILS[digest], values)
