"""Compute the gradient of a product's weight later than that of its other operand.

A product in a step whose weight gradients are split off has a small autograd graph of its own, with the product's
own nodes: so both gradients are computed by the same kernels as unsplit, and have the same bits. The step's backward
computes the operand's and leaves the rest in a queue (as zero-bubble pipeline schedules do, Qi et al. 2023).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge
from torch.overrides import TorchFunctionMode

from fxskip.backward.inner_graph import PRODUCTS, cut, gradients, hooks_of_the_caller, nodes

WEIGHT_POSITIONS: dict[str, tuple[int, ...]] = {
    "linear": (1, 2),
    "addmm": (0, 2),
    "baddbmm": (0, 2),
} | dict.fromkeys(
    ("matmul", "__matmul__", "mm", "bmm", "grouped_mm", "_grouped_mm", "grouped_mm_fallback"), (1,)
)
"""Where products take weights: linear its bias too; stacked expert weights [experts, in, out] are those of bmm and
grouped_mm."""


def product(function: Callable[..., Tensor], weights: tuple[int, ...], *args: Any, **kwargs: Any) -> Tensor:
    """`function(*args, **kwargs)`, a tensor; the gradients of the arguments at `weights` may come later.

    A position after the last argument (of a bias that is not there) does no harm.
    They do where a backward order splits the step that calls this, and where the weights are parameters or views of
    them. Anywhere else this is a plain call.
    """
    queue = _queue.get()
    if queue is None or not torch.is_grad_enabled() or not queue.accepts(weights, args, kwargs):
        return function(*args, **kwargs)
    return queue.run(function, weights, args, kwargs)


class _Products(TorchFunctionMode):
    def __init__(self, parameters: Sequence[Tensor]) -> None:
        super().__init__()
        self._parameters = {get_gradient_edge(p).node for p in parameters if p.requires_grad}

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if getattr(function, "__name__", "").partition(".")[0] not in WEIGHT_POSITIONS:
            return function(*args, **(kwargs or {}))
        weights = tuple(i for i, value in enumerate(args) if self._is_weight(value))
        return product(function, weights, *args, **(kwargs or {}))

    def _is_weight(self, value: Any) -> bool:
        """Whether it is one of the parameters, or made of them alone; on either side of a product."""
        return isinstance(value, Tensor) and value.requires_grad and self._parameters.issuperset(_ends(value))


def products(parameters: Sequence[Tensor]) -> AbstractContextManager[object]:
    """While it is open, products that a module with these parameters calls by itself are those of `product`."""
    return nullcontext() if _queue.get() is None else _Products(parameters)


def _ends(value: Tensor) -> list[Node]:
    """What a tensor that requires a gradient depends on."""
    return [node for node in nodes([get_gradient_edge(value)], ()) if not node.next_functions]


class _Deferred:
    """One product: its own graph, and, once it has run backward, the gradient of its result."""

    __slots__ = ("gradient", "root", "values", "weights")

    def __init__(
        self,
        root: GradientEdge,
        values: Sequence[GradientEdge],
        weights: Sequence[tuple[GradientEdge, GradientEdge]],
    ) -> None:
        self.root = root
        self.values = values
        self.weights = weights
        """For each weight its edge in the product's graph, and in that of the step."""
        self.gradient: Tensor | None = None


