"""Run a program's steps forward in one order, and backward in another, planned one.

    forward    each step runs on values that are cut off from the steps that made them
    backward   at its turn, a step's gradients are computed from those of its outputs

The result is bitwise that of plain autograd on the program, whatever the orders. To autograd the region is a chain of
nodes, one for each event after which the gradient of an input is complete: parameters get theirs while the backward
still runs, so DDP and FSDP2 communicate under it, and `torch.autograd.grad` leaves .grad alone.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, MutableMapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Variable
from torch.nn import Parameter
from torch.utils.weak import WeakTensorKeyDictionary

from fxskip.backward.inner_graph import SavedTensors, hooks_of_the_caller
from fxskip.backward.program import Program, backward_order, forward_order
from fxskip.backward.region_call import Examined, RegionCall, differentiates_by_another, require_results
from fxskip.backward.region_plan import Plan
from fxskip.backward.shared_casts import shares_casts
from fxskip.backward.site import Site
from fxskip.backward.step_values import StepValues, random_state
from fxskip.errors import PassError, ScheduleError


class ScheduledRegion:
    """A program whose steps run forward and backward in given orders.

    Each call takes the program's inputs, in order, and returns a tuple of its outputs. A call can be differentiated
    once, by any of autograd's functions, and not twice over (no `create_graph`).
    """

    def __init__(
        self,
        program: Program,
        *,
        forward: Sequence[str] | None = None,
        backward: Sequence[str] | None = None,
        drain: Callable[[], object] | None = None,
        weights: Collection[str] = (),
        around_backward: Callable[[], AbstractContextManager[object]] = nullcontext,
        site: Callable[[], Site] = Site,
    ) -> None:
        """Check the orders.

        Args:
            program: the steps in canonical order.
            forward: names of all steps; None is program order.
            backward: names of all steps, or `name.dgrad` and, later, `name.wgrad`; None is from the last step of
                the program to its first.
            drain: called where a forward or backward ends early, so that nothing stays in flight.
            weights: inputs whose gradients may be split off although they are no leaves: views of parameters.
            around_backward: opened around the events of each node of the chain.
            site: asked at each call; says in errors which region it is, and is told of the steps and their errors.

        Raises:
            ScheduleError: an order is incomplete, or would read a value or gradient before it is there.
        """
        self.program = program
        self._plan = Plan.of(program, forward_order(program, forward), backward_order(program, backward))
        self._drain = drain or (lambda: None)
        self._weights = frozenset(weights)
        self._around_backward = around_backward
        self._site = site
        self._examined: Examined = {}
        self._under_way = 0
        self._leaves: MutableMapping[Tensor, Tensor] = WeakTensorKeyDictionary()

    @torch.compiler.disable(reason="each step has a graph of its own")  # type: ignore[untyped-decorator]
    def __call__(self, *inputs: Any) -> tuple[Any, ...]:
        """Run the steps forward.

        Raises PassError where a step does what the program does not say: it returns something else, differentiates
        by a tensor that is none of its inputs, writes into what others read, or draws random numbers out of order.
        """
        program = self.program
        if len(inputs) != len(program.inputs):
            raise PassError(
                "scheduled region",
                f"called with {len(inputs)} inputs instead of {len(program.inputs)}",
                hint=f"pass {', '.join(program.inputs)}",
            )
        self._drain_abandoned()
        named = dict(zip(program.inputs, inputs, strict=True))
        site = self._site()
        if torch.is_grad_enabled() and any(_wants_gradient(value) for value in inputs):
            return self._differentiable(named, site)
        results = self._run_forward(named, None, site)
        if torch.is_grad_enabled() and any(_wants_gradient(result) for result in results):
            raise differentiates_by_another("a step", "a tensor")
        return tuple(results)

    def _differentiable(self, inputs: dict[str, Any], site: Site) -> tuple[Any, ...]:
        """Run forward, and make the chain of nodes that runs backward."""
        first: dict[int, str] = {}
        aliases = {
            name: first.setdefault(id(value), name)
            for name, value in inputs.items()
            if _wants_gradient(value)
        }
        tensors = {name: inputs[name] for name, known in aliases.items() if name == known}
        apart = {name: self._apart(name, tensor) for name, tensor in tensors.items()}
        saved = SavedTensors() if hooks_of_the_caller() is not None else None
        further = {name: known for name, known in aliases.items() if name != known}
        call = RegionCall(self._plan, apart, further, saved.pack if saved is not None else None)
        with saved.collecting() if saved is not None else nullcontext():
            values = self._run_forward(inputs | {n: apart[known] for n, known in aliases.items()}, call, site)
        backward = _Backward(self, call, saved, site)
        return backward.connect(tensors, values)

    def _apart(self, name: str, tensor: Tensor) -> Tensor:
        """The same memory without its history; for a weight, a leaf, so that no hook of the caller runs inside.

        Under autocast that leaf is kept, or each call would leave its own cast of a parameter in autocast's cache.
        """
        if not tensor.is_leaf and name not in self._weights:
            return tensor.detach()
        if not shares_casts(tensor) or type(tensor) not in (Tensor, Parameter):
            return tensor.detach().requires_grad_()
        kept = self._leaves.get(tensor)
        if kept is None or kept.data_ptr() != tensor.data_ptr() or kept.shape != tensor.shape:
            kept = self._leaves[tensor] = tensor.detach().requires_grad_()
        return kept

    def _run_forward(self, inputs: dict[str, Any], call: RegionCall | None, site: Site) -> list[Any]:
        plan = self._plan
        values = StepValues(plan, inputs)
        for position, number in enumerate(plan.forward):
            step = plan.program.steps[number]
            try:
                arguments = values.arguments(number)
                site.forward(step.name)
                state = None if plan.in_order or step.random else random_state()
                if call is None:
                    results = require_results(step, step.function(*arguments))
                else:
                    results = call.run_step(number, arguments, self._examined)
                if state is not None and random_state() != state:
                    raise _draws_out_of_order(step.name)
                values.put(number, results)
            except BaseException as error:
                self._fail(error, f"forward of step {step.name!r} of {site}", site)
                raise
            del arguments, results
            values.free(position)
        try:
            return values.returned()
        except PassError:
            self._drain()
            raise

    def _fail(self, error: BaseException, where: str, site: Site) -> None:
        error.add_note(f"in the {where}")
        site.failed(error, where)
        self._drain()

    def _drain_abandoned(self) -> None:
        """A backward that was left in the middle, by an error outside of the region, may have left something in flight.

        A call inside of a backward recomputes: then others may well be under way.
        """
        if self._under_way and torch._C._current_graph_task_id() == -1:
            self._under_way = 0
            self._drain()


class _Backward:
    """The backward of one call, as the nodes of a chain run it piece by piece."""

    def __init__(
        self, region: ScheduledRegion, call: RegionCall, saved: SavedTensors | None, site: Site
    ) -> None:
        self.region = region
        self.call: RegionCall | None = call
        self.saved = saved
        self.outputs: tuple[str, ...] = ()
        self.pieces: list[tuple[range, list[str]]] = []
        """The events that each node runs, and the inputs whose gradients it returns."""
        self.begun = False
        self.site = site
        self.token = torch.empty(0)
        """What passes between the nodes, and is the gradient of itself."""

    def connect(self, inputs: dict[str, Tensor], values: list[Any]) -> tuple[Any, ...]:
        """Return the outputs with the first node of the chain as their history."""
        call = self.call
        assert call is not None
        program = self.region.program
        keys = [call.key(name) for name in program.outputs]
        made = {key: value for key, value in zip(keys, values, strict=True) if key in call.sums}
        outside: dict[str, Tensor] = {}
        if made:
            self.outputs = tuple(made)
            outside = dict(zip(made, self._chain(call, inputs, tuple(made.values())), strict=True))
        return tuple(outside.get(key, value) for key, value in zip(keys, values, strict=True))

    def _chain(
        self, call: RegionCall, inputs: dict[str, Tensor], values: tuple[Tensor, ...]
    ) -> Sequence[Tensor]:
        """The nodes, last one first, because each depends on the next."""
        complete: dict[int, list[str]] = {}
        for name, event in call.keep_only(self.outputs).items():
            if name in inputs:
                complete.setdefault(event, []).append(name)
        begin = 0
        for event in sorted(complete):
            self.pieces.append((range(begin, event + 1), complete[event]))
            begin = event + 1
        token: tuple[Tensor, ...] = ()
        self.token = torch.empty(0, device=values[0].device)
        for number in range(len(self.pieces) - 1, 0, -1):
            released = [inputs[name] for name in self.pieces[number][1]]
            token = _Piece.apply(self, number, (self.token,), *token, *released)  # type: ignore[no-untyped-call]
        released = [inputs[name] for name in self.pieces[0][1]]
        found: tuple[Tensor, ...] = _Piece.apply(  # type: ignore[no-untyped-call]
            self, 0, values, *token, *released
        )
        return found

    def begin(self, gradients: Sequence[Tensor | None], saved: Sequence[Tensor]) -> None:
        """The gradients of the outputs are there."""
        if self.call is None or self.begun:
            raise ScheduleError(
                "scheduled backward",
                "a second backward through the same call of a region",
                hint="a call is differentiated once: add the losses up before, or call the region again",
            )
        self.begun = True
        self.region._under_way += 1
        Variable._execution_engine.queue_callback(self.end)
        if self.saved is not None:
            self.saved.take_back(saved)
        for key, gradient in zip(self.outputs, gradients, strict=True):
            self.call.sums[key].total = gradient

    def run(self, number: int) -> list[Tensor | None]:
        """Run one node's events; returns the gradients of its inputs."""
        assert self.call is not None
        events, released = self.pieces[number]
        plan = self.region._plan
        with torch.autograd.set_multithreading_enabled(False), self.region._around_backward():
            for position in events:
                event = plan.backward[position]
                name = plan.program.steps[event.step].name
                try:
                    if self.call.computes(event):
                        self.site.backward(name, event.part)
                    self.call.run_event(event)
                except BaseException as error:
                    self._forget()
                    self.region._fail(error, f"backward of step {name!r} of {self.site}", self.site)
                    raise
        found = [self.call.sums.pop(name).result() for name in released]
        if number == len(self.pieces) - 1:
            self._forget()
        return found

    def end(self) -> None:
        """Autograd is done. Where only some gradients were asked for, what the others' steps began is ended."""
        if self.call is not None:
            self._forget()
            self.region._drain()

    def _forget(self) -> None:
        self.call = None
        self.region._under_way -= 1


