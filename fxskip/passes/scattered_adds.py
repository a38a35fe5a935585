"""Take additions into some positions apart: `base.index_add(0, index, source)` as `base + scattered(0, index, source)`.

Models add the experts' outputs into the shared expert's. Taken apart, that is an addition like any other for the
passes between the two functions of this file; put together again, it is the original's operation.

    before   shared -> scatter_add(shared, 0, index, outputs) ->
    between  shared -> add_scattered(shared, scattered("scatter_add", 0, index, outputs)) ->
"""

from __future__ import annotations

import torch
from torch import fx

from fxskip.ir import (
    add_scattered,
    copy_graph,
    is_blank,
    is_scattered_add,
    op_name,
    scattered,
    storage,
    value,
    writers,
)


def separate_scattered_adds(graph: fx.Graph) -> fx.Graph:
    """Return a copy of `graph` in which additions into a value that is not blank are sums of it and what is added.

    Needs    `functionalise`: additions in place that could not be replaced are left as they are
    Leaves   `graph` itself; all values
    """
    new = copy_graph(graph)
    written = writers(new)
    for node in list(new.nodes):
        if not is_scattered_add(node) or op_name(node).endswith("_") or storage(node) in written:
            continue
        base, *rest = node.args
        if not isinstance(base, fx.Node) or is_blank(base):
            continue
        with new.inserting_before(node):
            part = new.call_function(scattered, (op_name(node), *rest), dict(node.kwargs))
        part.meta.update(node.meta)
        part.meta["example_value"] = torch.empty_like(value(node))
        node.op, node.target, node.args, node.kwargs = "call_function", add_scattered, (base, part), {}
    new.lint()
    return new


def join_scattered_adds(graph: fx.Graph) -> fx.Graph:
    """Return a copy of `graph` with the operations that `separate_scattered_adds` took apart.

    Changes  `add_scattered` nodes, and `scattered` ones that something else reads too: they add into zeros
    Leaves   `graph` itself
    """
    new = copy_graph(graph)
    sums = [n for n in new.nodes if n.target is add_scattered]
    owned = set(sums)
    bases: dict[fx.Node, fx.Node] = {}
    for node in sums:
        base, part = node.args
        assert isinstance(base, fx.Node) and isinstance(part, fx.Node)
        name, *rest = part.args
        # Into a sum that nobody else reads the next one is added in place, as a loop over experts does.
        in_place = base in owned and len(base.users) == 1
        node.op, node.target = "call_method", f"{name}_" if in_place else str(name)
        node.args, node.kwargs = (base, *rest), dict(part.kwargs)
        bases.setdefault(part, base)
    for part in [n for n in new.nodes if n.target is scattered]:
        if part.users:
            with new.inserting_before(part):
                zeros = new.call_function(torch.zeros_like, (bases[part],))
            name, *rest = part.args
            part.op, part.target, part.args = "call_method", f"{name}_", (zeros, *rest)
        else:
            new.erase_node(part)
    new.lint()
    return new