class WeightQueue:
    """The products of one step in one call whose weight gradients are still to be computed."""

    def __init__(
        self, leaves: Collection[Node], shared: Collection[Node], pack: Callable[..., object] | None
    ) -> None:
        """
        leaves   what parameters are in the step's graph
        shared   those that other steps read as well, where autocast shares their casts
        pack     the hook for saved tensors that is on because the region put it there
        """
        self._leaves = frozenset(leaves)
        self._shared = frozenset(shared)
        self._pack = pack
        self._items: list[_Deferred] = []
        self.weights: set[Node] = set()
        """The parameters that products took."""

    @contextmanager
    def open(self) -> Iterator[None]:
        """While it is open, products come here."""
        token = _queue.set(self)
        try:
            yield
        finally:
            _queue.reset(token)

    def accepts(self, weights: tuple[int, ...], args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
        """Whether the product's weights lead to parameters alone, and nothing recomputes the product."""
        hooks = hooks_of_the_caller()
        if hooks is not None and hooks[0] != self._pack:
            return False  # a checkpoint in the step: it would recompute once for each of the two gradients
        if any(isinstance(value, Tensor) and value.requires_grad for value in kwargs.values()):
            return False
        wanted = [v for i, v in enumerate(args) if i in weights and isinstance(v, Tensor) and v.requires_grad]
        return bool(wanted) and all(self._is_parameter(weight) for weight in wanted)

    def _is_parameter(self, weight: Tensor) -> bool:
        ends = _ends(weight)
        if not self._leaves.issuperset(ends) or (weight.is_leaf and self._shared.intersection(ends)):
            return False
        self.weights.update(ends)
        return True

    def run(
        self,
        function: Callable[..., Tensor],
        weights: tuple[int, ...],
        args: Sequence[Any],
        kwargs: dict[str, Any],
    ) -> Tensor:
        """The product, connected to the step's graph by its operands and not by its weights."""
        wanted = [i for i, value in enumerate(args) if isinstance(value, Tensor) and value.requires_grad]
        given = list(args)
        tensors, edges = cut([args[i] for i in wanted])
        own = dict(zip(wanted, edges, strict=True))
        for i, tensor in zip(wanted, tensors, strict=True):
            given[i] = tensor
        result = function(*given, **kwargs)
        values = [i for i in wanted if i not in weights]
        item = _Deferred(
            get_gradient_edge(result),
            [own[i] for i in values],
            [(own[i], get_gradient_edge(args[i])) for i in wanted if i in weights],
        )
        found: Tensor = _Product.apply(  # type: ignore[no-untyped-call]
            PRODUCTS, item, self, result.detach(), *(args[i] for i in values)
        )
        return found

    def add(self, item: _Deferred) -> None:
        """The product has run backward."""
        self._items.append(item)

    def weight_gradients(self, leaves: Sequence[tuple[str, GradientEdge]]) -> dict[str, list[Tensor]]:
        """The gradients of the parameters, by name: those of their uses, last use first."""
        names = {edge.node: name for name, edge in leaves}
        found: dict[str, list[Tensor]] = {}
        views: list[tuple[GradientEdge, Tensor]] = []
        items, self._items = self._items[::-1], []
        while items:
            item = items.pop()
            assert item.gradient is not None
            got = gradients([item.root], [item.gradient], [own for own, _ in item.weights])
            for (_, edge), gradient in zip(item.weights, got, strict=True):
                if gradient is not None and edge.node in names:
                    found.setdefault(names[edge.node], []).append(gradient)
                elif gradient is not None:
                    views.append((edge, gradient))
        if views:
            sums = gradients([edge for edge, _ in views], [g for _, g in views], [edge for _, edge in leaves])
            for (name, _), total in zip(leaves, sums, strict=True):
                if total is not None:
                    found.setdefault(name, []).append(total)
        return found


class _Product(torch.autograd.Function):
    """The result of a product, as something that depends on its operands alone."""

    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, item: _Deferred, queue: WeightQueue, result: Tensor, *values: Tensor
    ) -> Tensor:
        ctx.item, ctx.queue = item, queue
        ctx.set_materialize_grads(False)
        return result.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> Any:
        item: _Deferred = ctx.item
        if gradient is None:
            return (None, None, None, None, *(None for _ in item.values))
        found = gradients([item.root], [gradient], item.values, keep=True) if item.values else ()
        item.gradient = gradient
        ctx.queue.add(item)
        return (None, None, None, None, *found)


_queue: ContextVar[WeightQueue | None] = ContextVar("fxskip_weight_queue", default=None)
