"""FLOPs, parameters and bytes of a sub-block, counted from the captured graph's shapes.

PyTorch's FlopCounterMode has no formula for grouped matrix products and counts causal attention in full,
so the few operations that matter are counted here. Nothing is estimated in time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fxskip.ir import block_nodes, info, is_tensor, op_name, reachable, value

CONTEXT = 4096
"""Tokens of context at which attention is counted, causal: a query sees half of them on average."""


@dataclass(frozen=True)
class Costs:
    """Costs of one sub-block as the model is implemented. A multiplication and an addition are 2 FLOPs."""

    parameters: int
    flops_per_token: float
    """Forward only, attention at CONTEXT tokens."""
    experts_per_token: int
    """Copies of a token that expert parallelism sends away and gets back; 0 without routing."""
    exchange_bytes_per_token: int
    """Bytes of the hidden states of those copies, one way."""


def block_costs(graph: fx.Graph, write: int, *, bytes_per_element: int) -> Costs:
    """The costs of the sub-block that makes write number `write`; needs the annotations of `classify`."""
    nodes = list(block_nodes(graph, write))
    batch, length, width = (_hint(s) for s in value(nodes[0].all_input_nodes[0]).shape[-3:])
    tokens = batch * length
    routing = [n for n in nodes if op_name(n) == "topk"] if _kind(nodes) == "moe" else []
    experts = _chosen(routing[-1]) if routing else 0
    return Costs(
        parameters=_parameters(nodes),
        flops_per_token=sum(_flops(n) for n in nodes) / tokens,
        experts_per_token=experts,
        exchange_bytes_per_token=experts * width * bytes_per_element,
    )


def _kind(nodes: list[fx.Node]) -> str:
    about = info(nodes[0])
    return about.kind if about is not None else ""


def _chosen(topk: fx.Node) -> int:
    values: Any = value(topk)
    return _hint(values[0].shape[-1])


def _parameters(nodes: list[fx.Node]) -> int:
    """Elements of the parameters that the block uses, also through casts and transposes that precede it."""
    inside = set(nodes)
    operands = {o for n in nodes for o in n.all_input_nodes if o not in inside and info(o) is None}
    edges = {n: set(n.all_input_nodes) for n in nodes[0].graph.nodes if info(n) is None}
    sources = reachable(operands, edges)
    return sum(
        _numel(n) for n in sources if n.op == "placeholder" and isinstance(value(n), torch.nn.Parameter)
    )


def _flops(node: fx.Node) -> float:
    name = op_name(node)
    tensors = [value(a) for a in node.args if isinstance(a, fx.Node) and is_tensor(a)]
    if name == "linear":
        return 2.0 * _numel(node) * _hint(tensors[0].shape[-1])
    if "grouped_mm" in name or name in ("bmm", "matmul", "mm", "__matmul__"):
        return 2.0 * _numel(node) * _hint(tensors[0].shape[-1])
    if name == "scaled_dot_product_attention":
        query, key, values = tensors[:3]
        scores = _product(query.shape[:-1]) * CONTEXT / 2
        return 2.0 * scores * (_hint(key.shape[-1]) + _hint(values.shape[-1]))
    return 0.0


def _numel(node: fx.Node) -> int:
    return _product(value(node).shape)


def _product(shape: Any) -> int:
    return math.prod(_hint(s) for s in shape)


def _hint(size: Any) -> int:
    """The number behind a size, which is symbolic where it depends on batch or length."""
    return int(size.node.hint) if isinstance(size, torch.SymInt) else int(size)
