"""Estimated time of single operations on one rank, by the roofline of a hardware file.

    product        max(FLOPs / reachable FLOP/s, bytes / reachable bytes/s)
    other kernels  bytes read and written / reachable bytes/s; a view costs nothing
    exchange       bytes sent to others / reachable bytes/s of their links
    and the time of a start for each

Sizes are those that the region was captured with.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from fxskip.collectives import expert_parallel as ep
from fxskip.ir import is_matrix_product, is_tensor, op_name, storage, value
from fxskip.parallel import RegionParallel
from fxskip.passes.shard import ROUTED_ROWS
from fxskip.passes.split_collectives import is_start, sends_forward
from fxskip.schedule.hardware import Hardware, MatrixType
from fxskip.schedule.sizes import DependsOnValues, product

_TYPES: dict[torch.dtype, MatrixType] = {
    torch.float32: "float32",
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
}
_HOST_READ_US = 10.0
"""Of split sizes that are there already: an order of magnitude, to say that it is not nothing."""


@dataclass(frozen=True)
class NodeCosts:
    """Costs of the nodes of one region."""

    hardware: Hardware
    parallel: RegionParallel
    choices: int
    """Experts of a token."""

    def us(self, node: fx.Node) -> float:
        """Microseconds of the node, alone on the machine; 0 for a view, and for what is no work of a device."""
        with suppress(DependsOnValues):
            if is_start(node):
                return self.exchange_us(node) if sends_forward(node) else 0.0
            if node.target is ep.start_counts:
                return 1e6 * self.hardware.collective_start_s.value
            if node.target is ep.wait_counts:
                return _HOST_READ_US
            return self._kernel_us(node)
        return 0.0

    def bytes(self, node: fx.Node) -> int:
        """What the buffer of the exchange holds that `node` starts or waits for, on average."""
        return self._rows(node) * product(value(node).shape[1:]) * int(value(node).element_size())

    def _kernel_us(self, node: fx.Node) -> float:
        if not is_tensor(node):
            return 0.0
        operands = [n for n in node.all_input_nodes if is_tensor(n)]
        if any(storage(n) == storage(node) for n in operands) and not is_heavy(node):
            return 0.0
        moved: int = sum(self._size(n) * value(n).element_size() for n in (node, *operands))
        seconds: float = moved / self.hardware.hbm_bytes_per_s.per_s
        if is_heavy(node):
            seconds = max(seconds, self._flops(node, operands) / self._rate(node))
        return 1e6 * (seconds + self.hardware.kernel_start_s.value)

    def _rate(self, node: fx.Node) -> float:
        rates = self.hardware.matrix_flop_per_s
        kind: MatrixType = _TYPES.get(value(node).dtype, "bfloat16")
        rate: float = rates[kind if kind in rates else next(iter(rates))].per_s
        return rate

    def _flops(self, node: fx.Node, operands: list[fx.Node]) -> float:
        if node.target is ep.run_own_experts:
            stack = next(s for s in self.parallel.experts if s.path == node.args[0])
            return 2.0 * self._rows(node) * stack.parameters_each
        if is_attention(node):
            query, key, values = (value(n) for n in operands[:3])
            causal = 0.5 if node.kwargs.get("is_causal") else 1.0
            pairs = product(query.shape[:-1]) * product(key.shape[-2:-1]) * causal
            return 2.0 * pairs * (product(key.shape[-1:]) + product(values.shape[-1:]))
        return 2.0 * product(value(node).shape) * product(value(operands[0]).shape[-1:])

    def exchange_us(self, node: fx.Node) -> float:
        """Of the exchange or sum that `node` starts or waits for. A ring sends what it adds up twice."""
        is_sum = not _is_routed(node)
        ranks = self.parallel.tensor_size if is_sum and self.parallel.tensor_size > 1 else self.parallel.ranks
        sent = self.bytes(node) * (ranks - 1) / ranks * (2 if is_sum else 1)
        return self.hardware.transfer_us(ranks, sent)

    def _size(self, node: fx.Node) -> int:
        """Elements; of what has one row for each choice of a token, on average."""
        held: Tensor = value(node)
        if _is_routed(node):
            return self._rows(node) * product(held.shape[1:])
        return product(held.shape)

    def _rows(self, node: fx.Node) -> int:
        return product(value(node).shape[:1]) * (self.choices if _is_routed(node) else 1)


def is_heavy(node: fx.Node) -> bool:
    """Whether the node is a product or attention, behind which a collective starts late."""
    return is_matrix_product(node) or is_attention(node) or node.target is ep.run_own_experts


def is_attention(node: fx.Node) -> bool:
    """Whether the node is a fused attention."""
    return op_name(node) in ("scaled_dot_product_attention", "flex_attention", "flash_attn_func")


def _is_routed(node: fx.Node) -> bool:
    """Whether the value's rows are choices of tokens; its metadata has one row a token."""
    return ROUTED_ROWS in node.meta
