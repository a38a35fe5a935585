"""Take sums over ranks that are only read together in one: AR(a) + AR(b) = AR(a + b).

    before   r = x + AR(a)    y' = r + AR(s)    x' = r + (AR(t) + AR(s))    r itself is read by nobody
    after    m = AR(a + s)    y' = x + m        x' = y' + AR(t)

Which ones may be merged follows from who reads what: two sums over the same ranks that are terms of the same values,
of all that are read by anything but additions, can only be needed together. So no merged sum waits for a reader of
one of its parts, and merging cannot make a cycle. The order of additions changes, which changes the rounding.

In the backward pass the same holds for values that enter: one value that enters in several shapes enters once.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import fx
from torch.utils import _pytree as pytree

from fxskip.ir import (
    add_scattered,
    copy_graph,
    is_add,
    is_tensor,
    mutated_base,
    op_name,
    storage,
    value,
    writers,
)
from fxskip.linear import CASTS, PRODUCTS, linear_operand
from fxskip.passes.partial_values import enter, marked, partial, reduce


@dataclass(frozen=True)
class Merge:
    """Sums over ranks that were merged into one, or one that stays alone."""

    values: tuple[str, ...]
    """What is summed: names of nodes, in the order of the graph."""
    axis: str
    when: Literal["forward", "backward"]
    reason: str
    """Why, in a sentence."""

    @property
    def is_merged(self) -> bool:
        """Whether several became one."""
        return len(self.values) > 1


def merge_collectives(graph: fx.Graph) -> fx.Graph:
    """Return a copy of `graph` in which sums over the same ranks that are only read together are one.

    Needs    the marks of `shard` and `shard_tensors`
    Changes  the merged sums and the additions that they are terms of; where a value enters
    Leaves   `graph` itself; every value, up to rounding
    """
    if not any(merge.is_merged for merge in merges(graph)):
        return copy_graph(graph)
    new = _with_sums_moved(graph)
    _Sums(new).merge()
    for nodes in _entering_together(new).values():
        _enter_once(new, nodes)
    new.lint()
    return new


def merges(graph: fx.Graph) -> tuple[Merge, ...]:
    """What `merge_collectives` makes of each sum over ranks in `graph`, and why."""
    new = _with_sums_moved(graph)
    sums = _Sums(new)
    found = [sums.record(group) for group in sums.groups()]
    for (root, axis), nodes in _entering_together(new).items():
        names = tuple(str(n.args[0]) for n in nodes)
        if len(nodes) > 1:
            reason = f"{'both' if len(nodes) == 2 else 'all'} are views of {root.name}"
        else:
            reason = f"no other value that enters is a view of {root.name}"
        found.append(Merge(names, axis, "backward", reason))
    return tuple(found)


def _with_sums_moved(graph: fx.Graph) -> fx.Graph:
    """A copy in which sums are taken as late as they may be: behind views and scales, and behind gates that pay.

    A gate, a factor that all ranks have, has to enter then, which costs a sum in the backward pass. So a sum passes
    one only where it can be merged with another behind it.
    """
    trial = copy_graph(graph)
    _view_each_term(trial)
    for node in [n for n in trial.nodes if n.target is reduce]:
        _move_down(trial, node, through_gates=True)
    paying = {n.name for group in _Sums(trial).groups() if len(group) > 1 for n in map(_origin, group)}
    new = copy_graph(graph)
    _view_each_term(new)
    for node in [n for n in new.nodes if n.target is reduce]:
        _move_down(new, node, through_gates=node.args[0].name in paying)
    return new


# --- forward -------------------------------------------------------------------------------------


class _Sums:
    """The sums over ranks in a graph, and the additions that they are terms of."""

    def __init__(self, graph: fx.Graph) -> None:
        self._graph = graph
        self._reduces = [n for n in graph.nodes if n.target is reduce]
        self._opened: set[fx.Node] = set()
        written = writers(graph)
        for node in graph.nodes:
            is_plain = node.target is not add_scattered and mutated_base(node) is None
            has_sum = any(a in self._opened or a.target is reduce for a in node.all_input_nodes)
            if has_sum and is_plain and is_add(node) and storage(node) not in written and _one_type(node):
                self._opened.add(node)
        self._read = {
            n: self._terms(n)
            for n in graph.nodes
            if (n in self._opened or n.target is reduce) and any(u not in self._opened for u in n.users)
        }
        """The terms of each value that is read by anything but additions."""

    def _terms(self, node: fx.Node) -> list[fx.Node]:
        if node not in self._opened:
            return [node]
        return [term for operand in node.args for term in self._terms(operand)]  # type: ignore[arg-type]

    def _readings(self, term: fx.Node) -> list[fx.Node]:
        """The values that are read and have `term` as a term."""
        return [node for node, terms in self._read.items() if term in terms]

    def groups(self) -> list[list[fx.Node]]:
        """The sums over ranks, those together that are merged."""
        found: dict[object, list[fx.Node]] = {}
        for node in self._reduces:
            readings = self._readings(node)
            key: object = (node.args[1], tuple(readings), str(value(node).shape), value(node).dtype)
            if any(Counter(self._read[r])[node] > 1 for r in readings):
                key = node  # twice a term: the sum of both would be taken twice as well
            found.setdefault(key, []).append(node)
        return list(found.values())

    def record(self, group: list[fx.Node]) -> Merge:
        """What is said of a group."""
        axis = str(group[0].args[1])
        readings = ", ".join(n.name for n in self._readings(group[0])) or "nothing"
        reason = f"terms of {readings}, and of nothing else that is read"
        if len(group) == 1:
            reason = f"no other sum over the axis {axis!r} is a term of just {readings}"
        return Merge(tuple(_summed(n).name for n in group), axis, "forward", reason)

    def merge(self) -> None:
        """Merge each group, and add up again what its members are terms of."""
        merged: dict[fx.Node, fx.Node] = {}
        for group in (g for g in self.groups() if len(g) > 1):
            merged |= dict.fromkeys(group, self._sum_of(group))
        made: dict[tuple[fx.Node, ...], fx.Node] = {}
        for node, terms in self._read.items():
            if any(term in merged for term in terms):
                self._replace(node, list(dict.fromkeys(merged.get(t, t) for t in terms)), terms, merged, made)
        for node in reversed(list(self._graph.nodes)):
            if (node in self._opened or node in merged) and not node.users:
                self._graph.erase_node(node)

    def _sum_of(self, group: list[fx.Node]) -> fx.Node:
        """The sum over ranks of the sum of the members, behind the last of these."""
        order = {n: i for i, n in enumerate(self._graph.nodes)}
        parts = [n.args[0] for n in group]
        at = max(parts, key=lambda n: order[n])
        total = parts[0]
        for part in parts[1:]:
            with self._graph.inserting_after(at):  # type: ignore[arg-type]
                total = self._graph.call_function(operator.add, (total, part))
            total.meta.update(group[0].meta)
            at = total
        return marked(self._graph, reduce, total, str(group[0].args[1]))  # type: ignore[arg-type]

    def _replace(
        self,
        node: fx.Node,
        terms: list[fx.Node],
        before: list[fx.Node],
        merged: dict[fx.Node, fx.Node],
        made: dict[tuple[fx.Node, ...], fx.Node],
    ) -> None:
        """Have the readers of `node` read the sum of `terms`; what several sums begin with is added once."""
        repeated = [t for t, times in Counter(before).items() for _ in range(times - 1) if t not in merged]
        # What most sums have comes first, so that they share a beginning.
        terms = sorted([*terms, *repeated], key=lambda t: -self._times_read(t, merged))
        total = terms[0]
        for count in range(2, len(terms) + 1):
            key = tuple(terms[:count])
            if key not in made:
                with self._graph.inserting_before(node):
                    made[key] = self._graph.call_function(operator.add, (total, terms[count - 1]))
                made[key].meta.update(node.meta)
            total = made[key]
        node.replace_all_uses_with(total, delete_user_cb=lambda user: user not in self._opened)

    def _times_read(self, term: fx.Node, merged: dict[fx.Node, fx.Node]) -> int:
        members = [n for n, into in merged.items() if into is term] or [term]
        return len(self._readings(members[0]))


def _summed(node: fx.Node) -> fx.Node:
    """What a reduce sums, before it was marked as partial."""
    operand = _origin(node).args[0]
    assert isinstance(operand, fx.Node)
    return operand


def _origin(node: fx.Node) -> fx.Node:
    """The mark of the partial value that a reduce sums, behind views and factors."""
    while node.target is not partial:
        (node,) = [a for a in node.all_input_nodes if _is_partial(a)]
    return node


def _is_partial(node: fx.Node) -> bool:
    return node.target is partial or any(
        _is_partial(a) for a in node.all_input_nodes if a.target is not reduce
    )


def _one_type(node: fx.Node) -> bool:
    return len({value(n).dtype for n in (node, *node.all_input_nodes)}) == 1


def _view_each_term(graph: fx.Graph) -> None:
    """Turn a view or scale of an addition with a sum over ranks into an addition of these, which is open to merging.

    What is viewed alike for several streams is viewed once. A size is read off a term, not off the addition.
    """
    with_sum: set[fx.Node] = set()
    for node in list(graph.nodes):
        added = _viewed(node)
        if added is not None and added in with_sum and is_add(added):
            _add_views(graph, node, added, with_sum)
            continue
        is_term = node.target is reduce or is_add(node) or _viewed(node) is not None
        if node.target is reduce or (is_term and any(a in with_sum for a in node.all_input_nodes)):
            with_sum.add(node)
        elif _is_size(node) and (summed := node.all_input_nodes[:1]) and summed[0] in with_sum:
            node.replace_input_with(summed[0], _term_of_shape(summed[0]))
    views: dict[object, fx.Node] = {}
    for node in list(graph.nodes):
        if _viewed(node) is not None:
            same = views.setdefault((node.target, str(node.args), str(node.kwargs)), node)
            if same is not node:
                node.replace_all_uses_with(same)
                graph.erase_node(node)


def _is_size(node: fx.Node) -> bool:
    held = pytree.tree_leaves(value(node))
    return value(node) is not None and not any(isinstance(part, torch.Tensor) for part in held)


def _term_of_shape(node: fx.Node) -> fx.Node:
    """A term of a sum that has its shape, and is no addition or sum over ranks itself, where there is one."""
    if node.target is reduce:
        return node.args[0]  # type: ignore[return-value]
    alike = [
        a for a in node.all_input_nodes if is_tensor(a) and str(value(a).shape) == str(value(node).shape)
    ]
    if not is_add(node) or not alike:
        return node
    return _term_of_shape(min(alike, key=lambda a: a.target is reduce))


def _add_views(graph: fx.Graph, view: fx.Node, added: fx.Node, with_sum: set[fx.Node]) -> None:
    """Put the addition of the views of what is added in the place of the view of an addition."""
    views = []
    with graph.inserting_before(view):
        for term in added.args:
            views.append(graph.node_copy(view, lambda n: n))
            views[-1].replace_input_with(added, term)  # type: ignore[arg-type]
        new = graph.call_function(operator.add, tuple(views))
    new.meta.update(view.meta)
    with_sum.add(new)
    view.replace_all_uses_with(new)
    graph.erase_node(view)
    for one, term in zip(views, added.args, strict=True):
        if term in with_sum:
            with_sum.add(one)
            if is_add(term):  # type: ignore[arg-type]
                _add_views(graph, one, term, with_sum)  # type: ignore[arg-type]
    if not added.users:
        graph.erase_node(added)


def _move_down(graph: fx.Graph, node: fx.Node, *, through_gates: bool) -> None:
    """Take a sum behind the operations that it may pass, as far as nothing else reads it."""
    at = node
    axis = str(node.args[1])
    while len(at.users) == 1:
        user = next(iter(at.users))
        gate = _gate(user, at) if through_gates else None
        if gate is not None:
            user.replace_input_with(gate, marked(graph, enter, gate, axis))
        elif _viewed(user) is not at:
            break
        at = user
    if at is node:
        return
    node.replace_all_uses_with(node.args[0])  # type: ignore[arg-type]
    graph.erase_node(node)
    readers = list(at.users)
    whole = marked(graph, reduce, at, axis)
    for reader in readers:
        reader.replace_input_with(at, whole)


def _gate(node: fx.Node, factor: fx.Node) -> fx.Node | None:
    """The other factor of a product that has the type and shape of `factor`; None for any other operation."""
    if (
        op_name(node) not in PRODUCTS
        or len(node.args) != 2
        or node.kwargs
        or storage(node) in writers(node.graph)
    ):
        return None
    others = [a for a in node.args if a is not factor]
    same = str(value(node).shape) == str(value(factor).shape) and value(node).dtype == value(factor).dtype
    return others[0] if same and len(others) == 1 and is_tensor(others[0]) else None  # type: ignore[return-value]


def _viewed(node: fx.Node) -> fx.Node | None:
    """What the node views, or scales by a constant, in the same type; None where its memory is written in place."""
    source = linear_operand(node, node.all_input_nodes) if op_name(node) not in CASTS else None
    return source if source is None or storage(node) not in writers(node.graph) else None


# --- backward ------------------------------------------------------------------------------------


def _entering_together(graph: fx.Graph) -> dict[tuple[fx.Node, str], list[fx.Node]]:
    """The values that enter, by what they are views of."""
    found: dict[tuple[fx.Node, str], list[fx.Node]] = {}
    for node in graph.nodes:
        if node.target is enter:
            root = node.args[0]
            while (source := _viewed(root)) is not None:
                root = source
            found.setdefault((root, str(node.args[1])), []).append(node)
    return found


def _enter_once(graph: fx.Graph, nodes: Iterable[fx.Node]) -> None:
    """Have what several values are views of enter, and view that."""
    several = list(nodes)
    if len(several) < 2:
        return
    for node in several:
        views: list[fx.Node] = []
        root = node.args[0]
        while (source := _viewed(root)) is not None:  # type: ignore[arg-type]
            views.append(root)  # type: ignore[arg-type]
            root = source
        made = marked(graph, enter, root, str(node.args[1]))  # type: ignore[arg-type]
        if made is node:
            continue
        for view in reversed(views):
            with graph.inserting_before(node):
                copied = graph.node_copy(view, lambda n: n)
            copied.replace_input_with(_viewed(view), made)  # type: ignore[arg-type]
            made = copied
        node.replace_all_uses_with(made)
        graph.erase_node(node)
