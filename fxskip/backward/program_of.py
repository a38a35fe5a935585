"""Partition a graph into the steps of a program."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import networkx as nx
import torch
from torch import fx, nn

from fxskip.backward.program import Program, Step, WeightGradient
from fxskip.backward.split_weights import input_name, split_weights
from fxskip.backward.weight_gradients import product
from fxskip.errors import PassError
from fxskip.ir import is_leaf, leaf_path, op_name

_RANDOM = frozenset(
    {
        "bernoulli",
        "bernoulli_",
        "gumbel_softmax",
        "multinomial",
        "normal",
        "normal_",
        "poisson",
        "rrelu",
        "random_",
    }
    | {"rand", "rand_like", "randint", "randint_like", "randn", "randn_like", "randperm", "uniform_"}
    | {"cauchy_", "exponential_", "geometric_", "log_normal_"}
)
"""Operations that draw random numbers, beside dropout and attention."""

_STATE = frozenset({"_set_grad_enabled", "_enter_autocast", "_exit_autocast", "_enter_inference_mode"})
"""What changes how the operations after it run: no step may lie on both sides of it."""


@dataclass
class _Part:
    """The nodes of one step in graph order, and the values that cross its border, in order of first use."""

    name: str
    nodes: list[fx.Node] = field(default_factory=list)
    inputs: dict[fx.Node, None] = field(default_factory=dict)
    outputs: dict[fx.Node, None] = field(default_factory=dict)


def program_of(graph: fx.Graph, step_of: Callable[[fx.Node], str] | Mapping[fx.Node, str]) -> Program:
    """The graph as a program; every operation is put into the step that `step_of` names.

    The program's inputs are the graph's placeholders, by name, then the attributes that it reads (`attributes`), to be
    passed by the caller: so parameters are inputs, however many steps use them. A step's place in the program is that
    of its first operation, as far as dependencies allow. Steps of consecutive operations are differentiated to the
    same bits as the graph itself; where steps interleave, to the same bits as the steps one after the other.

    Products become `weight_gradients.product`; what of their weights can be split off is in `weight_gradients`.

    Raises PassError where steps depend on each other in a circle, where a change of autograd's mode has operations of
    several steps in its range, and for modules that run as they are, whose parameters the graph does not show.
    """
    parts = _partition(graph, step_of if callable(step_of) else _lookup(step_of))
    output = next(node for node in graph.nodes if node.op == "output")
    returned = output.args[0] if isinstance(output.args[0], tuple | list) else (output.args[0],)
    if not all(isinstance(value, fx.Node) for value in returned):
        raise PassError(
            "program_of",
            f"the graph returns {returned}, which is more than a tuple of values",
            hint="return a flat tuple of the graph's values",
        )
    attributes = tuple(dict.fromkeys(str(n.target) for n in graph.nodes if n.op == "get_attr"))
    steps, records = [], []
    for part in parts:
        function, found = _function(part)
        steps.append(
            Step(
                part.name,
                function,
                tuple(dict.fromkeys(input_name(node) for node in part.inputs)),
                tuple(input_name(node) for node in part.outputs),
                random=any(map(_draws, part.nodes)),
            )
        )
        records += found
    return Program(
        steps=tuple(steps),
        inputs=(*(input_name(node) for node in graph.nodes if node.op == "placeholder"), *attributes),
        outputs=tuple(input_name(node) for node in returned),
        attributes=attributes,
        weight_gradients=tuple(records),
    )


def attribute_values(program: Program, root: nn.Module) -> tuple[Any, ...]:
    """The program's last inputs: the attributes of `root`, the module that the graph belongs to, as they are now."""
    return tuple(operator.attrgetter(path)(root) for path in program.attributes)


def _lookup(step_of: Mapping[fx.Node, str]) -> Callable[[fx.Node], str]:
    def find(node: fx.Node) -> str:
        if node not in step_of:
            raise PassError(
                "program_of",
                f"node {node.name!r} is in no step",
                hint="give each operation of the graph a step; placeholders and attributes need none",
            )
        return step_of[node]

    return find


