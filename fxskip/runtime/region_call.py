"""One forward of a scheduled region, with what its backward needs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from typing import Any

from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils import _pytree as pytree

from fxskip.errors import PassError
from fxskip.runtime.gradient_sum import GradientSum
from fxskip.runtime.inner_graph import Use, cut, gradients, reached, recorded, stray, uses
from fxskip.runtime.program import Event, Step
from fxskip.runtime.region_plan import Plan

Examined = dict[tuple[int, frozenset[str]], bool]
"""For a step, and what of its inputs wanted gradients: whether all of these could get one. That its graph was looked
through also says that it depends on nothing else."""


class RegionCall:
    """The values' gradients, and the autograd graph of each step, between a forward and its backward.

    A value is known by the first name it had: a step may return one of its inputs, or a tensor twice.
    """

    def __init__(self, plan: Plan, inputs: dict[str, Tensor], aliases: dict[str, str]) -> None:
        """`inputs` are the inputs that get a gradient, those that are leaves outside as leaves; `aliases` names the
        first of equal ones."""
        self.plan = plan
        self.aliases = aliases
        self.sums: dict[str, GradientSum] = {}
        self._leaves: dict[str, GradientEdge] = {}
        self._partial: set[int] = set()
        """Steps that read a value in a way that gives it no gradient."""
        steps = len(plan.program.steps)
        self._roots: list[list[tuple[str, GradientEdge]]] = [[] for _ in range(steps)]
        self._cuts: list[list[tuple[str, GradientEdge]]] = [[] for _ in range(steps)]
        for name, tensor in inputs.items():
            self._give_gradient(name)
            if tensor.requires_grad:
                self._leaves[name] = get_gradient_edge(tensor)
        for name, first in aliases.items():
            if first in self.sums:
                self.sums[first].also_read_by(plan.readers[name])

    def key(self, name: str) -> str:
        """The value's first name."""
        return self.aliases.get(name, name)

    def _give_gradient(self, name: str) -> None:
        self.sums[name] = GradientSum(self.plan.readers[name])

    # --- forward -----------------------------------------------------------------------------------

    def run_step(self, number: int, arguments: Sequence[Any], examined: Examined) -> list[Any]:
        """Run step `number` and keep its graph; returns its results without it.

        examined   what was found about the graphs of earlier calls
        """
        step = self.plan.program.steps[number]
        keys = [self.key(name) for name in step.inputs]
        values = dict(zip(keys, arguments, strict=True))
        wanted = {key: value for key, value in values.items() if key in self.sums}
        to_cut = [key for key in wanted if key not in self._leaves]
        handed = wanted | dict(zip(to_cut, cut([wanted[key] for key in to_cut]), strict=True))
        given = (handed.get(key, value) for key, value in zip(keys, arguments, strict=True))
        results = require_results(step, step.function(*given))

        self._cuts[number] = [
            (key, self._leaves.get(key) or get_gradient_edge(tensor)) for key, tensor in handed.items()
        ]
        known = {id(tensor): key for key, tensor in handed.items()}
        found = [
            self._result(number, name, result, known)
            for name, result in zip(step.outputs, results, strict=True)
        ]
        kind = (number, frozenset(handed))
        if kind not in examined or not handed:
            self._require_no_stray(number)
            examined[kind] = self._reaches_all(number)
        if not examined[kind]:
            self._partial.add(number)
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
            self._give_gradient(name)
            self._roots[number].append((name, get_gradient_edge(result)))
        return result if key in self._leaves else result.detach()

    def _require_no_stray(self, number: int) -> None:
        ends = {edge.node for _, edge in self._cuts[number]}
        found = stray([edge for _, edge in self._roots[number]], ends)
        if found is not None:
            raise PassError(
                "scheduled region",
                f"step {self.plan.program.steps[number].name!r} differentiates by {found} that is not among its inputs",
                hint="name it in the step's inputs, and in those of the program",
            )

    def _reaches_all(self, number: int) -> bool:
        roots = [edge for _, edge in self._roots[number]]
        return all(reached(roots, [edge for _, edge in self._cuts[number]]))

    def keep_only(self, outputs: Iterable[str]) -> dict[str, int]:
        """Drop the graphs that no gradient of these values gets to, as autograd does.

        Returns, for each value that a gradient gets to, the position of the backward event that completes it.
        """
        wanted = dict.fromkeys(outputs, -1)
        for number in reversed(self.plan.forward):
            roots, cuts = self._roots[number], self._cuts[number]
            kept = [(key, edge) for key, edge in roots if key in wanted]
            if len(kept) < len(roots) or number in self._partial:
                gets = reached([edge for _, edge in kept], [edge for _, edge in cuts])
                for (key, _), there in zip(cuts, gets, strict=True):
                    if not there:
                        self.sums[key].put(number, ())
                self._cuts[number] = cuts = [c for c, there in zip(cuts, gets, strict=True) if there]
                self._roots[number] = kept
            last = self.plan.last_event[number]
            for key, _ in cuts:
                wanted[key] = max(wanted.get(key, -1), last)
        return wanted

    # --- backward ----------------------------------------------------------------------------------

    def run_event(self, event: Event) -> None:
        """Compute the gradients of what the step read from those of what it made, and let its graph go."""
        roots, self._roots[event.step] = self._roots[event.step], []
        cuts, self._cuts[event.step] = self._cuts[event.step], []
        given = [(edge, self.sums.pop(key).total) for key, edge in roots]
        reached = [(edge, gradient) for edge, gradient in given if gradient is not None]
        del roots, given
        if not reached:
            for key, _ in cuts:
                self.sums[key].put(event.step, ())
            return
        self._differentiate(event.step, [edge for edge, _ in reached], [g for _, g in reached], cuts)

    def _differentiate(
        self,
        number: int,
        roots: list[GradientEdge],
        given: list[Tensor],
        cuts: list[tuple[str, GradientEdge]],
    ) -> None:
        early: dict[str, list[Use]] = {}
        ends = {edge.node for _, edge in cuts}
        for key, edge in cuts:
            total = self.sums[key]
            if not total.is_turn_of(number):
                # Readers after this step are still to come, and their gradients are added before those of this
                # step's uses, one by one: so more than one use must not be added up here.
                found = uses(roots, edge, ends)
                if len(found) > 1:
                    early[key] = found
            elif (so_far := total.take()) is not None:
                roots.append(edge)
                given.append(so_far)
                del so_far
        with ExitStack() as stack:
            parts = {key: stack.enter_context(recorded(found)) for key, found in early.items()}
            sums = gradients(roots, given, [edge for _, edge in cuts])
        for (key, _), gradient in zip(cuts, sums, strict=True):
            alone = () if gradient is None else (gradient,)
            self.sums[key].put(number, parts.get(key, alone))


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
