"""What every stage shares about a captured graph: node metadata, dataflow questions, and a printer.

A captured graph is the body of one decoder layer (a region). Its residual stream is written by
sub-blocks; writes are numbered 1..m in the region, and 0 is the stream as it enters.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Literal, cast

import torch
from torch import fx
from torch.utils import _pytree as pytree

from fxskip.errors import PassError
from fxskip.leaves import Contents, run_leaf

Role = Literal["input", "compute", "sum", "addend", "residual", "carry", "variant", "output"]

_KEY = "fxskip"


@dataclass(frozen=True, slots=True)
class NodeInfo:
    """What fxskip knows about a node. Its shape and dtype stay in `node.meta["example_value"]`.

    Frozen because copying a graph copies `meta` shallowly, so two graphs share this object. To change
    it, call `annotate` on the new graph's node.
    """

    role: Role
    """input/output: a stream marker; residual: the add that makes a write; carry: a linear operation on the
    stream between two writes; addend: one summand of a write; sum: an operation between a write's addends and
    its add; variant: an operation that makes a stream that lacks something; compute: the rest of a sub-block."""
    write: int
    """Number of the write whose sub-block the node belongs to; 0 for stream markers. For a carry, the number of
    the last write before it."""
    kind: str = ""
    """Kind of that sub-block (attention, moe, dense, mixer); empty until `classify` has run."""
    addend: str = ""
    """Name of the summand (routed, shared, or the block's kind); only where role is addend."""
    also: tuple[int, ...] = ()
    """Numbers of further writes whose sub-blocks use the node: a norm that two parallel blocks share."""


def info(node: fx.Node) -> NodeInfo | None:
    """The node's NodeInfo, or None where the node is on no path from the stream to the stream."""
    found: NodeInfo | None = node.meta.get(_KEY)
    return found


def annotate(node: fx.Node, new: NodeInfo) -> None:
    """Give a node its NodeInfo; the only place that writes our part of `node.meta`."""
    node.meta[_KEY] = new


def update(node: fx.Node, **changes: Any) -> None:
    """Replace some fields of the node's NodeInfo."""
    found = info(node)
    if found is None:
        raise PassError(
            "ir.update", f"node {node.name!r} has no NodeInfo", hint="run find_stream before this pass"
        )
    annotate(node, replace(found, **changes))


# --- markers -------------------------------------------------------------------------------------
# Two operators mark where streams enter and leave a region in the captured graph. They never run:
# `remove_markers` takes them out, and a region that escapes rewiring fails here instead of computing the
# original wiring unnoticed.


def refuse_to_run(which: str) -> PassError:
    """The error for a region whose original body would run instead of the rewired one."""
    return PassError(
        which,
        "a decoder layer ran without being captured, because TorchDynamo is off",
        hint="remove what turns it off (TORCHDYNAMO_DISABLE, TORCH_COMPILE_DISABLE, torch.compiler.disable around the "
        "call, torch.compiler.set_stance): fxskip captures each kind of layer at its first call",
    )


@torch.library.custom_op("fxskip::stream_in", mutates_args=())
def stream_in(stream: torch.Tensor, index: int) -> torch.Tensor:
    """Marks `stream` as the region's incoming stream number `index`; 0 is the full stream."""
    raise refuse_to_run("stream_in")


@torch.library.custom_op("fxskip::stream_out", mutates_args=())
def stream_out(value: torch.Tensor, index: int) -> torch.Tensor:
    """Marks the value that leaves as stream number `index`; only for 0 is `value` the real one."""
    raise refuse_to_run("stream_out")


@stream_in.register_fake
def _(stream: torch.Tensor, index: int) -> torch.Tensor:
    return torch.empty_like(stream)


@stream_out.register_fake
def _(value: torch.Tensor, index: int) -> torch.Tensor:
    return torch.empty_like(value)


def scattered(operation: str, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Marks what `operation` (index_add, scatter_add, index_put) adds to its first operand, as a tensor like that."""
    raise refuse_to_run("scattered")


def add_scattered(base: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    """Marks the sum of `base` and what `scattered` gives."""
    raise refuse_to_run("add_scattered")


def _marked(graph: fx.Graph, op: str) -> dict[int, fx.Node]:
    target = getattr(torch.ops.fxskip, op).default
    return {int(n.args[1]): n for n in graph.nodes if n.target is target}


def stream_inputs(graph: fx.Graph) -> dict[int, fx.Node]:
    """The markers of the incoming streams by their number."""
    return _marked(graph, "stream_in")


def stream_outputs(graph: fx.Graph) -> dict[int, fx.Node]:
    """The markers of the outgoing streams by their number."""
    return _marked(graph, "stream_out")


def remove_markers(graph: fx.Graph) -> fx.Graph:
    """Return a copy of `graph` without the stream markers: what runs."""
    new = copy_graph(graph)
    for marker in (*stream_inputs(new).values(), *stream_outputs(new).values()):
        marker.replace_all_uses_with(marker.all_input_nodes[0])
        new.erase_node(marker)
    new.lint()
    return new


def with_streams(graph: fx.Graph, n_inputs: int, n_outputs: int) -> fx.Graph:
    """Return a copy of a graph that was captured with one stream, with markers for more; to try a wiring out."""
    new = copy_graph(graph)
    first = stream_inputs(new)[0]
    output = next(n for n in new.nodes if n.op == "output")
    for index in range(1, n_inputs):
        with new.inserting_before(next(iter(new.nodes))):
            source = new.placeholder(f"stream_{index}")
        with new.inserting_before(first):
            marker = new.call_function(torch.ops.fxskip.stream_in.default, (source, index))
        for node in (source, marker):  # memory of its own, or a write to one stream would be one to all
            node.meta["example_value"] = torch.empty_like(value(first))
    others = []
    with new.inserting_before(output):
        for index in range(1, n_outputs):
            others.append(new.call_function(torch.ops.fxskip.stream_out.default, (first, index)))
            others[-1].meta["example_value"] = torch.empty_like(value(first))
    output.args = ((output.args[0], tuple(others)),)
    new.lint()
    return new


# --- questions about nodes -----------------------------------------------------------------------


def op_name(node: fx.Node) -> str:
    """The operation's bare name: `linear`, `topk`, `add`; empty for placeholders and outputs."""
    if node.op == "call_module":  # in programs that torch.fx traced: Linear is linear
        kind = list(node.meta["nn_module_stack"].values())[-1][1]
        return str(getattr(kind, "__name__", kind)).rpartition(".")[2].lower()
    if node.op not in ("call_function", "call_method"):
        return ""
    if isinstance(node.target, str):
        return node.target
    if isinstance(node.target, torch._ops.OpOverload):
        return node.target._opname
    return getattr(node.target, "__name__", str(node.target))


def value(node: fx.Node) -> Any:
    """The fake value recorded at capture; None where Dynamo recorded none."""
    return node.meta.get("example_value")


def is_tensor(node: object) -> bool:
    """Whether `node` is a graph node whose value is one tensor."""
    return isinstance(node, fx.Node) and isinstance(value(node), torch.Tensor)


_MATRIX_PRODUCTS = frozenset(
    {
        "linear",
        "run_cut_linear",
        "matmul",
        "__matmul__",
        "mm",
        "bmm",
        "einsum",
        "addmm",
        "baddbmm",
        "bilinear",
    }
)


def is_matrix_product(node: fx.Node) -> bool:
    """Whether the node multiplies matrices: grouped products of experts and modules that run as they are, too."""
    return op_name(node) in _MATRIX_PRODUCTS or "grouped_mm" in op_name(node) or is_leaf(node)


def is_leaf(node: fx.Node) -> bool:
    """Whether the node calls a module that runs as it is."""
    return node.target is run_leaf


def leaf_path(node: fx.Node) -> str:
    """Path, in the decoder layer, of the module that a leaf node calls."""
    return str(node.args[0])


def leaf_contents(node: fx.Node) -> Contents:
    """What the module of a leaf node adds."""
    return cast(Contents, node.args[1])


ADDS = frozenset(
    {
        torch.add,
        operator.add,
        operator.iadd,
        "add",
        "add_",
        "__add__",
        "__iadd__",
        torch.ops.aten.add.Tensor,
        torch.ops.aten.add_.Tensor,
        add_scattered,
    }
)


def is_add(node: fx.Node) -> bool:
    """Whether the node adds exactly two tensors without a scale on either."""
    return (
        node.op in ("call_function", "call_method")
        and node.target in ADDS
        and len(node.args) == 2
        and not node.kwargs
        and all(is_tensor(a) for a in node.args)
    )


def is_scattered_add(node: fx.Node) -> bool:
    """Whether the node adds tensors to some positions of its first operand, in place or not."""
    name = op_name(node).removesuffix("_")
    if name == "index_put":
        return node.kwargs.get("accumulate", node.args[3] if len(node.args) > 3 else False) is True
    return name in ("index_add", "scatter_add")


_BLANK = ("zeros", "empty", "full", "new_zeros", "new_empty", "new_full")


def is_blank(node: fx.Node) -> bool:
    """Whether the memory of the node's value held nothing but a constant when it was made."""
    memory = storage(node)
    maker = next(n for n in node.graph.nodes if storage(n) == memory)
    return op_name(maker).removesuffix("_like") in _BLANK


def mutated_base(node: fx.Node) -> fx.Node | None:
    """The node whose storage this one writes in place, or None."""
    name = op_name(node)
    if isinstance(out := node.kwargs.get("out"), fx.Node):
        return out
    named_so = name.endswith("_") and not name.endswith("__")
    in_place = named_so or name in _IN_PLACE_FUNCTIONS or node.kwargs.get("inplace") is True
    base = node.args[0] if in_place and node.args else None
    return base if isinstance(base, fx.Node) else None


_IN_PLACE_FUNCTIONS = frozenset(
    {"setitem", "iadd", "isub", "imul", "itruediv", "ifloordiv", "ipow", "iand", "ior"}
)


def storage(node: fx.Node) -> int | None:
    """Identity of the memory that the node's value lies in: equal for a tensor and its views; None for no tensor."""
    tensor = value(node)
    while isinstance(tensor, torch.Tensor) and torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)  # inside vmap, which masks are made with
    return tensor.untyped_storage()._cdata if isinstance(tensor, torch.Tensor) else None


def writers(graph: fx.Graph) -> dict[int, list[fx.Node]]:
    """The nodes that write in place, by the storage they write, in order."""
    found: dict[int, list[fx.Node]] = {}
    for node in graph.nodes:
        base = mutated_base(node)
        if base is not None and (memory := storage(base)) is not None:
            found.setdefault(memory, []).append(node)
    return found


def module_path(node: fx.Node) -> str:
    """Path of the module that called the operation, relative to the decoder layer; "" in the layer itself.

    In a captured program, which has no decoder layers, relative to the program.
    """
    stack = node.meta.get("nn_module_stack")
    if not stack:
        return ""
    path: str = list(stack.values())[-1][0]
    return path.partition("].")[2] if path.startswith("L[") else path


def _is_size(node: fx.Node) -> bool:
    """Whether the node's value is known and holds no tensor: a size, a dtype, a number."""
    return value(node) is not None and not any(
        isinstance(part, torch.Tensor) for part in pytree.tree_leaves(value(node))
    )


def dataflow(graph: fx.Graph) -> dict[fx.Node, set[fx.Node]]:
    """Successors of each node. A node that writes in place also feeds the later readers of that memory.

    A size feeds nothing: two values of the stream have the same.
    """
    order = {n: i for i, n in enumerate(graph.nodes)}
    after = {n: {u for u in n.users if not _is_size(u)} for n in graph.nodes}
    readers: dict[int, set[fx.Node]] = {}
    for node in graph.nodes:
        if (memory := storage(node)) is not None:
            readers.setdefault(memory, set()).update(node.users)
    for memory, nodes in writers(graph).items():
        for node in nodes:
            after[node] |= {u for u in readers[memory] if order[u] > order[node]}
    return after


def reachable(start: Iterable[fx.Node], edges: dict[fx.Node, set[fx.Node]]) -> set[fx.Node]:
    """All nodes that can be reached from `start`, `start` included."""
    seen = set(start)
    stack = list(seen)
    while stack:
        for nxt in edges.get(stack.pop(), ()):
            if nxt not in seen:
                seen.add(nxt)
                stack.append(nxt)
    return seen


def reverse(edges: dict[fx.Node, set[fx.Node]]) -> dict[fx.Node, set[fx.Node]]:
    """The same edges, backwards."""
    back: dict[fx.Node, set[fx.Node]] = {n: set() for n in edges}
    for node, nexts in edges.items():
        for nxt in nexts:
            back[nxt].add(node)
    return back


# --- the annotated stream ------------------------------------------------------------------------


@dataclass(frozen=True)
class Write:
    """One sub-block of an annotated graph: `result = anchor + contribution`."""

    number: int
    anchor: fx.Node
    """The stream that the contribution is added to: the write before, or the last carry after it."""
    contribution: fx.Node
    result: fx.Node
    source: fx.Node
    """The stream that the block reads; the anchor, or an earlier value where the code itself skips writes."""


STREAM_ROLES = frozenset({"input", "carry", "residual", "variant"})


def is_stream(node: fx.Node) -> bool:
    """Whether the node is a value of the stream or of one of its variants."""
    about = info(node)
    return about is not None and about.role in STREAM_ROLES


def stream_values(graph: fx.Graph) -> list[fx.Node]:
    """The full stream's values in order: its marker, then every carry and every write. Needs `find_stream`."""
    values = [stream_inputs(graph)[0]]
    for node in graph.nodes:
        about = info(node)
        if about is not None and about.role in ("carry", "residual"):
            values.append(node)
    return values


def writes(graph: fx.Graph) -> list[Write]:
    """The writes to the stream in order. Needs `find_stream`."""
    found: list[Write] = []
    values = stream_values(graph)
    for anchor, result in pairwise(values):
        about = info(result)
        assert about is not None
        if about.role == "residual":
            operands = [a for a in result.args if isinstance(a, fx.Node)]
            contribution = operands[1] if operands[0] is anchor else operands[0]
            sources = [n for n in values if _reads(graph, about.write, n)]
            if len(sources) != 1:
                raise PassError(
                    "ir.writes",
                    f"sub-block {about.write} reads {len(sources)} values of the stream, not one",
                    where=f"the block that ends in {result.name!r}",
                    hint="this is a defect in a pass: please report it with the model type",
                )
            found.append(Write(about.write, anchor, contribution, result, sources[0]))
    return found


def _reads(graph: fx.Graph, write: int, stream: fx.Node) -> bool:
    return any(stream in node.all_input_nodes for node in block_nodes(graph, write))


def block_nodes(graph: fx.Graph, write: int) -> Iterator[fx.Node]:
    """The nodes of one sub-block, its residual add excluded, what it shares with others included."""
    for node in graph.nodes:
        about = info(node)
        if about is None or about.role not in ("compute", "sum", "addend"):
            continue
        if about.write == write or write in about.also:
            yield node


def copy_graph(graph: fx.Graph) -> fx.Graph:
    """A copy with the same nodes in the same order and the same metadata objects."""
    new = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    result = new.graph_copy(graph, env)  # copies everything but the output node
    output = next(n for n in graph.nodes if n.op == "output")
    new.output(result).meta.update(output.meta)
    return new


def show(graph: fx.Graph) -> str:
    """One line a node: position, name, call, role, write and kind; the same text in every run."""
    lines = []
    for position, node in enumerate(graph.nodes):
        if node.op == "output":
            lines.append(f"{position:>3}  return {_text(node.args[0])}")
            continue
        call = "" if node.op == "placeholder" else f"{op_name(node)}({_arguments(node)})"
        about = info(node)
        tail = "" if about is None else _annotation(about)
        lines.append(f"{position:>3}  {node.name:<12} {call:<40} {tail}".rstrip())
    return "\n".join(lines)


def _annotation(about: NodeInfo) -> str:
    numbers = ",".join(map(str, (about.write, *about.also)))
    return f"{about.role} {numbers} {about.kind} {about.addend}".rstrip()


def _arguments(node: fx.Node) -> str:
    named = (f"{name}={_text(arg)}" for name, arg in node.kwargs.items())
    return ", ".join([*map(_text, node.args), *named])


def _text(arg: Any) -> str:
    if isinstance(arg, tuple | list):
        return "(" + ", ".join(_text(a) for a in arg) + ")"
    return str(arg)
