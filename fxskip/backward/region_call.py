"""One forward of a scheduled region, with what its backward needs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from typing import Any

from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils import _pytree as pytree

from fxskip.backward.inner_graph import PRODUCTS, Use, cut, gradients, reached, record, stray, uses
from fxskip.backward.ordered_sum import OrderedSum
from fxskip.backward.program import Event, Step
from fxskip.backward.region_plan import Plan
from fxskip.backward.shared_casts import Edges, SharedCasts, shares_casts
from fxskip.backward.weight_gradients import WeightQueue
from fxskip.errors import PassError

Examined = dict[tuple[int, frozenset[str]], bool]
"""For a step, and what of its inputs wanted gradients: whether all of these could get one. That its graph was looked
through also says that it depends on nothing else."""


class RegionCall:
    """The values' gradients, and the autograd graph of each step, between a forward and its backward.

    A value is known by the first name it had: a step may return one of its inputs, or a tensor twice.
    """

    def __init__(
        self,
        plan: Plan,
        inputs: dict[str, Tensor],
        aliases: dict[str, str],
        pack: Callable[[Tensor], object] | None,
    ) -> None:
        """
        inputs    what gets a gradient; leaves (parameters) are leaves here as well
        aliases   for a further name of an input its first
        pack      the hook for saved tensors while the steps run
        """
        self.plan = plan
        self.aliases = aliases
        self.sums = {name: OrderedSum(plan.readers[name]) for name in inputs}
        for name, first in aliases.items():
            self.sums[first].also_read_by(plan.readers[name])
        self._leaves = {
            name: get_gradient_edge(tensor) for name, tensor in inputs.items() if tensor.requires_grad
        }
        kept = [
            name for name in self._leaves if len(self.sums[name].readers) > 1 and shares_casts(inputs[name])
        ]
        self._casts = SharedCasts(self.sums, {name: self._leaves[name] for name in kept})
        self._graphs: list[_Graph] = [_Graph([], []) for _ in plan.program.steps]
        self._queues = {number: self._queue(number, pack) for number in plan.split}
        self._held: dict[int, dict[str, list[Tensor]]] = {}
        """For split steps, gradients of parameters that were computed together with those of the values."""

    def _queue(self, number: int, pack: Callable[[Tensor], object] | None) -> WeightQueue:
        inputs = {self.key(name) for name in self.plan.program.steps[number].inputs}
        leaves = {name: edge.node for name, edge in self._leaves.items() if name in inputs}
        return WeightQueue(
            leaves.values(), [node for name, node in leaves.items() if name in self._casts], pack
        )

    def key(self, name: str) -> str:
        """The value's first name."""
        return self.aliases.get(name, name)

    # --- forward -----------------------------------------------------------------------------------

    def run_step(self, number: int, arguments: Sequence[Any], examined: Examined) -> list[Any]:
        """Run step `number` and keep its graph; returns its results without it.

        examined   what was found about the graphs of earlier calls
        """
        step = self.plan.program.steps[number]
        keys = [self.key(name) for name in step.inputs]
        wanted = {key: value for key, value in zip(keys, arguments, strict=True) if key in self.sums}
        to_cut = [key for key in wanted if key not in self._leaves]
        tensors, edges = cut([wanted[key] for key in to_cut])
        handed = wanted | dict(zip(to_cut, tensors, strict=True))
        # These edges, not those after the step has run: it may write into a tensor, which then has another one.
        cuts = [
            *zip(to_cut, edges, strict=True),
            *((k, self._leaves[k]) for k in wanted if k in self._leaves),
        ]
        given = [handed.get(key, value) for key, value in zip(keys, arguments, strict=True)]
        queue = self._queues.get(number)
        with queue.open() if queue is not None else nullcontext():
            results = require_results(step, step.function(*given))

        self._graphs[number] = graph = _Graph([], cuts)
        unwritten = (
            (k, handed[k]) for k, edge in cuts if handed[k].is_leaf or handed[k].grad_fn is edge.node
        )
        known = {id(tensor): key for key, tensor in unwritten}
        pairs = zip(step.outputs, results, strict=True)
        found = [self._result(number, name, result, known) for name, result in pairs]
        kind = (number, frozenset(handed))
        if kind not in examined or not handed:
            self._require_no_stray(number)
            examined[kind] = all(reached(graph.root_edges(), graph.cut_edges()))
        graph.partial = not examined[kind]
        if self._casts:
            graph.cuts = self._casts.replace(number, graph.root_edges(), graph.cuts)
        return found

    def _result(self, number: int, name: str, result: Any, known: dict[int, str]) -> Any:
        if not isinstance(result, Tensor):
            _require_no_gradients_inside(self.plan.program.steps[number], name, result)
            return result
        if not result.requires_grad:
            return result
        key = known.setdefault(id(result), name)
        if key != name:
            self.aliases[name] = key
            self.sums[key].also_read_by(self.plan.readers[name])
        else:
            self.sums[name] = OrderedSum(self.plan.readers[name])
            self._graphs[number].roots.append((name, get_gradient_edge(result)))
        return result if key in self._leaves else result.detach()

    def _require_no_stray(self, number: int) -> None:
        graph = self._graphs[number]
        found = stray(graph.root_edges(), {edge.node for edge in graph.cut_edges()})
        if found is not None:
            raise differentiates_by_another(f"step {self.plan.program.steps[number].name!r}", found)

    def keep_only(self, outputs: Iterable[str]) -> dict[str, int]:
        """Drop the graphs that no gradient of these values gets to, as autograd does.

        Returns, for each value that a gradient gets to, the position of the backward event that completes it.
        """
        self._casts.begin_backward()
        complete = dict.fromkeys(outputs, -1)
        for number in reversed(self.plan.forward):
            graph = self._graphs[number]
            kept = [(key, edge) for key, edge in graph.roots if key in complete]
            if len(kept) < len(graph.roots) or graph.partial:
                graph.roots = kept
                self._drop_unreached(number)
            last = self.plan.last_event[number]
            for key, _ in graph.cuts:
                complete[key] = max(complete.get(key, -1), last)
                if (leaf := self._casts.leaf_of(key)) is not None:
                    complete[leaf] = max(complete.get(leaf, -1), last)
        return complete

    def _drop_unreached(self, number: int) -> None:
        graph = self._graphs[number]
        later = self._queues[number].weights if number in self._queues and graph.roots else ()
        there = reached(graph.root_edges(), graph.cut_edges())
        cuts, graph.cuts = graph.cuts, []
        for (key, edge), gets in zip(cuts, there, strict=True):
            if gets or edge.node in later:
                graph.cuts.append((key, edge))
            else:
                self._casts.put(key, number, ())

    # --- backward ----------------------------------------------------------------------------------

    def computes(self, event: Event) -> bool:
        """Whether a gradient of the step's results, or of its weights, is asked for."""
        graph = self._graphs[event.step]
        return bool(graph.cuts if event.part == "wgrad" else graph.roots)

    def run_event(self, event: Event) -> None:
        """Compute gradients of what the step read from those of what it made, and let its graph go."""
        number, graph = event.step, self._graphs[event.step]
        if event.part == "wgrad":
            self._weight_gradients(number, graph.cuts)
            return
        given = [(edge, self.sums.pop(key).result()) for key, edge in graph.roots]
        graph.roots = []
        roots = [edge for edge, gradient in given if gradient is not None]
        known = [gradient for _, gradient in given if gradient is not None]
        del given
        cuts = graph.cuts
        if event.part == "dgrad":
            graph.cuts = [(key, edge) for key, edge in cuts if key in self._leaves]
            self._held[number] = {}
        else:
            graph.cuts = []
        if roots:
            self._differentiate(number, roots, known, cuts)
        else:
            for key, _ in cuts:
                self._put(key, number, ())

    def _differentiate(
        self, number: int, roots: list[GradientEdge], given: list[Tensor], cuts: Edges
    ) -> None:
        """`given` are gradients of the step's results, at the edges `roots`; both lists are used up."""
        apart: dict[str, list[Use]] = {}
        ends = {edge.node for _, edge in cuts}
        for key, edge in cuts:
            if self._may_start_from_sum(number, key):
                if (so_far := self.sums[key].take()) is not None:
                    roots.append(edge)
                    given.append(so_far)
                    del so_far
                continue
            # Readers after this step are still to come, and their gradients are added before those of this step's
            # uses, one by one: so these must not be added up here.
            found = uses(roots, edge, ends)
            if self._casts.has_direct_uses(number, key):
                apart[key] = self._casts.without_casts(found)
            elif len(found) > 1:
                apart[key] = found
        edges = [edge for _, edge in cuts]
        if number in self._queues:
            edges.append(get_gradient_edge(PRODUCTS))  # those whose operands want no gradient run as well
        parts, remove = record(apart)
        try:
            sums = gradients(roots, given, edges)
        finally:
            remove()
        for (key, _), gradient in zip(cuts, sums, strict=False):
            alone = () if gradient is None else (gradient,)
            self._put(key, number, parts.get(key, alone))

    def _may_start_from_sum(self, number: int, key: str) -> bool:
        """Whether autograd itself can add the step's gradients of a value to those of the readers after it."""
        held = number in self._held and key in self._leaves
        return self.sums[key].is_turn_of(number) and not held and not self._casts.has_direct_uses(number, key)

    def _put(self, key: str, number: int, parts: Sequence[Tensor]) -> None:
        if number in self._held and key in self._leaves:
            self._held[number][key] = list(parts)
        else:
            self._casts.put(key, number, parts)

    def _weight_gradients(self, number: int, cuts: Edges) -> None:
        held = self._held.pop(number)
        later = self._queues.pop(number).weight_gradients(cuts)
        for key, _ in cuts:
            self._put(key, number, [*held.get(key, ()), *later.get(key, ())])
        self._graphs[number].cuts = []


