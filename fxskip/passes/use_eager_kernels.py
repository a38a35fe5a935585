"""Run the grouped matrix product that the original runs.

While compiling, transformers takes its own loop over experts for dtypes that the compiler's kernel lacks. A
region runs eagerly, so it can ask again, with transformers' own question, when the graph runs.
"""

from __future__ import annotations

from torch import fx
from transformers.integrations import moe

from fxskip.ir import copy_graph, op_name

_CHOOSE = getattr(moe, "_grouped_mm", None)
"""transformers' choice between the native kernel and the loop; takes input, weight and offs."""


def use_eager_kernels(graph: fx.Graph) -> fx.Graph:
    """Return a copy of `graph` in which grouped matrix products are chosen when they run.

    Changes  the target of `transformers::grouped_mm_fallback` nodes
    Leaves   `graph` itself; all values
    """
    new = copy_graph(graph)
    for node in new.nodes:
        if _CHOOSE is not None and op_name(node) == "grouped_mm_fallback":
            node.target = _CHOOSE
    new.lint()
    return new
