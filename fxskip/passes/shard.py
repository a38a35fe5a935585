"""Spread the routed experts over the ranks of a mesh axis: an exchange in the place of all experts.

    before       hidden, index, weights -> experts (a leaf) -> routed

    all_to_all   index -> pairs -> order, counts   each rank counts what it has for the experts of the others
                 hidden -> permute -> dispatch -> own experts -> combine -> unpermute -> routed
    all_reduce   index -> order                all ranks have the same tokens; each finds those of its own experts
                 hidden -> enter -> permute -> own experts -> unpermute -> partial -> reduce -> routed

The exchanges block here; `split_collectives` takes them apart.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from fxskip.collectives import expert_parallel as ep
from fxskip.collectives import replicated_tokens as rt
from fxskip.collectives.measuring import chosen_experts
from fxskip.collectives.routing import order_of, permute, sort_pairs, unpermute
from fxskip.errors import PassError
from fxskip.ir import NodeInfo, annotate, copy_graph, info, is_leaf, is_tensor, leaf_path, value
from fxskip.parallel import ExpertStack, RegionParallel
from fxskip.passes.partial_values import enter, marked, partial, reduce

ROUTED_ROWS = "fxskip_routed_rows"
"""Marks, in a node's metadata, a value that has a row for each choice of a token; its example has one a token."""


def exchange(rows: Tensor, routing: ep.Routing, direction: ep.Direction) -> Tensor:
    """Marks an exchange of rows that is not taken apart yet."""
    raise PassError(
        "exchange",
        "an exchange was not split into start and wait",
        hint="this is a defect in fxskip: please report it",
    )


def shard(graph: fx.Graph, parallel: RegionParallel) -> fx.Graph:
    """Return a copy of `graph` in which this rank runs its own routed experts only.

    Needs    the experts as leaves
    Changes  the leaf nodes of these modules
    Leaves   `graph` itself; everything else
    Raises   PassError where a module is not called with tokens, their experts and the weights of these
    """
    new = copy_graph(graph)
    stacks: dict[str, ExpertStack] = {stack.path: stack for stack in parallel.experts}
    spread = {"all_to_all": _exchange_rows, "all_reduce": _add_up}[parallel.exchange]
    for node in list(new.nodes):
        if is_leaf(node) and (stack := stacks.get(leaf_path(node))) is not None:
            with new.inserting_before(node):
                routed = spread(node, stack.experts, parallel.expert_axis)
            routed.meta.update(node.meta)
            node.replace_all_uses_with(routed)
            new.erase_node(node)
    new.lint()
    return new


def _exchange_rows(leaf: fx.Node, experts: int, axis: str) -> fx.Node:
    hidden, index, weights = routed_arguments(leaf)
    call = _Caller(leaf, hidden)
    index = call.choices(chosen_experts, index, experts)
    pairs = call(sort_pairs, index, experts)
    counts = call(ep.start_counts, pairs, hidden, leaf_path(leaf), axis)
    order = call(order_of, pairs)
    rows = call.rows(permute, hidden, order)
    routing = call(ep.wait_counts, counts, axis)
    arrived = call.rows(exchange, rows, routing, "dispatch")
    made = call.rows(ep.run_own_experts, leaf_path(leaf), arrived, routing)
    returned = call.rows(exchange, made, routing, "combine")
    return call(unpermute, returned, order, weights, value(hidden).dtype)


def _add_up(leaf: fx.Node, experts: int, axis: str) -> fx.Node:
    hidden, index, weights = routed_arguments(leaf)
    call = _Caller(leaf, hidden)
    index = call.choices(chosen_experts, index, experts)
    choices = call(rt.own_choices, index, experts, axis)
    order = call(order_of, choices)
    rows = call.rows(permute, marked(leaf.graph, enter, hidden, axis), order)
    made = call.rows(ep.run_own_experts, leaf_path(leaf), rows, choices)
    entered = marked(leaf.graph, enter, weights, axis)
    own = call.tokens(unpermute, made, order, entered, value(hidden).dtype)
    return call.tokens(reduce, call.tokens(partial, own, axis), axis)


class _Caller:
    """Adds operations that belong to the sub-block of a leaf."""

    def __init__(self, leaf: fx.Node, hidden: fx.Node) -> None:
        self._leaf, self._hidden = leaf, hidden

    def __call__(self, function: Any, *args: Any) -> fx.Node:
        node = self._leaf.graph.call_function(function, args)
        about = info(self._leaf)
        assert about is not None
        annotate(node, NodeInfo("compute", about.write, kind=about.kind))
        return node

    def tokens(self, function: Any, *args: Any) -> fx.Node:
        """One that gives a row a token, like the hidden states."""
        node = self(function, *args)
        node.meta["example_value"] = torch.empty_like(value(self._hidden))
        return node

    def choices(self, function: Any, index: fx.Node, *args: Any) -> fx.Node:
        """One that gives experts [T, K] like `index`, and may return it."""
        node = self(function, index, *args)
        node.meta["example_value"] = value(index)
        return node

    def rows(self, function: Any, *args: Any) -> fx.Node:
        """One that gives a row for each choice of a token. How many is known when it runs; costs take the average."""
        node = self.tokens(function, *args)
        node.meta[ROUTED_ROWS] = True
        return node


def routed_arguments(leaf: fx.Node) -> tuple[fx.Node, fx.Node, fx.Node]:
    """The tokens [T, D], their experts [T, K] and the weights [T, K] that a module of experts is called with."""
    args = [*leaf.args[2], *leaf.args[3].values()]  # type: ignore[misc,union-attr]
    if len(args) == 3 and all(is_tensor(a) and value(a).dim() == 2 for a in args):
        hidden, index, weights = args
        ranked = [value(a) for a in args]
        if (
            ranked[0].is_floating_point()
            and not ranked[1].is_floating_point()
            and ranked[1].dtype != torch.bool
            and ranked[2].is_floating_point()
        ):
            return hidden, index, weights
    raise PassError(
        "shard",
        f"the experts {leaf_path(leaf)} are called with {', '.join(_described(a) for a in args)}",
        where=f"module {leaf_path(leaf)}",
        hint="experts can be spread over ranks where their module takes tokens [T, D], the experts of each [T, K] and "
        "their weights [T, K]; leave parallel.expert out for this architecture",
    )


def _described(argument: object) -> str:
    if is_tensor(argument):
        found = value(argument)  # type: ignore[arg-type]
        return f"{str(found.dtype).removeprefix('torch.')}{list(found.shape)}"
    return type(argument).__name__