def _partition(graph: fx.Graph, step_of: Callable[[fx.Node], str]) -> list[_Part]:
    """The steps in an order that their dependencies allow."""
    parts: dict[str, _Part] = {}
    steps: dict[fx.Node, str] = {}
    for node in graph.nodes:
        if node.op in ("call_function", "call_method"):
            _require_visible(node)
            steps[node] = step_of(node)
            parts.setdefault(steps[node], _Part(steps[node])).nodes.append(node)
        elif node.op == "call_module":
            raise _hidden(node, str(node.target))
    _require_modes_within_steps(graph, steps)
    order = nx.DiGraph()
    order.add_nodes_from(parts)
    for node, step in steps.items():
        for source in node.all_input_nodes:
            if steps.get(source) != step:
                parts[step].inputs[source] = None
                if source in steps:
                    parts[steps[source]].outputs[source] = None
                    order.add_edge(steps[source], step)
    for output in (node for node in graph.nodes if node.op == "output"):
        for source in output.all_input_nodes:
            if source in steps:
                parts[steps[source]].outputs[source] = None
    return [parts[name] for name in _sorted(order, parts)]


def _sorted(order: Any, parts: Mapping[str, _Part]) -> Iterable[str]:
    position = {name: at for at, name in enumerate(parts)}
    try:
        return list(nx.lexicographical_topological_sort(order, key=position.__getitem__))
    except nx.NetworkXUnfeasible:
        circle = nx.find_cycle(order)
        links = [
            f"{step!r} reads {next(n.name for n in parts[step].inputs if n in parts[source].outputs)!r} of {source!r}"
            for source, step in circle
        ]
        raise PassError(
            "program_of",
            f"steps depend on each other in a circle: {', '.join(links)}",
            hint="cut one of these steps in two",
        ) from None


def _require_modes_within_steps(graph: fx.Graph, steps: Mapping[fx.Node, str]) -> None:
    """Between a change of autograd's mode and its end all operations are of one step."""
    opened: list[fx.Node] = []
    for node in graph.nodes:
        step = steps.get(node)
        if opened and step is not None and step != steps[opened[-1]]:
            raise PassError(
                "program_of",
                f"node {node.name!r} of step {step!r} runs in a mode that {opened[-1].name!r} of step "
                f"{steps[opened[-1]]!r} sets",
                hint="put all operations from the one that sets the mode to the one that ends it into one step",
            )
        name = op_name(node)
        if name in _STATE:
            ends = name == "_exit_autocast" or (name == "_set_grad_enabled" and bool(opened))
            opened = opened[:-1] if ends else [*opened, node]


def _require_visible(node: fx.Node) -> None:
    if is_leaf(node):
        raise _hidden(node, leaf_path(node))


def _hidden(node: fx.Node, module: str) -> PassError:
    return PassError(
        "program_of",
        f"node {node.name!r} calls the module {module!r}, and the graph does not show its parameters",
        hint="run this graph without a schedule of its own for backward: schedule: {overlap: none}",
    )


def _draws(node: fx.Node) -> bool:
    name = op_name(node)
    if name == "scaled_dot_product_attention":
        return bool(_argument(node, 4, "dropout_p", 0.0) != 0.0)
    if "dropout" in name:
        return bool(_argument(node, 1, "p", 0.5) != 0.0) and _argument(node, 2, "training", True) is not False
    return name in _RANDOM


def _argument(node: fx.Node, at: int, name: str, default: Any) -> Any:
    return node.kwargs.get(name, node.args[at] if len(node.args) > at else default)


# --- the function of a step ------------------------------------------------------------------------


def _function(part: _Part) -> tuple[Callable[..., tuple[Any, ...]], list[WeightGradient]]:
    """What runs the step's nodes, and what becomes of the gradients of its weights."""
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    by_name: dict[str, fx.Node] = {}
    for node in part.inputs:
        name = input_name(node)
        if name not in by_name:
            by_name[name] = graph.placeholder(name.replace(".", "_"))
        env[node] = by_name[name]
    deferred, records = split_weights(part.name, part.nodes, part.inputs)
    for node in part.nodes:
        copy = env[node] = graph.node_copy(node, env.__getitem__)
        if node in deferred:
            method = node.op == "call_method"
            function: Any = getattr(torch, str(node.target).strip("_")) if method else node.target
            copy.op, copy.target = "call_function", _product(function, deferred[node])
    graph.output(tuple(env[node] for node in part.outputs))
    graph.lint()
    run: Callable[..., tuple[Any, ...]] = fx.GraphModule(nn.Module(), graph).forward
    return run, records


def _product(function: Callable[..., Any], weights: tuple[int, ...]) -> Callable[..., Any]:
    """`product` with its first arguments, as something that a graph's code can name."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return product(function, weights, *args, **kwargs)

    call.__name__ = getattr(function, "__name__", "product")
    return call
