"""Captured programs: an fx.GraphModule (torch.fx.symbolic_trace) or a torch.export program, as one region.

A program has no layers left that could be swapped, so its own graph is rewired: all sub-blocks lie in one region,
whose stream begins behind the embedding and ends before the final norm. Where, is found by dataflow.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, export, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.fx.passes.fake_tensor_prop import FakeTensorProp
from torch.utils import _pytree as pytree
from typing_extensions import TypeIs

from fxskip.errors import CaptureError, first_line
from fxskip.ir import (
    block_nodes,
    copy_graph,
    dataflow,
    is_add,
    is_matrix_product,
    is_tensor,
    module_path,
    reachable,
    value,
    writes,
)
from fxskip.linear import identity_paths

_EARLY = 64
"""Tensors among which the stream's beginning is looked for: embeddings come first in a program."""

_LAYER = re.compile(r"(?:.*?\.)?\d+(?=\.|$)")
"""The path of a layer inside a module's path: up to the first number."""


@dataclass(frozen=True)
class ProgramCapture:
    """A program's graph with shapes and stream markers."""

    module: fx.GraphModule
    graph: fx.Graph


def is_program(model: object) -> TypeIs[fx.GraphModule | export.ExportedProgram]:
    """Whether `model` is captured already."""
    return isinstance(model, fx.GraphModule | export.ExportedProgram)


def as_module(program: fx.GraphModule | export.ExportedProgram) -> fx.GraphModule:
    """The program as a module that can be called and trained."""
    return program if isinstance(program, fx.GraphModule) else program.module()


def capture_program(module: fx.GraphModule, inputs: tuple[Any, ...]) -> ProgramCapture:
    """Annotate a copy of the program's graph with shapes, for calls like `module(*inputs)`, and mark its stream.

    Nothing is computed: the inputs' shapes and dtypes alone matter. Raises CaptureError where the program cannot be
    called so, or shows no residual stream.
    """
    shaped = fx.GraphModule(module, copy_graph(module.graph))
    for node in shaped.graph.nodes:  # an export's sizes that depend on values belong to its own shapes
        node.meta.pop("unbacked_bindings", None)
    device = next((p.device for p in module.parameters()), torch.device("cpu"))
    # Parameters stay what they are and become fake one by one; positions of tokens have sizes that nobody knows.
    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())
    with mode:
        fake = pytree.tree_map_only(Tensor, lambda t: torch.empty_like(t, device=device), inputs)
    try:
        FakeTensorProp(shaped, mode).propagate_dont_convert_inputs(*module.graph.process_inputs(*fake))
    except (RuntimeError, NotImplementedError, TypeError, ValueError) as error:
        raise CaptureError(
            "capture_program",
            f"the program does not run with the example inputs: {first_line(error)}",
            where=type(module).__name__,
            hint="give the positional inputs that it is called with: example_inputs=(ids,)",
        ) from error
    graph = shaped.graph
    submodules = dict(module.named_modules())
    for node in graph.nodes:
        node.meta["example_value"] = node.meta.get("val")
        if node.op == "call_module":
            stack = dict(node.meta.get("nn_module_stack") or {})
            stack.setdefault(node.target, (node.target, type(submodules[node.target])))
            node.meta["nn_module_stack"] = stack
    _mark_stream(graph)
    return ProgramCapture(module, graph)


def _mark_stream(graph: fx.Graph) -> None:
    """Put the markers behind the stream's first value and behind its last write."""
    edges = dataflow(graph)
    floats = [n for n in graph.nodes if n.op != "get_attr" and is_tensor(n) and value(n).is_floating_point()]
    best: tuple[fx.Node, list[fx.Node]] | None = None
    for start in floats[:_EARLY]:
        varying = reachable([start], edges)
        adds = [n for n in identity_paths(start, varying) if is_add(n) and all(a in varying for a in n.args)]
        if best is None or len(adds) > len(best[1]):
            best = (start, adds)
    if best is None or not best[1]:
        raise CaptureError(
            "capture_program",
            "the program shows no residual stream: no value that others are added to again and again",
            hint="pass the model that it was captured from, or capture it without decompositions "
            "(torch.fx.symbolic_trace, torch.export.export)",
        )
    start, adds = best
    order = {n: i for i, n in enumerate(graph.nodes)}
    end = max(adds, key=lambda n: order[n])
    markers = torch.ops.fxskip
    for node, marker in ((start, markers.stream_in.default), (end, markers.stream_out.default)):
        with graph.inserting_after(node):
            new = graph.call_function(marker, (node, 0))
        for user in [u for u in node.users if u is not new]:
            user.replace_input_with(node, new)
        new.meta["example_value"] = value(node)
    graph.lint()


def block_paths(graph: fx.Graph) -> list[str]:
    """For each write the path of the module in which its sub-block computes most: `layers.3.mlp`."""
    paths = []
    for write in writes(graph):
        nodes = [n for n in block_nodes(graph, write.number) if is_matrix_product(n)]
        found = [p for p in map(module_path, nodes or block_nodes(graph, write.number)) if p]
        shortened = [_block_path(p) for p in found]
        paths.append(max(shortened, key=shortened.count) if shortened else "")
    return paths


def _block_path(path: str) -> str:
    """The path of a layer's child: `layers.3.mlp` of `layers.3.mlp.experts.gate`."""
    layer = _LAYER.match(path)
    depth = layer.group().count(".") + 2 if layer else 2
    return ".".join(path.split(".")[:depth])


def layer_numbers(paths: Sequence[str], kinds: Sequence[str]) -> list[int]:
    """The decoder layer of each sub-block: by the number in its module path, or else one for each mixer."""
    layers = [m.group() if (m := _LAYER.match(path)) else None for path in paths]
    if all(layers):
        order = list(dict.fromkeys(layers))
        if [order.index(layer) for layer in layers] == sorted(order.index(layer) for layer in layers):
            return [order.index(layer) for layer in layers]
    numbers, current = [], -1
    for kind in kinds:
        current += kind in ("attention", "mixer") or current < 0
        numbers.append(current)
    return numbers


def with_graph(module: fx.GraphModule, graph: fx.Graph, *, inplace: bool) -> fx.GraphModule:
    """`module` or a copy of it with another graph; parameters, class and the way of calling it stay."""
    student = module if inplace else copy.deepcopy(module)
    graph.set_codegen(copy.deepcopy(module.graph._codegen))
    for node in graph.nodes:
        node.meta.pop("example_value", None)
    student.graph = graph
    student.recompile()
    return student
