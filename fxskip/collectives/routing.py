"""The index work of routed experts: which row is which (token, choice) pair, and rows moved, weighed and added by it.

    index ── sort_pairs ── order, counts       rows in the order of experts; equal ones keep the order of pairs
    hidden ── permute(order) ── rows           a token for each of its choices
    rows ── unpermute(order, weights) ── hidden

On CUDA each is one fused Triton kernel, or three of the sort; elsewhere it is plain PyTorch, which is also what the
kernels are tested against. Nothing here makes the host wait for the device.
"""

# T tokens, K choices of each, R rows, D width, E experts

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

Implementation = Literal["auto", "triton", "torch"]


@dataclass(frozen=True)
class Order:
    """Which row is which (token, choice) pair. Pairs are numbered token K + choice."""

    pair_of_row: Tensor
    """[R] int64; R is T K or less."""
    row_of_pair: Tensor
    """[T K] int64; -1 of a pair that has no row."""
    choices: int
    """K."""

    @staticmethod
    def of(pair_of_row: Tensor, pairs: int, choices: int) -> Order:
        """The order whose rows are these of `pairs` pairs."""
        row_of_pair = pair_of_row.new_full((pairs,), -1)
        row_of_pair[pair_of_row] = torch.arange(len(pair_of_row), device=pair_of_row.device)
        return Order(pair_of_row, row_of_pair, choices)

    @property
    def back(self) -> Order:
        """What brings rows back, of an order that only moves rows: one with a row for each pair, and one choice."""
        assert self.choices == 1
        return Order(self.row_of_pair, self.pair_of_row, 1)


@dataclass(frozen=True)
class SortedPairs:
    """All pairs in the order of their experts."""

    order: Order
    counts: Tensor
    """[E] int64: rows of each expert."""


class HasOrder(Protocol):
    """What one order is part of."""

    @property
    def order(self) -> Order:
        """The rows' pairs."""


def order_of(found: HasOrder) -> Order:
    """The order, as `permute` and `unpermute` take it."""
    return found.order


def sort_pairs(index: Tensor, experts: int) -> SortedPairs:
    """The (token, choice) pairs in the order of their experts, by a counting sort; equal ones keep theirs.

    index   [T, K] int32 or int64, the experts of each token

    Raises a RuntimeError of torch for an index that is no expert; on CUDA, where it is noticed: a failed assertion.
    """
    if runs_kernels(index):
        from fxskip.collectives import routing_triton

        pair_of_row, row_of_pair, counts = routing_triton.sort_pairs(index, experts)
        return SortedPairs(Order(pair_of_row, row_of_pair, index.shape[1]), counts)
    flat = index.flatten()
    counts = flat.new_zeros(experts, dtype=torch.int64).scatter_add_(
        0, flat.long(), torch.ones_like(flat, dtype=torch.int64)
    )
    return SortedPairs(Order.of(flat.argsort(stable=True), len(flat), index.shape[1]), counts)


def order_by_expert(lengths: Tensor, rows: int) -> tuple[Order, Tensor]:
    """The order that brings rows which lie as runs [rank][expert] to [expert][rank], and where each expert's rows end.

    lengths   [ranks, E] int64, rows of each run, on the device
    rows      their sum, which the host knows

    The second result is [E] int32, as grouped matrix products take it.
    """
    if runs_kernels(lengths):
        from fxskip.collectives import routing_triton

        came_from, goes_to, ends = routing_triton.order_runs(lengths, rows)
        return Order(came_from, goes_to, 1), ends
    came_from = expert_of_each_row(lengths, rows).argsort(stable=True)
    return Order.of(came_from, rows, 1), lengths.sum(0).cumsum(0, dtype=torch.int32)


def expert_of_each_row(lengths: Tensor, rows: int) -> Tensor:
    """[R] int64: the expert, counted from 0, of each row of runs [rank][expert] of these lengths."""
    ranks, experts = lengths.shape
    each = torch.arange(experts, device=lengths.device).repeat(ranks)
    return each.repeat_interleave(lengths.flatten(), output_size=rows)


