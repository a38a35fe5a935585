"""Runs a marked graph on several ranks at once, in one process: an independent meaning of the marks.

Every node is computed for each rank in turn; `reduce` adds up over the ranks and stops where they disagree afterwards.
What a graph marks as partial without having computed parts is divided among the ranks in unequal shares.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from fxskip.collectives.cut_linear import own_part, run_cut_linear
from fxskip.passes.partial_values import enter, partial, reduce

RANKS = 2
SHARES = (0.25, 0.75)


def in_lockstep(
    graph: fx.Graph, inputs: Sequence[Any], module: nn.Module | None = None, *, parts_are_made: bool = False
) -> list[Any]:
    """What the graph returns on each rank; `module` holds the linears that are cut.

    parts_are_made   the graph computes parts itself; otherwise each rank's partial value is its share of the whole
    """
    values: list[dict[fx.Node, Any]] = [{} for _ in range(RANKS)]
    given = iter(inputs)
    for node in graph.nodes:
        held = next(given) if node.op == "placeholder" else None
        for rank, known in enumerate(values):
            if node.op == "placeholder":
                known[node] = held
                continue
            args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n, known=known: known[n])
            known[node] = _one(node, args, kwargs, rank, module, parts_are_made)
        if node.target is reduce:
            total = sum(known[node] for known in values)
            for known in values:
                known[node] = total
    output = next(n for n in graph.nodes if n.op == "output")
    return [known[output] for known in values]


def _one(
    node: fx.Node, args: Any, kwargs: Any, rank: int, module: nn.Module | None, parts_are_made: bool
) -> Any:
    if node.op == "output":
        return args[0]
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    if node.target in (enter, reduce):
        return args[0]
    if node.target is partial:
        return args[0] if parts_are_made else args[0] * SHARES[rank]
    if node.target is own_part:
        return args[0].chunk(RANKS, args[1])[rank]
    if node.target is run_cut_linear:
        return _cut_linear(module, rank, *args)
    if node.target in (torch.ops.fxskip.stream_in.default, torch.ops.fxskip.stream_out.default):
        return args[0]
    assert callable(node.target)
    return node.target(*args, **kwargs)


def _cut_linear(module: nn.Module | None, rank: int, path: str, cut: str, out: int, given: Tensor) -> Tensor:
    assert module is not None
    linear = module.get_submodule(path)
    assert isinstance(linear, nn.Linear)
    bias = linear.bias
    if cut == "column":
        return F.linear(
            given, linear.weight.chunk(RANKS, 0)[rank], None if bias is None else bias.chunk(RANKS)[rank]
        )
    return F.linear(given, linear.weight.chunk(RANKS, 1)[rank], bias if rank == 0 else None)
