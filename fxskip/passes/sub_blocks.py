"""The sub-blocks of an analysed region, as the rules of a spec see them."""

from __future__ import annotations

from collections import Counter

from torch import fx

from fxskip.ir import block_nodes, info, is_matrix_product, module_path, op_name, writes
from fxskip.passes.split_contributions import addends, inseparable_reason
from fxskip.wiring import SubBlock

_OTHER_HEAVY = ("attention", "conv1d")


def sub_blocks(graph: fx.Graph, *, layer: int, layer_path: str) -> list[SubBlock]:
    """The sub-blocks in the order in which they write. Needs the annotations of `split_contributions`."""
    found = []
    for write in writes(graph):
        about = info(write.result)
        assert about is not None
        nodes = list(block_nodes(graph, write.number))
        names = addends(graph, write.number)
        reason = inseparable_reason(graph, write) if about.kind == "moe" else ""
        path = ".".join(part for part in (layer_path, _module(nodes)) if part)
        source = info(write.source)
        assert source is not None
        behind = write.number - 1 - source.write
        found.append(SubBlock(layer, about.kind, path, names, reason, behind))
    return found


def _module(nodes: list[fx.Node]) -> str:
    """The layer's child in which most of the block's matrix products run."""
    heavy = [module_path(n).partition(".")[0] for n in nodes if _is_heavy(n)]
    return Counter(heavy).most_common(1)[0][0] if heavy else ""


def _is_heavy(node: fx.Node) -> bool:
    return is_matrix_product(node) or any(part in op_name(node) for part in _OTHER_HEAVY)
