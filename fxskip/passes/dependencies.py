"""What must run before what in a captured graph, beyond the values that operations pass on.

Operations also depend on each other through memory that is written in place, through the random numbers that they
draw in turn, and through switches such as autocast, which hold for everything between two of them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import fx

from fxskip.collectives.expert_parallel import start_counts
from fxskip.ir import is_leaf, mutated_base, op_name, storage, writers
from fxskip.passes.split_collectives import is_start, is_wait

_OPENS = ("_enter_autocast", "_enter_inference_mode")
_CLOSES = ("_exit_autocast", "_exit_inference_mode")
_GRAD_MODE = ("_set_grad_enabled", "set_grad_enabled")
_RANDOM = (
    "dropout",
    "rand",
    "bernoulli",
    "multinomial",
    "normal",
    "uniform",
    "exponential",
    "gumbel",
    "poisson",
)


@dataclass(eq=False)
class Unit:
    """Nodes that stay together, in their order: one node, or all between two switches."""

    nodes: list[fx.Node]
    before: set[Unit] = field(default_factory=set)
    """Units that must run earlier."""


def units(graph: fx.Graph) -> list[Unit]:
    """The graph's nodes as units, in order, with what each depends on. Placeholders and the output are left out.

    Reordered so that each unit follows those in its `before`, the graph computes the same, to the last bit and with
    the same random numbers.
    """
    found = _spans(graph)
    of = {node: unit for unit in found for node in unit.nodes}
    memory = _MemoryOrder(graph)
    last_draw: Unit | None = None
    last: dict[str, Unit] = {}
    for unit in found:
        for node in unit.nodes:
            needs = {*node.all_input_nodes, *memory.before(node)}
            unit.before |= {of[n] for n in needs if n in of}
            if draws_random_numbers(node):
                unit.before |= {last_draw} if last_draw else set()
                last_draw = unit
            if kind := _kind_of_collective(node):
                unit.before |= {last[kind]} if kind in last else set()
                last[kind] = unit
        unit.before.discard(unit)
    return found


def _kind_of_collective(node: fx.Node) -> str:
    """Which sequence the node belongs to that all ranks must go through alike, whatever each has measured or captured.

    Starts are issued in their order, forward, and waits in the reverse order of theirs, backward.
    """
    if is_start(node) or node.target is start_counts:
        return "start"
    return "wait" if is_wait(node) else ""


def draws_random_numbers(node: fx.Node) -> bool:
    """Whether the operation may draw random numbers; a module that runs as it is may."""
    if is_leaf(node):
        return True
    name = op_name(node)
    if name == "scaled_dot_product_attention":
        rate = node.kwargs.get("dropout_p", node.args[4] if len(node.args) > 4 else 0.0)
        return not isinstance(rate, float | int) or rate > 0
    return any(word in name for word in _RANDOM)


def switches(graph: fx.Graph) -> list[fx.Node]:
    """The nodes that change how everything after them runs: autocast, gradients on and off."""
    return [n for n in graph.nodes if _change_of_depth(n)]


def _spans(graph: fx.Graph) -> list[Unit]:
    found: list[Unit] = []
    depth = 0
    for node in graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        if depth > 0:
            found[-1].nodes.append(node)
        else:
            found.append(Unit([node]))
        depth = max(0, depth + _change_of_depth(node))
    return found


def _change_of_depth(node: fx.Node) -> int:
    name = op_name(node)
    if name in _GRAD_MODE:
        return -1 if node.args[0] else 1
    return 1 if name in _OPENS else -1 if name in _CLOSES else 0


class _MemoryOrder:
    """For memory that is written in place: the readers before a write and the write before later readers."""

    def __init__(self, graph: fx.Graph) -> None:
        self._written = set(writers(graph))
        self._last_write: dict[int, fx.Node] = {}
        self._reads: dict[int, list[fx.Node]] = {}

    def before(self, node: fx.Node) -> list[fx.Node]:
        """What must precede `node`, the next in program order."""
        found: list[fx.Node] = []
        base = mutated_base(node)
        target = storage(base) if base is not None else None
        for memory in {m for n in (node, *node.all_input_nodes) if (m := storage(n)) in self._written}:
            assert memory is not None
            if memory in self._last_write:
                found.append(self._last_write[memory])
            if memory == target:
                found += self._reads.pop(memory, [])
                self._last_write[memory] = node
            else:
                self._reads.setdefault(memory, []).append(node)
        return found
