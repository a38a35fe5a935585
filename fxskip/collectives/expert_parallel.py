"""Routed experts spread over ranks: what the nodes run that `passes/shard.py` puts in the place of all experts.

    index ─┬─ sort_by_expert ── order ─┬─────────────────────────────────────────┐
           └─ start_counts ── counts   │                                         │
    hidden ────────────────────────── permute ─ dispatch ─ run_own_experts ─ combine ─ unpermute ─ routed

A token travels once for each expert that it is routed to; none is dropped. Routing weights stay at home.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor

from fxskip.collectives.all_to_all import AllToAll, Counts, exchange_counts, split_evenly
from fxskip.collectives.doing import Doing, require_same_doing
from fxskip.leaves import running_layer
from fxskip.parallel import running_axis

Direction = Literal["dispatch", "combine"]


@dataclass(frozen=True)
class Routing:
    """Where the rows of one MoE block go, as the host knows it."""

    sent: tuple[int, ...]
    """Rows for each rank."""
    received: tuple[int, ...]
    """Rows from each rank."""
    from_each: Tensor
    """[ranks, own experts] int64: how the received rows are made up, on the device."""
    group: Any

    def exchange(self, direction: Direction) -> AllToAll:
        """The exchange that brings rows to their experts, or back."""
        there = AllToAll(self.group, self.sent, self.received)
        return there if direction == "dispatch" else there.reversed

    def own_expert_of_each_row(self) -> Tensor:
        """[R] int64: which own expert, counted from 0, each received row is for."""
        ranks, experts = self.from_each.shape
        each = torch.arange(experts, device=self.from_each.device).repeat(ranks)
        return each.repeat_interleave(self.from_each.flatten(), output_size=sum(self.received))


def sort_by_expert(index: Tensor) -> Tensor:
    """The order [T K] that brings (token, choice) pairs into the order of their experts; equal ones keep theirs.

    index   [T, K] int64, the experts of each token
    """
    return index.flatten().argsort(stable=True)


def start_counts(index: Tensor, hidden: Tensor, path: str, experts: int, axis: str) -> Counts:
    """Count the rows for each of `experts` experts and start telling their owners on the mesh's `axis`.

    Beside them travels what this rank is about to do, one number, which `wait_counts` compares.

    hidden   [T, D], what will be sent; only its description is read
    path     the module of the experts in the layer that runs

    Raises a RuntimeError of torch for an index that is no expert.
    """
    mesh = running_axis(axis)
    each = split_evenly(experts, mesh.size())[0]
    flat = index.flatten()
    counts = flat.new_zeros(experts, dtype=torch.int64).scatter_add_(
        0, flat.long(), torch.ones_like(flat, dtype=torch.int64)
    )
    padded = nn.functional.pad(counts, (0, each * mesh.size() - experts)).view(mesh.size(), each)
    doing = padded.new_full((mesh.size(), 1), Doing.now(hidden, path).encoded())
    name = f"expert counts of decoder layer {running_layer().fxskip_layer}"
    return exchange_counts(name, torch.cat((padded, doing), dim=1), mesh.get_group())


def wait_counts(counts: Counts, axis: str) -> Routing:
    """The routing, as soon as the other ranks have told theirs.

    Raises CollectiveError where another rank is about to do something else.
    """
    sent, received = counts.get()
    mesh = running_axis(axis)
    require_same_doing(mesh, [row[-1] for row in received])
    rows = [tuple(sum(row[:-1]) for row in table) for table in (sent, received)]
    return Routing(rows[0], rows[1], counts.received[:, :-1], mesh.get_group())


class _Permute(torch.autograd.Function):
    """Rows of tokens, each as often as it is chosen. The backward pass adds the choices of a token in their order."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, order: Tensor, choices: int) -> Tensor:
        ctx.save_for_backward(order)
        ctx.choices, ctx.pairs = choices, hidden.shape[0] * choices
        return hidden.index_select(0, order // choices)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (order,) = ctx.saved_tensors
        rows = _blank(gradients[0], order, ctx.pairs).index_copy_(0, order, gradients[0])
        return rows.view(-1, ctx.choices, rows.shape[-1]).sum(1), None, None


def permute(hidden: Tensor, order: Tensor, index: Tensor) -> Tensor:
    """[T, D] -> [R, D]: a token for each of its choices that `order` lists, in that order; R is T K or less."""
    return _Permute.apply(hidden, order, index.shape[1])  # type: ignore[no-any-return,no-untyped-call]


def unpermute(rows: Tensor, order: Tensor, weights: Tensor, dtype: torch.dtype) -> Tensor:
    """[R, D] -> [T, D]: what the experts made of each token, weighed and added in the order of its choices.

    A choice that `order` does not list adds nothing. The sum is taken in the wider of the two types and returned as
    `dtype`, as transformers does.

    weights   [T, K] routing weights
    """
    at_home = _blank(rows, order, weights.numel()).index_copy(0, order, rows)
    weighed = at_home.view(*weights.shape, rows.shape[-1]) * weights.unsqueeze(-1)
    return weighed.sum(1).to(dtype)


def _blank(rows: Tensor, order: Tensor, pairs: int) -> Tensor:
    """Room for all (token, choice) pairs, zero where `order` may leave some out."""
    size = (pairs, *rows.shape[1:])
    return rows.new_empty(size) if order.numel() == pairs else rows.new_zeros(size)


class _KnowsExperts(Protocol):
    def own_expert_of_each_row(self) -> Tensor:
        """[R] int64: which own expert, counted from 0, each row is for."""


def run_own_experts(path: str, rows: Tensor, routing: _KnowsExperts) -> Tensor:
    """What this rank's experts, the module at `path` of the layer that runs, make of rows [R, D]: [R, D], not weighed.

    The module is the model's own; it gets every row as a token with one choice of weight 1.
    """
    module = running_layer().get_submodule(path)
    own = {name: local(parameter) for name, parameter in module.named_parameters()}
    experts, count = routing.own_expert_of_each_row(), rows.shape[0]
    if count == 0:
        # Experts without tokens still have gradients, of zeros, as those of a model in one process have.
        rows, experts = torch.cat((rows, rows.new_zeros(1, rows.shape[1]))), experts.new_zeros(1)
    ones = rows.new_ones(rows.shape[0], 1)
    made: Tensor = torch.func.functional_call(module, own, (rows, experts.unsqueeze(-1), ones))
    return made[:count] if count == 0 else made


def local(parameter: Tensor) -> Tensor:
    """This rank's part of a parameter."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter
