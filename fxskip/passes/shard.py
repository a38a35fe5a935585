"""Spread the routed experts over the ranks of a mesh axis: an exchange in the place of all experts.

    before   hidden, index, weights -> experts (a leaf) -> routed
    after    index -> order, counts        each rank counts what it has for the experts of the others
             hidden -> permute -> dispatch -> own experts -> combine -> unpermute -> routed

The exchanges block here; `split_collectives` takes them apart.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, fx

from fxskip.collectives import expert_parallel as ep
from fxskip.errors import PassError
from fxskip.ir import NodeInfo, annotate, copy_graph, info, is_leaf, is_tensor, leaf_path, value
from fxskip.parallel import ExpertStack

ROUTED_ROWS = "fxskip_routed_rows"
"""Marks, in a node's metadata, a value that has a row for each choice of a token; its example has one a token."""

EXPERT = "expert"
"""Name of the mesh axis that experts are spread over."""


def exchange(rows: Tensor, routing: ep.Routing, direction: ep.Direction) -> Tensor:
    """Marks an exchange of rows that is not taken apart yet."""
    raise PassError(
        "exchange",
        "an exchange was not split into start and wait",
        hint="this is a defect in fxskip: please report it",
    )


def shard(graph: fx.Graph, experts: Iterable[ExpertStack]) -> fx.Graph:
    """Return a copy of `graph` in which this rank runs its own routed experts only.

    Needs    the modules `experts` as leaves
    Changes  the leaf nodes of these modules
    Leaves   `graph` itself; everything else
    Raises   PassError where a module is not called with tokens, their experts and the weights of these
    """
    new = copy_graph(graph)
    numbers = {stack.path: stack.experts for stack in experts}
    for node in list(new.nodes):
        if is_leaf(node) and leaf_path(node) in numbers:
            _spread(new, node, numbers[leaf_path(node)])
    new.lint()
    return new


def _spread(graph: fx.Graph, leaf: fx.Node, experts: int) -> None:
    hidden, index, weights = routed_arguments(leaf)

    def call(function: Any, *args: Any, rows_like: fx.Node | None = None) -> fx.Node:
        node = graph.call_function(function, args)
        about = info(leaf)
        assert about is not None
        annotate(node, NodeInfo("compute", about.write, kind=about.kind))
        if (
            rows_like is not None
        ):  # how many rows is known when it runs; costs count one for each choice of a token
            node.meta |= {"example_value": torch.empty_like(value(rows_like)), ROUTED_ROWS: True}
        return node

    with graph.inserting_before(leaf):
        counts = call(ep.start_counts, index, experts, EXPERT)
        order = call(ep.sort_by_expert, index)
        rows = call(ep.permute, hidden, order, index, rows_like=hidden)
        routing = call(ep.wait_counts, counts, EXPERT)
        arrived = call(exchange, rows, routing, "dispatch", rows_like=hidden)
        made = call(ep.run_own_experts, leaf_path(leaf), arrived, routing, rows_like=hidden)
        returned = call(exchange, made, routing, "combine", rows_like=hidden)
        routed = call(ep.unpermute, returned, order, weights, value(hidden).dtype)
    routed.meta.update(leaf.meta)
    leaf.replace_all_uses_with(routed)
    graph.erase_node(leaf)


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
