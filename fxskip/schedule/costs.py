"""FLOPs, parameters and bytes of a sub-block, counted from the captured graph's shapes.

PyTorch's FlopCounterMode has no formula for grouped matrix products and counts causal attention in full,
so the few operations that matter are counted here. Nothing is estimated in time.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fxskip.ir import (
    block_nodes,
    info,
    is_leaf,
    is_matrix_product,
    is_tensor,
    leaf_path,
    op_name,
    reachable,
    value,
    writes,
)
from fxskip.passes.classify import routing_nodes

CONTEXT = 4096
"""Tokens of context at which attention is counted, causal: a query sees half of them on average."""


@dataclass(frozen=True)
class Costs:
    """Costs of one sub-block as the model is implemented. A multiplication and an addition are 2 FLOPs."""

    parameters: int
    flops_per_token: float | None
    """Forward only, attention at CONTEXT tokens whatever its window. None where it cannot be known: a leaf, or
    experts whose numbers of tokens depend on values."""
    experts_per_token: int | None
    """Copies of a token that expert parallelism sends away and gets back; 0 without routing, None inside a leaf."""
    exchange_bytes_per_token: int | None
    """Bytes of the hidden states of those copies, one way; None where their number is."""


def block_costs(
    graph: fx.Graph, write: int, *, bytes_per_element: int, leaf_parameters: Mapping[str, int]
) -> Costs:
    """The costs of the sub-block that makes write number `write`; needs the annotations of `classify`.

    `leaf_parameters` are the numbers of parameters of the layer's leaves, by their paths.
    """
    anchor = writes(graph)[write - 1].anchor
    batch, length, width = (_hint(s) for s in value(anchor).shape[-3:])
    nodes, tokens = list(block_nodes(graph, write)), batch * length
    experts = _experts_per_token(nodes, tokens)
    return Costs(
        parameters=_parameters(nodes) + sum(leaf_parameters[leaf_path(n)] for n in nodes if is_leaf(n)),
        flops_per_token=_flops_per_token(nodes, batch, length),
        experts_per_token=experts,
        exchange_bytes_per_token=None if experts is None else experts * width * bytes_per_element,
    )


def _flops_per_token(nodes: list[fx.Node], batch: int, length: int) -> float | None:
    if any(is_leaf(n) for n in nodes):
        return None
    try:
        return sum(_flops(n, length) for n in nodes) / (batch * length)
    except _DependsOnValues:
        return None


def _experts_per_token(nodes: list[fx.Node], tokens: int) -> int | None:
    """Rows that the experts' products have for each token, or what the last top-k keeps where all experts run."""
    routing = [n for n in routing_nodes(nodes) if not is_leaf(n)]
    if not routing and any(is_leaf(n) for n in nodes):
        return None
    if not routing:
        return 0
    if grouped := [n for n in routing if "grouped_mm" in op_name(n)]:
        with suppress(_DependsOnValues):
            return _hint(value(grouped[0]).shape[0]) // tokens
    chosen: Any = next((value(n) for n in reversed(routing) if op_name(n) == "topk"), None)
    return None if chosen is None else _hint(chosen[0].shape[-1])


def _parameters(nodes: list[fx.Node]) -> int:
    """Elements of the parameters that the block uses, also through casts and transposes that precede it."""
    inside = set(nodes)
    operands = {o for n in nodes for o in n.all_input_nodes if o not in inside and info(o) is None}
    edges = {n: set(n.all_input_nodes) for n in nodes[0].graph.nodes if info(n) is None}
    sources = reachable(operands, edges)
    return sum(
        _numel(n) for n in sources if n.op == "placeholder" and isinstance(value(n), torch.nn.Parameter)
    )


def _flops(node: fx.Node, length: int) -> float:
    """2 FLOPs for each multiplication of a matrix product; attention at CONTEXT tokens instead of `length`."""
    tensors = [value(a) for a in node.args if isinstance(a, fx.Node) and is_tensor(a)]
    if op_name(node) == "scaled_dot_product_attention":
        query, key, values = tensors[:3]
        scores = _product(query.shape[:-1]) * CONTEXT / 2
        return 2.0 * scores * (_hint(key.shape[-1]) + _hint(values.shape[-1]))
    if not is_matrix_product(node) or (len(tensors) < 2 and node.op != "call_module"):
        return 0.0
    left = tensors[1] if op_name(node) in ("addmm", "baddbmm") else tensors[0]
    flops = 2.0 * _numel(node) * _hint(left.shape[-1])
    # Attention that is written out multiplies two tensors [batch, heads, ...]; a projection has its matrix in two.
    is_written_out = len(tensors) > 1 and all(t.dim() == 4 for t in tensors[:2])
    return flops * CONTEXT / 2 / length if is_written_out else flops


def _numel(node: fx.Node) -> int:
    return _product(value(node).shape)


def _product(shape: Any) -> int:
    return math.prod(_hint(s) for s in shape)


class _DependsOnValues(Exception):
    """A size is known only when the graph runs."""


def _hint(size: Any) -> int:
    """The number behind a size, which is symbolic where it depends on batch or length."""
    if not isinstance(size, torch.SymInt):
        return int(size)
    if size.node.hint is None:
        raise _DependsOnValues
    return int(size.node.hint)