class _Graph:
    """The autograd graph of one step: where gradients of its results go in, and those of its inputs come out."""

    __slots__ = ("cuts", "partial", "roots")

    def __init__(self, roots: Edges, cuts: Edges) -> None:
        self.roots = roots
        self.cuts = cuts
        self.partial = False
        """Some input gets no gradient, whatever the results'."""

    def root_edges(self) -> list[GradientEdge]:
        return [edge for _, edge in self.roots]

    def cut_edges(self) -> list[GradientEdge]:
        return [edge for _, edge in self.cuts]


def differentiates_by_another(who: str, found: str) -> PassError:
    """The error for a tensor that would get no gradient."""
    return PassError(
        "scheduled region",
        f"{who} differentiates by {found} that is not among its inputs",
        hint="name it in the step's inputs, and in those of the program",
    )


def require_results(step: Step, results: Any) -> list[Any]:
    """Raises PassError where a step did not return a tuple of its outputs."""
    if not isinstance(results, tuple) or len(results) != len(step.outputs):
        count = len(results) if isinstance(results, tuple) else f"a {type(results).__name__}"
        raise PassError(
            "scheduled region",
            f"step {step.name!r} returned {count} instead of a tuple of its {len(step.outputs)} outputs",
            hint=f"return ({''.join(f'{name}, ' for name in step.outputs)})",
        )
    return list(results)


def _require_no_gradients_inside(step: Step, name: str, result: Any) -> None:
    """A list or dict is handed on as it is, with the graph of what is in it."""
    if isinstance(result, list | tuple | dict) and any(
        isinstance(part, Tensor) and part.requires_grad for part in pytree.tree_leaves(result)
    ):
        raise PassError(
            "scheduled region",
            f"output {name!r} of step {step.name!r} is a {type(result).__name__} with tensors that require gradients",
            hint="return each of these tensors as an output of its own",
        )
