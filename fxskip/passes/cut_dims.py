"""What an operation does with the dimensions of its operands: whether it runs on a part of a value as on the whole."""

from __future__ import annotations

from math import prod
from typing import Any, Literal

import torch
from torch import fx

from fxskip.ir import is_tensor, op_name, value

Rule = Literal["aligned", "product", "reduction", "shape"]
"""aligned: each number of the result depends on those of the operands at its place, as broadcasting has it, or on a
row of them; product: of matrices, in the last two dimensions; reduction: along given dimensions; shape: the same
numbers in another shape."""

# fmt: off
_ALIGNED = frozenset((
    "abs", "add", "addcmul", "bfloat16", "bitwise_and", "bitwise_not", "ceil", "clamp", "clamp_max",
    "clamp_min", "clone", "contiguous", "copy", "copysign", "cos", "detach", "div", "double", "dropout",
    "empty_like", "eq", "erf", "exp", "expm1", "float", "floordiv", "full_like", "ge", "gelu", "gt", "half",
    "hardtanh", "iadd", "imul", "isub", "itruediv", "le", "leaky_relu", "log", "log1p", "logical_and",
    "logical_not", "lt", "masked_fill", "maximum", "minimum", "mul", "multiply", "ne", "neg", "nan_to_num",
    "ones_like", "pow", "reciprocal", "relu", "rsqrt", "rsub", "sigmoid", "sign", "silu", "sin", "softplus",
    "sqrt", "square", "sub", "subtract", "tanh", "to", "truediv", "type", "type_as", "where", "zeros_like",
    "zero", "fill", "cat", "concat", "concatenate",
))
_REDUCTIONS = frozenset((
    "mean", "sum", "softmax", "log_softmax", "amax", "amin", "logsumexp", "cumsum", "norm", "vector_norm",
    "normalize", "rms_norm", "layer_norm", "var", "std", "flip", "roll",
))
_SHAPES = frozenset((
    "view", "reshape", "flatten", "unflatten", "transpose", "permute", "swapaxes", "movedim", "unsqueeze",
    "squeeze", "expand", "view_as_complex", "view_as_real", "getitem", "split", "chunk", "unbind", "select",
    "narrow", "repeat_interleave",
))
# fmt: on
_PRODUCTS = frozenset({"matmul", "bmm", "scaled_dot_product_attention"})
RESHAPES = frozenset({"view", "reshape", "flatten", "unflatten", "expand"})
"""Operations that join dimensions or take them apart, or write sizes."""
BLANKS = frozenset({"new_empty", "new_zeros", "new_ones", "new_full"})
"""Operations that make a constant of a size that is written in them."""
_ALONG = frozenset(
    {"cat", "concat", "concatenate", "split", "chunk", "unbind", "select", "narrow", "repeat_interleave"}
)
_DIM_POSITION = {"unbind": 1, "select": 1, "narrow": 1, "cat": 1, "concat": 1, "concatenate": 1, "normalize": 2,
                 "norm": 2, "roll": 2, "vector_norm": 2, "split": 2, "chunk": 2, "repeat_interleave": 2}  # fmt: skip
_DIM_DEFAULT = {"cat": 0, "concat": 0, "concatenate": 0, "split": 0, "chunk": 0, "unbind": 0, "normalize": 1}


def rule_of(node: fx.Node) -> Rule | None:
    """How the operation may run on a part; None where that is not known."""
    name = op_name(node).strip("_") if op_name(node).startswith("__") else op_name(node).removesuffix("_")
    found: tuple[tuple[frozenset[str], Rule], ...] = (
        (_ALIGNED, "aligned"), (_PRODUCTS, "product"), (_REDUCTIONS, "reduction"), (_SHAPES, "shape"),
    )  # fmt: skip
    return next((rule for names, rule in found if name in names), None)


def dims_reduced(node: fx.Node, rank: int) -> frozenset[int]:
    """The dimensions of an operand of `rank` that the operation works along, so that none of them may be cut.

    For getitem, those that an index takes something out of.
    """
    name = op_name(node).strip("_") if op_name(node).startswith("__") else op_name(node)
    if name == "getitem":
        return _indexed(node.args[1], rank) if is_tensor(node.args[0]) else frozenset()
    if name in ("rms_norm", "layer_norm"):
        given = node.args[1] if len(node.args) > 1 else node.kwargs["normalized_shape"]
        return frozenset(range(rank - (len(given) if isinstance(given, tuple | list) else 1), rank))
    if name not in _REDUCTIONS | _ALONG:
        return frozenset()
    position = _DIM_POSITION.get(name, 1)
    missing = _DIM_DEFAULT.get(name)
    by_position: Any = node.args[position] if len(node.args) > position else missing
    given = node.kwargs.get("dim", node.kwargs.get("dims", by_position))
    if given is None:
        return frozenset(range(rank))
    dims = given if isinstance(given, tuple | list) else (given,)
    return frozenset(int(d) % rank for d in dims)


def _indexed(index: Any, rank: int) -> frozenset[int]:
    entries = list(index) if isinstance(index, tuple | list) else [index]
    taken = sum(e is not None and e is not Ellipsis for e in entries)
    if Ellipsis in [e for e in entries if not isinstance(e, fx.Node)]:
        at = next(i for i, e in enumerate(entries) if e is Ellipsis)
        entries[at : at + 1] = [slice(None)] * (rank - taken)
    found, dim = set(), 0
    for entry in entries:
        if entry is None:
            continue
        if entry != slice(None):
            found.add(dim)
        dim += 1
    return frozenset(found)


def whole_shape(node: fx.Node) -> tuple[int, ...]:
    """The shape of a node's value in the captured graph, sizes that vary as they were in this capture."""
    return tuple(s.node.hint if isinstance(s, torch.SymInt) else int(s) for s in value(node).shape)


# --- sizes that are written in a graph -----------------------------------------------------------

_FIRST_SIZE = {"view": 1, "reshape": 1, "expand": 1, "new_empty": 1, "new_zeros": 1, "new_ones": 1, "new_full": 1,
               "empty": 0, "zeros": 0, "ones": 0, "full": 0}  # fmt: skip


def size_arguments_dim(node: fx.Node) -> int | None:
    """The position of the first size, or of the tuple of sizes, among the arguments; None where there is none."""
    position = _FIRST_SIZE.get(op_name(node))
    sized = position is not None and len(node.args) > position
    return position if sized and not isinstance(node.args[position or 0], torch.dtype) else None


def whole_dim_after(node: fx.Node, operand: fx.Node, dim: int) -> int | None:
    """The dimension of the result of view, reshape or expand in which equal parts are those of the operand's `dim`.

    That is the one before which there is as much as before `dim`; None where there is none, because `dim` is joined
    with what lies outside it. Dimensions of size 1 are never meant: a cut one has as many as there are ranks.
    """
    before, after = whole_shape(operand), whole_shape(node)
    if op_name(node) == "expand":
        return dim + len(after) - len(before)
    outside = prod(before[:dim])
    fitting = [d for d in range(len(after)) if prod(after[:d]) == outside and after[d] != 1]
    return fitting[0] if fitting else None


def resized(node: fx.Node, dim: int, ranks: int) -> tuple[Any, ...]:
    """The node's arguments with one rank's size in the place of the whole size of `dim`; -1 stays."""
    first = size_arguments_dim(node)
    assert first is not None
    args = list(node.args)
    nested = isinstance(args[first], tuple | list)
    sizes: list[Any] = list(args[first]) if nested else args[first:]  # type: ignore[arg-type]
    if sizes[dim] != -1:
        sizes[dim] = whole_shape(node)[dim] // ranks
    return (*args[:first], tuple(sizes), *args[first + 1 :]) if nested else (*args[:first], *sizes)