class _Permute(torch.autograd.Function):
    """Rows of tokens, each as often as it is chosen. The backward pass adds the choices of a token in their order."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, order: Order) -> Tensor:
        ctx.save_for_backward(order.pair_of_row, order.row_of_pair)
        ctx.choices, ctx.with_kernels = order.choices, runs_kernels(hidden)
        if not ctx.with_kernels:
            return hidden.index_select(0, order.pair_of_row // order.choices)
        from fxskip.collectives import routing_triton

        return routing_triton.gather_rows(hidden, order.pair_of_row, order.choices)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (rows,) = gradients
        pair_of_row, row_of_pair = ctx.saved_tensors
        if not ctx.with_kernels:
            return _by_token(rows, Order(pair_of_row, row_of_pair, ctx.choices)).sum(1), None
        from fxskip.collectives import routing_triton

        return routing_triton.add_choices(rows, row_of_pair, None, ctx.choices, rows.dtype), None


class _Unpermute(torch.autograd.Function):
    """Rows weighed and added by kernels. Rows are kept for the gradient of weights, and weights for that of rows."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Order, weights: Tensor, dtype: torch.dtype) -> Tensor:
        from fxskip.collectives import routing_triton

        for_rows, for_weights = ctx.needs_input_grad[0], ctx.needs_input_grad[2]
        ctx.save_for_backward(rows if for_weights else None, order.row_of_pair, weights if for_rows else None)
        ctx.like = (rows.shape, rows.dtype), (weights.shape, weights.dtype)
        return routing_triton.add_choices(rows, order.row_of_pair, weights, order.choices, dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        from fxskip.collectives import routing_triton

        d_rows, d_weights = routing_triton.weigh_back(gradients[0], *ctx.saved_tensors, *ctx.like)
        return d_rows, None, d_weights, None


def permute(hidden: Tensor, order: Order) -> Tensor:
    """[T, D] -> [R, D]: a token for each of its choices that has a row, in the order of rows.

    The gradient of a token is the sum of those of its choices: in their order and in float32, then rounded, by the
    kernels; by PyTorch as `sum` adds them.
    """
    return _Permute.apply(hidden, order)  # type: ignore[no-any-return,no-untyped-call]


def unpermute(rows: Tensor, order: Order, weights: Tensor, dtype: torch.dtype) -> Tensor:
    """[R, D] -> [T, D]: what the experts made of each token, weighed and added in the order of its choices.

    A choice without a row adds nothing. Products are rounded to the wider of the two types, as transformers does; the
    sum is rounded to it, if it is narrower than float32, and returned as `dtype`. The kernels round the sum to
    `dtype` alone.

    weights   [T, K] routing weights
    """
    if runs_kernels(rows):
        return _Unpermute.apply(rows, order, weights, dtype)  # type: ignore[no-any-return,no-untyped-call]
    weighed = _by_token(rows, order) * weights.unsqueeze(-1)
    return weighed.sum(1).to(dtype)


def _by_token(rows: Tensor, order: Order) -> Tensor:
    """[T, K, D]: the row of each pair, zero where it has none."""
    pairs = len(order.row_of_pair)
    size = (pairs, *rows.shape[1:])
    blank = rows.new_empty(size) if len(order.pair_of_row) == pairs else rows.new_zeros(size)
    tokens = blank.index_copy(0, order.pair_of_row, rows)
    return tokens.view(pairs // order.choices, order.choices, *rows.shape[1:])


_IMPLEMENTATION: ContextVar[Implementation] = ContextVar("fxskip_routing", default="auto")


@contextmanager
def implementation(chosen: Implementation) -> Iterator[None]:
    """While it is open, the forward pass runs the kernels ("triton"), PyTorch ("torch"), or what the device has."""
    token = _IMPLEMENTATION.set(chosen)
    try:
        yield
    finally:
        _IMPLEMENTATION.reset(token)


def runs_kernels(tensor: Tensor) -> bool:
    """Whether what reads `tensor` runs as Triton kernels. A warning says, once, why it does not on CUDA."""
    chosen = _IMPLEMENTATION.get()
    if chosen != "auto" or not tensor.is_cuda:
        return chosen == "triton"
    obstacle = _obstacle(tensor.device, tensor.dtype)
    if obstacle is not None:
        _warn_once(obstacle)
    return obstacle is None


_FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


@cache
def _obstacle(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why the kernels cannot take tensors of this CUDA device and type; None if they can."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if dtype.is_floating_point and dtype not in _FLOATS:
        return f"rows are {dtype}, and the kernels take bfloat16, float16, float32 and float64"
    capability = torch.cuda.get_device_capability(device)
    if torch.version.hip is None and capability < (8, 0):
        return f"the device has compute capability {capability[0]}.{capability[1]}, and bfloat16 kernels need 8.0"
    return None


@cache
def _warn_once(obstacle: str) -> None:
    warnings.warn(
        f"routed experts: rows are sorted and moved by PyTorch, which is slower: {obstacle}",
        RuntimeWarning,
        stacklevel=3,
    )
