"""Routed experts spread over ranks: what the nodes run that `passes/shard.py` puts in the place of all experts.

    index ── sort_pairs ─┬─ order ─────┬─────────────────────────────────────────┐
                         └─ start_counts ── counts                               │
    hidden ────────────────────────── permute ─ dispatch ─ run_own_experts ─ combine ─ unpermute ─ routed

A token travels once for each expert that it is routed to; none is dropped. Routing weights stay at home. What moves
rows on this rank is in `routing`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fxskip.collectives.all_to_all import AllToAll, Counts, exchange_counts, split_evenly
from fxskip.collectives.copy_engine import CopyExchange
from fxskip.collectives.doing import Doing, require_same_doing
from fxskip.collectives.grouped_experts import grouped_experts, is_grouped
from fxskip.collectives.measuring import Place, Sent
from fxskip.collectives.routing import Order, SortedPairs, expert_of_each_row, order_by_expert, permute
from fxskip.leaves import running_layer
from fxskip.parallel import EXPERT, RegionParallel, running_axis

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
    most: int | None = None
    """Rows that a rank has for another at most, over all pairs of ranks, where copy engines move them."""

    def exchange(self, direction: Direction) -> AllToAll:
        """The exchange that brings rows to their experts, or back."""
        there = (
            AllToAll(self.group, self.sent, self.received)
            if self.most is None
            else CopyExchange(self.group, self.sent, self.received, self.most)
        )
        return there if direction == "dispatch" else there.reversed

    def own_expert_of_each_row(self) -> Tensor:
        """[R] int64: which own expert, counted from 0, each received row is for."""
        return expert_of_each_row(self.from_each, sum(self.received))

    def by_own_expert(self, experts: int) -> tuple[Order, Tensor]:
        """What brings the received rows into the order of own experts, and [experts] int32: where those of each end."""
        order, ends = order_by_expert(self.from_each, sum(self.received))
        return order, ends[:experts]


def start_counts(pairs: SortedPairs, hidden: Tensor, path: str, axis: str) -> Counts:
    """Start telling the owners of experts on the mesh's `axis` how many rows each expert gets.

    Beside them travels what this rank is about to do, one number, which `wait_counts` compares; and, where copy engines
    move the rows, how many this rank has for another at most.

    hidden   [T, D], what will be sent; only its description is read
    path     the module of the experts in the layer that runs
    """
    mesh = running_axis(axis)
    ranks, experts = mesh.size(), len(pairs.counts)
    each = split_evenly(experts, ranks)[0]
    padded = torch.constant_pad_nd(pairs.counts, (0, each * ranks - experts)).view(ranks, each)
    told = torch.constant_pad_nd(padded, (0, 1), Doing.now(hidden, path).encoded())
    if _uses_copy_engines():
        told = torch.cat((_most_for_another(padded, mesh.get_local_rank()).expand(ranks, 1), told), 1)
    layer = int(running_layer().fxskip_layer)  # type: ignore[arg-type]
    sent = Sent(f"expert counts of decoder layer {layer}", Place(layer, "counts", EXPERT))
    return exchange_counts(sent, told, mesh.get_group())


def wait_counts(counts: Counts, axis: str) -> Routing:
    """The routing, as soon as the other ranks have told theirs.

    Raises CollectiveError where another rank is about to do something else.
    """
    sent, received = counts.get()
    mesh = running_axis(axis)
    require_same_doing(mesh, [row[-1] for row in received])
    by_copies = _uses_copy_engines()
    experts = slice(int(by_copies), -1)
    rows = [tuple(sum(row[experts]) for row in table) for table in (sent, received)]
    most = max(row[0] for row in received) if by_copies else None
    return Routing(rows[0], rows[1], counts.received[:, experts], mesh.get_group(), most)


def _uses_copy_engines() -> bool:
    """Whether the layer that runs exchanges its rows by copies between devices."""
    parallel = running_layer().fxskip_parallel
    assert isinstance(parallel, RegionParallel)
    return parallel.transport == "copy_engine"


def _most_for_another(counts: Tensor, rank: int) -> Tensor:
    """[1] int64: rows for that other rank that gets most; `counts` [ranks, own experts] are of this one, `rank`."""
    rows = counts.sum(1)
    rows[rank] = 0
    return rows.max().view(1)


class _KnowsExperts(Protocol):
    def own_expert_of_each_row(self) -> Tensor:
        """[R] int64: which own expert, counted from 0, each row is for."""

    def by_own_expert(self, experts: int) -> tuple[Order | None, Tensor]:
        """The order of rows by own expert, with one choice, and [experts] int32: where those of each end.

        None for the order where the rows lie in it.
        """


def run_own_experts(path: str, rows: Tensor, routing: _KnowsExperts) -> Tensor:
    """What this rank's experts, the module at `path` of the layer that runs, make of rows [R, D]: [R, D], not weighed.

    The module is the model's own; it gets every row as a token with one choice of weight 1. Where it would do no more
    than sort them for grouped matrix products, the products are called with the rows sorted by `routing`.
    """
    module = running_layer().get_submodule(path)
    own = {name: local(parameter) for name, parameter in module.named_parameters()}
    count = rows.shape[0]
    if count and is_grouped(module):
        order, ends = routing.by_own_expert(own["down_proj"].shape[0])
        if order is None:
            return grouped_experts(module, own, rows, ends)
        return permute(grouped_experts(module, own, permute(rows, order), ends), order.back)
    experts = routing.own_expert_of_each_row()
    if count == 0:
        # Experts without tokens still have gradients, of zeros, as those of a model in one process have.
        rows, experts = torch.cat((rows, rows.new_zeros(1, rows.shape[1]))), experts.new_zeros(1)
    ones = rows.new_ones(rows.shape[0], 1)
    made: Tensor = torch.func.functional_call(module, own, (rows, experts.unsqueeze(-1), ones))
    return made[:count] if count == 0 else made


def local(parameter: Tensor) -> Tensor:
    """This rank's part of a parameter."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter
