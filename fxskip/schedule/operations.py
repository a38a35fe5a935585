"""What one operation of a sub-block costs for a token: FLOPs, and elements that it reads and writes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass

from torch import fx

from fxskip.ir import info, is_leaf, is_matrix_product, is_tensor, op_name, value
from fxskip.schedule.parts import (
    Held,
    Routing,
    gathers_weights,
    is_activation,
    multiplies_activations,
    weight,
)
from fxskip.schedule.sizes import DependsOnValues, hint, product


@dataclass(frozen=True)
class Setting:
    """What an operation is counted for."""

    tokens: int
    """Of the capture."""
    length: int
    """Of a sequence of the capture."""
    keys: float | None
    """That a query meets on average in what is planned; None where it is not known."""
    routing: Routing
    held: Held


@dataclass(frozen=True)
class Work:
    """One operation, for a token. None: not known."""

    flops: float | None
    moved: float | None
    """Elements of activations, read and written."""
    kernels: float = 1
    """Its part of a kernel: products of a loop over experts are one kernel, taken together."""


UNKNOWN = Work(None, None)


def work_of(node: fx.Node, part: str, setting: Setting) -> Work | None:
    """The work of one operation in that part of a sub-block; None where it is none that counts."""
    try:
        return _of_leaf(node, part, setting) if is_leaf(node) else _counted(node, part, setting)
    except DependsOnValues:
        return UNKNOWN


def _counted(node: fx.Node, part: str, setting: Setting) -> Work | None:
    name = op_name(node)
    if _is_fused_attention(node):
        return _fused_attention(node, setting)
    if "conv1d" in name:
        return _convolution(node, setting)
    if not is_matrix_product(node):
        return None
    if part == "moe":
        return UNKNOWN
    if part == "routed":
        return _of_experts(node, setting)
    if multiplies_activations(node, setting.held):
        return _of_activations(node, setting) if part == "attention" else UNKNOWN
    return Work(_flops(node, setting.held) / setting.tokens, _moved(node) / setting.tokens)


def _is_fused_attention(node: fx.Node) -> bool:
    return "attention" in op_name(node) or "flash_attn" in op_name(node)


def heads_of(nodes: list[fx.Node], length: int, held: Held) -> int:
    """Heads of an attention: of queries [batch, heads, length, width], or of scores [batch, heads, length, length].

    0 where the graph does not show them like that.
    """
    queries = [value(_operands(n)[0]) for n in nodes if _is_fused_attention(n) and _operands(n)]
    scores = [value(n) for n in nodes if multiplies_activations(n, held) and is_tensor(n)]
    with suppress(DependsOnValues):
        found = [t for t in queries if t.dim() == 4 and hint(t.shape[2]) == length]
        found += [t for t in scores if t.dim() == 4 and [hint(s) for s in t.shape[2:]] == [length, length]]
        return hint(found[0].shape[1]) if found else 0
    return 0


def _fused_attention(node: fx.Node, setting: Setting) -> Work | None:
    operands = _operands(node)
    if len(operands) < 3 or setting.keys is None:
        return UNKNOWN
    query, key, values = map(value, operands[:3])
    rows = product(query.shape[:-1]) / setting.tokens  # heads
    width = hint(values.shape[-1])
    moved = sum(map(_stored, operands[:3])) / setting.tokens + rows * width
    return Work(2 * rows * setting.keys * (hint(key.shape[-1]) + width), moved)


def _convolution(node: fx.Node, setting: Setting) -> Work:
    kernels = [value(o) for o in _operands(node)[1:2]] or list(setting.held(node).values())
    moved = _numel(_operands(node)[0]) + _numel(node)
    return Work(2.0 * max(product(k.shape) for k in kernels), moved / setting.tokens)


def _of_experts(node: fx.Node, setting: Setting) -> Work | None:
    """A product of routed experts counts for the tokens that are sent to them, however it is computed."""
    matrix = weight(node, setting.held)
    experts, chosen = setting.routing.experts, setting.routing.chosen
    if matrix is None:  # hands tokens out or brings them back, if no weights are hidden in it
        return UNKNOWN if gathers_weights(node, setting.held) else None
    if not experts or not chosen:
        return UNKNOWN
    inner, outer = map(hint, matrix.shape[-2:])
    number = product(matrix.shape[:-2])
    rows = chosen * number / experts
    return Work(2.0 * rows * inner * outer, rows * (inner + outer), number / experts)


def _of_leaf(node: fx.Node, part: str, setting: Setting) -> Work:
    """A module that runs as it is and gets tokens with their experts: what its stacks of matrices do."""
    experts, chosen = setting.routing.experts, setting.routing.chosen
    stacks = [p for p in setting.held(node).values() if p.dim() == 3]
    if part != "routed" or not experts or not chosen or not stacks:
        return UNKNOWN
    if any(hint(p.shape[0]) != experts for p in stacks):
        return UNKNOWN
    sizes = [tuple(map(hint, p.shape[1:])) for p in stacks]
    flops = sum(2.0 * chosen * inner * outer for inner, outer in sizes)
    return Work(flops, sum(float(chosen * (inner + outer)) for inner, outer in sizes), len(stacks))


def _of_activations(node: fx.Node, setting: Setting) -> Work:
    """Scores or weighted values of an attention that is written out. A fused one does not store the scores."""
    if setting.keys is None:
        return UNKNOWN
    flops = _flops(node, setting.held) * setting.keys / setting.length
    ahead, back = (lambda n: n.users), (lambda n: n.all_input_nodes)
    stored = [o for o in _operands(node) if not _meets_product(o, back, setting.held)]
    if not any(_meets_product(user, ahead, setting.held) for user in node.users):
        stored.append(node)
    return Work(flops / setting.tokens, sum(map(_stored, stored)) / setting.tokens)


def _meets_product(node: fx.Node, nexts: Callable[[fx.Node], Iterable[fx.Node]], held: Held) -> bool:
    """Whether the first products on the ways from a node are products of activations."""
    seen, stack = {node}, [node]
    while stack:
        one = stack.pop()
        if info(one) is None:
            continue
        if is_matrix_product(one):
            if multiplies_activations(one, held):
                return True
            continue
        new = [n for n in nexts(one) if n not in seen]
        seen.update(new)
        stack += new
    return False


def _flops(node: fx.Node, held: Held) -> float:
    """2 FLOPs for each multiplication, from the captured shapes."""
    if op_name(node) == "einsum":
        return _einsum_flops(node)
    tensors = list(map(value, _operands(node)))
    if op_name(node) == "bilinear":
        matrix = tensors[2] if len(tensors) > 2 else max(held(node).values(), key=lambda t: t.dim())
        return 2.0 * _numel(node) * product(matrix.shape[1:])
    left = tensors[1] if op_name(node) in ("addmm", "baddbmm") else tensors[0]
    return 2.0 * _numel(node) * hint(left.shape[-1])


def _einsum_flops(node: fx.Node) -> float:
    """2 FLOPs for each combination of the equation's indices, as for a product of two operands."""
    equation, operands = next(iter(node.args), None), _operands(node)
    if not isinstance(equation, str) or "." in equation or len(operands) != 2:
        raise DependsOnValues  # a contraction of more depends on the order that is chosen
    letters: dict[str, int] = {}
    for term, operand in zip(equation.replace(" ", "").partition("->")[0].split(","), operands, strict=True):
        letters |= dict(zip(term, map(hint, value(operand).shape), strict=True))
    return 2.0 * product(letters.values())


def _moved(node: fx.Node) -> int:
    """Elements of the activations that a product reads and writes."""
    return sum(_numel(n) for n in (*_operands(node), node) if is_activation(n))


_REPEATS = frozenset({"expand", "reshape", "getitem", "contiguous", "repeat_interleave", "transpose"})


def _stored(node: fx.Node) -> int:
    """Elements that exist of a tensor which repeats each group's keys or values for all heads of the group."""
    fewest = _numel(node)
    while op_name(node) in _REPEATS and is_tensor(node.all_input_nodes[0]):
        node = node.all_input_nodes[0]
        fewest = min(fewest, _numel(node))
    return fewest


def _operands(node: fx.Node) -> list[fx.Node]:
    """The tensors that an operation is given, in order; einsum takes them in a list, or one after the other."""
    found: list[fx.Node] = []
    fx.map_arg((node.args, node.kwargs), lambda n: found.append(n))
    return [n for n in found if is_tensor(n)]


def _numel(node: fx.Node) -> int:
    return product(value(node).shape)