class _Piece(torch.autograd.Function):
    """One node of the chain. Its inputs are the next node's token, and the inputs of the region that it releases."""

    @staticmethod
    def forward(
        ctx: Any, backward: _Backward, number: int, values: tuple[Tensor, ...], *inputs: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.backward_state, ctx.number = backward, number
        ctx.set_materialize_grads(False)
        if number == 0 and backward.saved is not None:
            ctx.save_for_backward(*backward.saved.hand_over())
        return tuple(value.detach() for value in values)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        if torch.is_grad_enabled():
            raise ScheduleError(
                "scheduled backward",
                "create_graph=True: the gradients of a region cannot be differentiated again",
                hint="run the program's steps plainly where second derivatives are needed",
            )
        backward: _Backward = ctx.backward_state
        if ctx.number == 0:
            backward.begin(gradients, ctx.saved_tensors)
        found = backward.run(ctx.number)
        token = () if ctx.number == len(backward.pieces) - 1 else (backward.token,)
        return (None, None, None, *token, *found)


def _wants_gradient(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


def _draws_out_of_order(step: str) -> PassError:
    return PassError(
        "scheduled region",
        f"step {step!r} draws random numbers and does not say so, and the forward order is not that of the program",
        hint="Step(..., random=True): steps that draw random numbers then keep their order",
    )
