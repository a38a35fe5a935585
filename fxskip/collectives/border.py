"""What crosses the border between two decoder layers beside finished streams."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, fx
from torch.autograd.function import once_differentiable

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

    @cached_property
    def module(self) -> fx.GraphModule:
        """It, alone: takes what crosses the border, and returns the streams."""
        return fx.GraphModule({}, self.graph)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Tail) and other.digest == self.digest

    def __hash__(self) -> int:
        return hash(self.digest)


_TAILS: dict[str, Tail] = {}
"""All tails by their digests: a graph names what it leaves by a string, for its code is text."""


class Pending:
    """What crosses the border beside the streams: the tail, and the values that it reads.

    No dataclass, tuple or mapping: FSDP2 looks into these for tensors to cast, and would read a buffer in flight.
    """

    def __init__(self, tail: Tail, values: tuple[Any, ...]) -> None:
        self.tail, self.values = tail, values

    def watched(self) -> tuple[Tensor, ...]:
        """The values that gradients come back to. FSDP2 gathers a layer's weights at the first gradient that arrives
        at one of its results, so these have to be among them."""
        return tuple(v for v in self.values if isinstance(v, Tensor) and v.requires_grad)

    def finish(self, streams: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """The streams, all finished."""
        finished = self.tail.module(*self.values)
        made = dict(zip(self.tail.streams, finished, strict=True))
        return tuple(join(s, made[i]) if i in made else s for i, s in enumerate(streams))


class _StandIn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, stream: Tensor, *reads: Any) -> Tensor:
        ctx.inputs = 1 + len(reads)
        return stream.new_full((1,), torch.nan).expand(stream.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return (None,) * ctx.inputs


def stand_in(stream: Tensor, *reads: Any) -> Tensor:
    """A tensor like `stream`, of one NaN, for one that is not finished: whoever reads it notices.

    It has a gradient where one of `reads` has, as the finished stream would, so that FSDP2, DDP and checkpointing see
    the same inputs and outputs of a layer.
    """
    return _StandIn.apply(stream, *reads)  # type: ignore[no-any-return,no-untyped-call]


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, arrived: Tensor, finished: Tensor) -> Tensor:
        ctx.like = arrived.new_empty(0), arrived.shape
        return finished.view_as(finished)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        like, shape = ctx.like
        nothing = like.new_zeros((1,)).expand(shape) if ctx.needs_input_grad[0] else None
        return nothing, gradients[0]


def join(arrived: Tensor, finished: Tensor) -> Tensor:
    """The finished stream in the place of its stand-in, which `arrived`.

    What was done to the stand-in on its way is done to the stream: a cast by FSDP2's mixed precision. The stand-in gets
    a gradient of zeros, when that of the stream is complete: FSDP2 reduces a layer's gradients when all of its inputs
    have theirs.
    """
    return _Join.apply(arrived, finished.to(arrived.dtype))  # type: ignore[no-any-return,no-untyped-call]


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
