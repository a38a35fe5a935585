"""Add the gradients of a value in the order of the original program, whatever order its readers run in.

Autograd adds them as they come, and three floating-point numbers have several sums. A value with three readers or
more gets a *fan out*, which hands each reader a view of its own and adds what comes back as autograd does where the
readers run in program order: the last one's first. So every schedule of a region gives the same bits.
"""

from __future__ import annotations

import operator
from functools import cache
from typing import Any

import torch
from torch import Tensor, fx

from fxskip.ir import copy_graph, is_tensor, op_name, storage, stream_outputs, value, writers

_MAY_RETURN_ITS_INPUT = (
    "to", "type", "type_as", "float", "half", "bfloat16", "contiguous", "dropout", "reshape", "view", "expand",
    "expand_as", "flatten", "squeeze", "identity",
)  # fmt: skip
"""Operations whose readers may be, for autograd, readers of what they read."""


_MANY = 3


class _FanOut(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, readers: int) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        return tuple(tensor.view_as(tensor) for _ in range(readers))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        total: Tensor | None = None
        for gradient in reversed(gradients):
            if gradient is not None:
                total = gradient if total is None else total + gradient
        return total, None


def fan_out(tensor: Tensor, readers: int) -> tuple[Tensor, ...]:
    """`readers` views of a tensor, whose gradients are added in a fixed order, from the last to the first."""
    if not (tensor.requires_grad and torch.is_grad_enabled()):
        return (tensor,) * readers
    return _FanOut.apply(tensor, readers)  # type: ignore[no-any-return,no-untyped-call]


def order_gradients(graph: fx.Graph) -> fx.Graph:
    """Return a copy of `graph` whose gradients do not depend on the order in which its nodes run.

    Changes  what the readers of a value read, where there are three or more: views of it
    Leaves   `graph` itself; all values; values in memory that is written in place, whose readers keep their order
    """
    new = copy_graph(graph)
    written = writers(new)
    leaving = set(stream_outputs(new).values())

    @cache
    def gradients(node: fx.Node) -> int:
        """How many gradients may reach the value, in autograd's eyes; many, if it leaves the region."""
        if node in leaving:
            return _MANY
        return sum(
            max(1, gradients(user)) if _is_alias(user) or user in leaving else 1 for user in _readers(node)
        )

    for node in list(new.nodes):
        if _has_gradient(node) and storage(node) not in written and gradients(node) > 2:
            readers = _readers(node)
            if len(readers) > 1:
                _insert(new, node, readers)
    new.lint()
    return new


def _insert(graph: fx.Graph, node: fx.Node, readers: list[fx.Node]) -> None:
    behind = node if node.op != "placeholder" else [n for n in graph.nodes if n.op == "placeholder"][-1]
    with graph.inserting_after(behind):
        views = graph.call_function(fan_out, (node, len(readers)))
    at = views
    for position, reader in enumerate(readers):
        with graph.inserting_after(at):
            at = graph.call_function(operator.getitem, (views, position))
        at.meta["example_value"] = torch.empty_like(value(node))
        reader.replace_input_with(node, at)


def _readers(node: fx.Node) -> list[fx.Node]:
    """The nodes that may send a gradient back, in program order; the output is not one of them."""
    users = set(node.users)
    return [n for n in node.graph.nodes if n in users and n.op != "output" and not _is_plain_number(n)]


def _is_plain_number(node: fx.Node) -> bool:
    """Whether the node's value is known and is no tensor: a size."""
    found = value(node)
    return isinstance(found, int | float | bool | torch.Size | torch.SymInt | torch.dtype | torch.device)


def _is_alias(node: fx.Node) -> bool:
    return op_name(node) in _MAY_RETURN_ITS_INPUT


def _has_gradient(node: fx.Node) -> bool:
    return is_tensor(node) and value(node).is_floating_point() and node.op != "output"
