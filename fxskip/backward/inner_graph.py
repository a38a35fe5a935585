"""The autograd graph of one step: cut off from the others at its inputs, differentiated from its outputs.

A cut is a node that hands a value on without the graph that made it. The gradient that reaches the node is captured
there (`torch.autograd.grad` stops at it), so a cut never runs and keeps no tensor alive.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any
from weakref import ReferenceType, ref

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, saved_tensors_hooks

from fxskip.errors import ScheduleError

_CUTS = torch.zeros((), requires_grad=True)
"""What cuts depend on, for autograd gives a node only to what depends on something. It never gets a gradient."""

PRODUCTS = torch.zeros((), requires_grad=True)
"""What products with a deferred weight gradient depend on. Differentiate by it too, and all of them run backward."""


class Cut(torch.autograd.Function):
    """Hands tensors on; the same memory and version counter, another graph."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, *values: Tensor) -> tuple[Tensor, ...]:
        return tuple(value.detach() for value in values)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise ScheduleError(
            "scheduled backward",
            "a gradient went through the border of a step instead of stopping there",
            hint="this is a defect in the scheduled backward: please report it with the program",
        )


def cut(values: Sequence[Tensor]) -> tuple[Sequence[Tensor], list[GradientEdge]]:
    """The values, each to be differentiated by, and the edges where its gradient arrives; none is kept alive.

    Floating-point or complex, of any shape.
    """
    if not values:
        return (), []
    found: tuple[Tensor, ...] = Cut.apply(_CUTS, *values)  # type: ignore[no-untyped-call]
    node = found[0].grad_fn
    assert node is not None
    # The Python object of a node does not keep it alive; a node of PyTorch's own that leads to it does.
    owner = found[0].view_as(found[0]).grad_fn
    return found, [GradientEdge(node, number, owner) for number in range(len(found))]


def gradients(
    roots: Sequence[GradientEdge],
    given: Sequence[Tensor],
    edges: Sequence[GradientEdge],
    *,
    keep: bool = False,
) -> tuple[Tensor | None, ...]:
    """The gradients that reach `edges`, if `given` are those of `roots`; .grad of no tensor changes.

    keep   the graph can be differentiated once more
    """
    found: tuple[Tensor | None, ...] = torch.autograd.grad(
        roots, edges, given, retain_graph=keep, allow_unused=True
    )
    return found


def nodes(roots: Sequence[GradientEdge], ends: Collection[Node]) -> Iterator[Node]:
    """All nodes below the roots, once each; what lies below `ends` is not looked at."""
    stack = [edge.node for edge in roots]
    seen: set[Node] = set()
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        yield node
        if node not in ends:
            stack += [below for below, _ in node.next_functions if below is not None]


Use = tuple[Node, int]
"""A node, and the number of the result of its backward that is one gradient of a value."""


def uses(roots: Sequence[GradientEdge], edge: GradientEdge, ends: Collection[Node]) -> list[Use]:
    """Where, below the roots, gradients of the value at `edge` come from."""
    target = (edge.node, edge.output_nr)
    return [
        (node, slot)
        for node in nodes(roots, ends)
        if node not in ends
        for slot, below in enumerate(node.next_functions)
        if below == target
    ]


def reached(roots: Sequence[GradientEdge], edges: Sequence[GradientEdge]) -> list[bool]:
    """For each of `edges` whether a gradient of the roots can get there."""
    ends = {edge.node for edge in edges}
    found = {(edge.node, edge.output_nr) for edge in roots}
    for node in nodes(roots, ends):
        if node not in ends:
            found.update((below, slot) for below, slot in node.next_functions if below is not None)
    return [(edge.node, edge.output_nr) in found for edge in edges]


def record(wanted: Mapping[str, Sequence[Use]]) -> tuple[dict[str, list[Tensor]], Callable[[], None]]:
    """From now on collect the gradient of each use, in the order autograd makes them; and what ends it."""
    parts: dict[str, list[Tensor]] = {name: [] for name in wanted}
    handles = []
    for name, found in wanted.items():
        slots: dict[Node, list[int]] = {}
        for node, slot in found:
            slots.setdefault(node, []).append(slot)
        handles += [node.register_hook(_recorder(parts[name], at)) for node, at in slots.items()]

    def remove() -> None:
        for handle in handles:
            handle.remove()

    return parts, remove


def _recorder(parts: list[Tensor], slots: Sequence[int]) -> Any:
    def record(inputs: Sequence[Tensor | None], outputs: Sequence[Tensor | None]) -> None:
        parts.extend(gradient for slot in slots if (gradient := inputs[slot]) is not None)

    return record


def stray(roots: Sequence[GradientEdge], ends: Collection[Node]) -> str | None:
    """What the graph below the roots depends on beside `ends`, in words; None where there is nothing.

    Such a tensor would get no gradient.
    """
    for node in nodes(roots, ends):
        if node in ends:
            continue
        if isinstance(node, Cut._backward_cls):
            return "a value of another step"
        leaf = getattr(node, "variable", None)
        if isinstance(leaf, Tensor) and leaf is not PRODUCTS:
            return f"a {type(leaf).__name__} of shape {list(leaf.shape)}"
    return None


class _Held:
    """What a node keeps in place of a tensor that it saved."""

    __slots__ = ("__weakref__", "tensor")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor: Tensor | None = tensor


class SavedTensors:
    """Everything that the nodes of all steps save, so that it can be handed over to hooks of the caller at once.

    Those of a checkpoint around the region recompute it once for each run of the autograd engine, and each step is
    a run of its own. So they get the tensors as saved by one node outside of the steps.
    """

    def __init__(self) -> None:
        self._held: list[ReferenceType[_Held]] = []

    def pack(self, tensor: Tensor) -> _Held:
        held = _Held(tensor.detach())
        self._held.append(ref(held))
        return held

    def unpack(self, held: _Held) -> Tensor:
        if held.tensor is None:
            raise ScheduleError(
                "scheduled backward",
                "a saved tensor is needed before the backward of its region has begun",
                hint="differentiate by what the region returns",
            )
        return held.tensor

    def collecting(self) -> saved_tensors_hooks:
        """While it is open, what nodes save comes here."""
        return saved_tensors_hooks(self.pack, self.unpack)

    def hand_over(self) -> list[Tensor]:
        """Give away what is still needed."""
        alive = [held for weak in self._held if (held := weak()) is not None and held.tensor is not None]
        self._held = [ref(held) for held in alive]
        tensors = [held.tensor for held in alive if held.tensor is not None]
        for held in alive:
            held.tensor = None
        return tensors

    def take_back(self, tensors: Sequence[Tensor]) -> None:
        """The tensors of `hand_over`, in the same order."""
        for weak, tensor in zip(self._held, tensors, strict=True):
            if (held := weak()) is not None:
                held.tensor = tensor


def hooks_of_the_caller() -> Any:
    """The pack and unpack hooks that are on for tensors saved now; None where there are none."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False)
