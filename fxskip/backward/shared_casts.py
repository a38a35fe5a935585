"""Parameters that autocast casts once for several steps.

Autocast keeps the cast of a parameter, so the steps that use it have one node in common. Plain autograd adds up the
gradients of all these uses in the low precision, and casts the sum once. So must we: the cast is one more value.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from fxskip.backward.inner_graph import Use, gradients, uses
from fxskip.backward.ordered_sum import OrderedSum

Edges = list[tuple[str, GradientEdge]]
"""Values by name, with the edges at which their gradients arrive."""

_CAST = "ToCopyBackward0"


def shares_casts(tensor: Tensor) -> bool:
    """Whether autocast would keep a cast of this parameter."""
    return torch.is_autocast_enabled(tensor.device.type) and torch.is_autocast_cache_enabled()


class SharedCasts:
    """The casts of one call, by the name of their gradient's sum."""

    def __init__(self, sums: dict[str, OrderedSum], leaves: dict[str, GradientEdge]) -> None:
        """`leaves` are the parameters that several steps read while autocast keeps casts."""
        self._sums = sums
        self._leaves = leaves
        self._names: dict[Node, str] = {}
        self._edges: dict[str, tuple[str, GradientEdge]] = {}
        """For each cast the parameter, and the edge above the node."""
        self._direct: set[tuple[str, int]] = set()
        """Parameters and steps that use them in their own precision as well."""
        self._waiting: dict[tuple[str, int], tuple[set[str], list[Tensor]]] = {}

    def __bool__(self) -> bool:
        return bool(self._leaves)

    def __contains__(self, leaf: str) -> bool:
        return leaf in self._leaves

    def replace(self, number: int, roots: Sequence[GradientEdge], cuts: Edges) -> Edges:
        """The cuts of step `number`, with the casts in place of the parameters."""
        ends = {edge.node for _, edge in cuts}
        replaced: Edges = []
        for key, edge in cuts:
            found = uses(roots, edge, ends) if key in self._leaves else []
            casts = [node for node, _ in found if node.name() == _CAST]
            if len(casts) < len(found) or not casts:
                replaced.append((key, edge))
                if casts:
                    self._direct.add((key, number))
            replaced += [
                self._cast(number, key, node) for node in casts
            ]  # last: they may complete the parameter
        return replaced

    def _cast(self, number: int, leaf: str, node: Node) -> tuple[str, GradientEdge]:
        name = self._names.setdefault(node, f"{leaf}, cast {len(self._names)}")
        _, edge = self._edges.setdefault(name, (leaf, GradientEdge(node, 0)))
        self._sums.setdefault(name, OrderedSum(())).also_read_by((number,))
        return name, edge

    def leaf_of(self, name: str) -> str | None:
        """The parameter that `name` is a cast of."""
        return self._edges[name][0] if name in self._edges else None

    def begin_backward(self) -> None:
        """All steps have run: a cast stands where its parameter was first used, for autograd made its node there."""
        for name, (leaf, _) in self._edges.items():
            self._waiting.setdefault((leaf, min(self._sums[name].readers)), (set(), []))[0].add(name)
        users = {(leaf, step) for name, (leaf, _) in self._edges.items() for step in self._sums[name].readers}
        for leaf, step in users - self._direct - self._waiting.keys():
            self._sums[leaf].put(step, ())

    def has_direct_uses(self, number: int, key: str) -> bool:
        """Whether step `number` uses a parameter both as it is and cast."""
        return (key, number) in self._direct

    def without_casts(self, found: Iterable[Use]) -> list[Use]:
        """The uses of a parameter as it is."""
        return [(node, slot) for node, slot in found if node not in self._names]

    def put(self, key: str, number: int, parts: Sequence[Tensor]) -> None:
        """Add a step's gradients to the sum of value `key`; a cast that is complete is added to its parameter's."""
        if (key, number) in self._waiting:
            self._waiting[key, number][1].extend(parts)
            return
        self._sums[key].put(number, parts)
        if key in self._edges and self._sums[key].is_complete:
            self._finish(key, min(self._sums[key].readers))

    def _finish(self, name: str, first: int) -> None:
        leaf, edge = self._edges[name]
        total = self._sums.pop(name).result()
        names, parts = self._waiting[leaf, first]
        if total is not None:
            [gradient] = gradients([edge], [total], [self._leaves[leaf]])
            parts += [] if gradient is None else [gradient]
        names.remove(name)
        if not names:
            del self._waiting[leaf, first]
            self._sums[leaf].put(first, parts)
