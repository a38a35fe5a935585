"""Cut the work between two cut matrices over the ranks of the axis "tensor".

    before   x -> column linear -> heads, activation, ... -> row linear -> y
    after    x -> enter -> column linear -> this rank's heads ... -> row linear -> partial -> reduce -> y

In the captured graph all shapes are whole ones. From the column linears on, this pass follows in which dimension
values are cut, operation by operation, and runs each operation on stand-ins of this rank's shape: what fits is
known to run, and what a number in the graph says of the whole (heads, a size to expand to) becomes the rank's. What
meets a cut value enters: its gradient is added up over the ranks. If it has the cut dimension, its own part is taken.
A mean or a sum over the cut dimension is a partial value, and is reduced.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from fxskip.collectives.cut_linear import own_part, run_cut_linear
from fxskip.errors import PassError, first_line
from fxskip.ir import copy_graph, is_tensor, module_path, mutated_base, op_name, storage, value, writers
from fxskip.parallel import TENSOR
from fxskip.passes.cut_dims import (
    BLANKS,
    RESHAPES,
    Rule,
    dims_reduced,
    resized,
    rule_of,
    size_arguments_dim,
    whole_dim_after,
    whole_shape,
)
from fxskip.passes.partial_values import differentiable, enter, marked, partial, reduce


def shard_tensors(graph: fx.Graph, ranks: int) -> fx.Graph:
    """Return a copy of `graph` that computes one rank's part of what lies between cut matrices.

    Needs    cut linears, captured with whole shapes
    Changes  what reads values that are cut, up to the row linears; adds enter, partial and reduce
    Leaves   `graph` itself; values that all ranks have alike
    Raises   PassError where an operation does not run on a part as it is, or a cut value leaves the layer
    """
    blanks: dict[str, int] = {}
    while True:
        new = copy_graph(graph)
        try:
            _Cutter(new, ranks, blanks).run()
        except _WrittenLater as found:
            blanks[found.blank] = found.dim
            continue
        new.lint()
        return new


class _WrittenLater(Exception):
    """Memory that was made with a whole shape is written with cut values; the pass starts again, knowing that."""

    def __init__(self, blank: str, dim: int) -> None:
        self.blank, self.dim = blank, dim


class _Cutter:
    """Follows cut values through a graph and changes it on the way."""

    def __init__(self, graph: fx.Graph, ranks: int, blanks: dict[str, int]) -> None:
        self._graph, self._ranks, self._blanks = graph, ranks, blanks
        self._dims: dict[fx.Node, int | None] = {}
        """The dimension in which a value is cut; None for a tuple of cut values."""
        self._stand_ins: dict[fx.Node, Any] = {}
        self._parts: dict[tuple[fx.Node, int], fx.Node] = {}
        self._with_gradient = differentiable(graph)
        self._written = writers(graph)
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)

    def run(self) -> None:
        for node in list(self._graph.nodes):
            if node.name in self._blanks:
                self._make_blank(node, self._blanks[node.name])
            elif node.target is run_cut_linear:
                self._run_linear(node)
            elif any(a in self._dims for a in node.all_input_nodes) and not _is_number(node):
                self._follow(node)

    # --- linears ---------------------------------------------------------------------------------

    def _run_linear(self, node: fx.Node) -> None:
        _, cut, _, given = node.args
        assert isinstance(given, fx.Node)
        last = value(given).dim() - 1
        if cut == "column":
            if given in self._dims:
                raise self._refusal(node, f"takes whole inputs, and {given.name!r} is cut")
            node.replace_input_with(given, self._entered(given))
            self._cut(node, last, self._part(node, last))
            return
        if self._dims.get(given) != last:
            raise self._refusal(
                node, f"takes inputs that are cut, and {given.name!r} is not cut in its last dimension"
            )
        self._reduce(node)

    def _reduce(self, node: fx.Node) -> None:
        """Hand the sum over the ranks to the readers of a node's value."""
        readers = list(node.users)
        part = marked(self._graph, partial, node, TENSOR)
        whole = marked(self._graph, reduce, part, TENSOR)
        for reader in readers:
            reader.replace_input_with(node, whole)
        self._with_gradient.add(whole)

    # --- everything else -------------------------------------------------------------------------

    def _follow(self, node: fx.Node) -> None:
        if op_name(node) in BLANKS:
            return  # it takes a type and a device of its operand, and its size from its arguments
        rule = rule_of(node)
        if rule is None or node.op == "output":
            raise self._refusal(node, "is not known to run on a part of a value")
        if rule == "reduction" and self._reduces_cut(node):
            return
        self._require_apart(node, rule)
        if rule in ("aligned", "product"):
            self._own_operands(node)
        if rule == "shape":
            self._resize(node)
        made = self._try(node)
        if isinstance(made, Tensor):
            self._cut(node, self._dim_of(node, made), made)
        else:
            self._dims[node], self._stand_ins[node] = None, made

    def _reduces_cut(self, node: fx.Node) -> bool:
        """Turn a mean or sum over the cut dimension alone into a partial value; say whether it was one."""
        (operand,) = [a for a in node.all_input_nodes if a in self._dims]
        reduced = dims_reduced(node, value(operand).dim())
        if self._dims[operand] not in reduced:
            return False
        if op_name(node) not in ("mean", "sum"):
            raise self._refusal(node, "runs over the dimension that is cut")
        last = node
        if op_name(node) == "mean":
            with self._graph.inserting_after(node):
                last = self._graph.call_function(torch.div, (node, self._ranks))
            last.meta.update(node.meta)
            node.replace_all_uses_with(last, delete_user_cb=lambda user: user is not last)
        self._reduce(last)
        return True

    def _require_apart(self, node: fx.Node, rule: Rule) -> None:
        """Refuse an operation that joins or takes apart what is cut."""
        for operand in (a for a in node.all_input_nodes if a in self._dims):
            dim = self._dims[operand]
            if dim is None:
                continue
            rank = value(operand).dim()
            if dim in dims_reduced(node, rank) or (rule == "product" and dim >= rank - 2):
                raise self._refusal(node, f"works along dimension {dim} of {operand.name!r}, which is cut")

    def _own_operands(self, node: fx.Node) -> None:
        """Have the operands that all ranks have alike enter, and take the own part of those that must be cut."""
        out_dim = self._aligned_dim(node)
        for operand in [a for a in node.all_input_nodes if a not in self._dims and is_tensor(a)]:
            dim = out_dim - (self._rank_of_result(node) - value(operand).dim())
            if mutated_base(node) is operand:
                self._restart_with(operand, dim)
            is_cut_too = dim >= 0 and whole_shape(operand)[dim] != 1
            own = self._own(operand, dim) if is_cut_too else self._entered(operand)
            node.replace_input_with(operand, own)

    def _restart_with(self, base: fx.Node, dim: int) -> None:
        maker = next(n for n in self._graph.nodes if storage(n) == storage(base))
        if size_arguments_dim(maker) is None or value(maker).dim() != value(base).dim():
            raise self._refusal(
                maker, f"makes memory that a part of a value is written into through {base.name!r}"
            )
        raise _WrittenLater(maker.name, dim)

    def _aligned_dim(self, node: fx.Node) -> int:
        """The cut dimension of the result, dimensions counted from the last as broadcasting does."""
        cut = [a for a in node.all_input_nodes if self._dims.get(a) is not None]
        rank = self._rank_of_result(node)
        found = {(self._dims[a] or 0) + rank - int(value(a).dim()) for a in cut}
        if len(found) != 1:
            where = ", ".join(f"{a.name!r} in {self._dims[a]}" for a in cut)
            raise self._refusal(node, f"joins values that are cut in different dimensions: {where}")
        return found.pop()

    def _rank_of_result(self, node: fx.Node) -> int:
        return max(int(value(a).dim()) for a in node.all_input_nodes if is_tensor(a))

    def _own(self, node: fx.Node, dim: int) -> fx.Node:
        """This rank's part of a value that all have."""
        if (node, dim) not in self._parts:
            self._parts[node, dim] = self._take_part(node, dim)
        return self._parts[node, dim]

    def _take_part(self, node: fx.Node, dim: int) -> fx.Node:
        if whole_shape(node)[dim] % self._ranks:
            raise self._refusal(
                node, f"has {whole_shape(node)[dim]} in dimension {dim}, not a multiple of the ranks"
            )
        source = node.args[0] if op_name(node) == "expand" else None
        if (
            isinstance(source, fx.Node)
            and value(source).dim() == value(node).dim()
            and whole_shape(source)[dim] == 1
        ):
            with self._graph.inserting_after(
                node
            ):  # expand to fewer, rather than take a part of what was expanded
                new = self._graph.call_method("expand", node.args, node.kwargs)
            new.meta.update(node.meta)
            new.replace_input_with(source, self._entered(source))
            new.args = resized(new, dim, self._ranks)
        else:
            entered = self._entered(node)
            with self._graph.inserting_after(entered):
                new = self._graph.call_function(own_part, (entered, dim, TENSOR))
        new.meta.update(node.meta)
        self._cut(new, dim, self._part(node, dim))
        return new

    def _entered(self, node: fx.Node) -> fx.Node:
        if storage(node) in self._written:
            raise self._refusal(node, "meets a value that is cut, and its memory is written in place")
        return marked(self._graph, enter, node, TENSOR) if node in self._with_gradient else node

    def _make_blank(self, node: fx.Node, dim: int) -> None:
        node.args = resized(node, dim, self._ranks)
        self._cut(node, dim, self._try(node))

    def _resize(self, node: fx.Node) -> None:
        """Have a number that is the whole size of the cut dimension say the rank's."""
        if op_name(node) not in RESHAPES:
            return
        (operand,) = [a for a in node.all_input_nodes if a in self._dims]
        before = self._dims[operand]
        assert before is not None
        after = whole_dim_after(node, operand, before)
        if after is None or whole_shape(node)[after] % self._ranks:
            raise self._refusal(
                node,
                f"makes {list(whole_shape(node))} of {list(whole_shape(operand))}, whose dimension {before} "
                f"{self._ranks} processes share",
            )
        if size_arguments_dim(node) is not None:
            node.args = resized(node, after, self._ranks)

    # --- stand-ins -------------------------------------------------------------------------------

    def _try(self, node: fx.Node) -> Any:
        """What the operation gives for tensors of this rank's shapes, without values."""
        args, kwargs = fx.map_arg((node.args, node.kwargs), self._stand_in)
        try:
            with self._mode, torch.no_grad():
                if node.op == "call_method":
                    return getattr(args[0], str(node.target))(*args[1:], **kwargs)
                assert callable(node.target)
                return node.target(*args, **kwargs)
        except Exception as error:
            raise self._refusal(node, f"does not run on a part: {first_line(error)}") from error

    def _stand_in(self, node: fx.Node) -> Any:
        if node not in self._stand_ins:
            self._stand_ins[node] = self._part(node, None)
        return self._stand_ins[node]

    def _part(self, node: fx.Node, dim: int | None) -> Any:
        """A tensor without values like a node's, whole or cut in `dim`; sizes that vary as in this capture."""
        example = value(node)
        if not isinstance(example, Tensor):
            return pytree.tree_map(_hint, example)
        size = [s // self._ranks if d == dim else s for d, s in enumerate(whole_shape(node))]
        with self._mode:
            return torch.empty(size, dtype=example.dtype, device=example.device)

    def _dim_of(self, node: fx.Node, made: Tensor) -> int:
        """The dimension in which the result is smaller than the whole one."""
        whole = whole_shape(node)
        smaller = [d for d, (a, b) in enumerate(zip(whole, made.shape, strict=True)) if a != b]
        if len(smaller) != 1 or whole[smaller[0]] != made.shape[smaller[0]] * self._ranks:
            raise self._refusal(node, f"gives {list(made.shape)} where the whole is {list(whole)}")
        return smaller[0]

    def _cut(self, node: fx.Node, dim: int, stand_in: Any) -> None:
        self._dims[node], self._stand_ins[node] = dim, stand_in

    def _refusal(self, node: fx.Node, found: str) -> PassError:
        return PassError(
            "shard_tensors",
            f"{op_name(node) or node.op} ({node.name!r}) {found}",
            where=f"module {module_path(node) or 'the decoder layer itself'}",
            hint="leave parallel.tensor out for this architecture"
            + (
                "; call the model with use_cache=False and no attention outputs"
                if node.op == "output"
                else ""
            ),
        )


def _hint(number: Any) -> Any:
    return number.node.hint if isinstance(number, torch.SymInt | torch.SymFloat | torch.SymBool) else number


def _is_number(node: fx.Node) -> bool:
    held = value(node)
    return held is not None and not any(isinstance(part, Tensor) for part in pytree.tree_leaves(held))
