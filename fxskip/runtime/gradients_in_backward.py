"""Averages of gradients over processes while the backward pass that makes them still runs.

A hook on each parameter says when its gradient is complete. A bucket whose gradients are all there is started, in the
order of the plan, on all processes alike; what is missing at the end of the pass counts as zero. The end of the pass
waits for all of them, so `loss.backward()` leaves the gradients of the mean loss.

A gradient of an expert is a sum over processes when it arrives, and gets the factor of the mean there, by a hook on the
parameter: so what is in `.grad` may be a mean to which more is added. `torch.autograd.grad` passes the hook, too.

    backward   head ..| layer 2 ........| layer 1 ........| layer 0 ........| embedding |
    data             [head       ][layer 2     ]    [layer 1     ]    [layer 0   ][emb.]  wait, copy back
"""

from __future__ import annotations

import copy
import warnings
from collections import deque
from collections.abc import Collection, Iterator, MutableMapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakTensorKeyDictionary

from fxskip.collectives.comparison import Comparison
from fxskip.collectives.landing import Landing, backward_pass
from fxskip.collectives.measuring import Place, Sent, sends_nothing, waits_at_once
from fxskip.errors import CollectiveError, PassError
from fxskip.parallel import RegionParallel
from fxskip.runtime.gradient_buckets import (
    Bucket,
    GradientPlan,
    gradient_plan,
    parallel_of,
    spread_layers,
)
from fxskip.schedule.tasks import DATA
from fxskip.sharding import is_sharded

_WHO = "schedule.gradients: in_backward"
_NAMED = 5
"""So many parameters are named in a warning."""


class GradientsInBackward:
    """What averages the gradients of one model. Its layers hold it; a copy of the model has one of its own.

    accumulates   whether gradients stay as they are, because another backward pass will add to them
    """

    def __init__(self, model: nn.Module) -> None:
        self.accumulates = False
        self._model = model
        self._plan: GradientPlan | None = None
        self._mode = ""
        self._trained: list[tuple[object, ...]] | None = None
        self._hooks: list[RemovableHandle] = []
        self._bucket_of: dict[nn.Parameter, Bucket] = {}
        self._warned = False
        self._averaged: MutableMapping[Tensor, bool] = WeakTensorKeyDictionary()
        """The gradients that are means already, and were not added to since."""
        self._pass: _Pass | None = None
        self._agreement: Agreement | None = None
        """Under way in a forward pass."""
        self._last_layer = 0

    def __deepcopy__(self, memo: dict[int, Any]) -> GradientsInBackward:
        return GradientsInBackward(copy.deepcopy(self._model, memo))

    @property
    def plan(self) -> GradientPlan:
        """What is averaged, in the order in which it is started."""
        assert self._plan is not None
        return self._plan

    @property
    def names_hash(self) -> int:
        """A hash of what is averaged, from 1 to 65535; 0 where nothing is."""
        if self.accumulates or self._plan is None:  # no plan: no forward yet that records gradients
            return 0
        return self._plan.number % 65535 + 1

    def prepare(self, parallel: RegionParallel) -> None:
        """See that all parameters that train now have hooks. Called before a forward pass that records gradients.

        parallel   of the first layer

        Raises PassError where something else averages the gradients, too.
        """
        _refuse_ddp()
        self._mode = parallel.mode
        trained: list[tuple[object, ...]] = [
            (id(p), p.dtype, p.device) for p in self._model.parameters() if p.requires_grad
        ]
        if trained != self._trained:
            self._plan_anew(trained)

    def _plan_anew(self, trained: list[tuple[object, ...]]) -> None:
        _refuse_fsdp(self._model)
        self._plan, self._trained = gradient_plan(_WHO, self._model, arrive_scaled=True), trained
        self._bucket_of = {p: bucket for bucket in self._plan.buckets for p in bucket.parameters}
        for hook in self._hooks:
            hook.remove()
        self._hooks = [p.register_post_accumulate_grad_hook(self._accumulated) for p in self._bucket_of]
        self._hooks += [
            p.register_hook(partial(_scaled, bucket.lane.arrival))
            for p, bucket in self._bucket_of.items()
            if bucket.lane.arrival != 1.0
        ]
        layers = spread_layers(self._model).values()
        for number, layer in enumerate(layers):
            layer.fxskip_parallel = replace(parallel_of(layer), gradients=self._plan.of_layer(number))  # type: ignore[assignment]
        self._last_layer = len(layers) - 1

    def begin_to_agree(self) -> None:
        """Begin to compare with other processes what is averaged, unless the counts of rows carry it.

        In each forward pass, for a process cannot know that another one has changed something.
        """
        if not (self.plan.counts_reach_everyone or sends_nothing()):
            self._agreement = Agreement(self.plan, _WHO, accumulates=self.accumulates)

    def agree_before(self, layer: int) -> None:
        """In the forward pass, before decoder layer number `layer` runs: where it is the last, raise CollectiveError
        if other processes average other gradients. The comparison has run under the layers until there, and what is
        sent next is the backward pass's."""
        if layer == self._last_layer and self._agreement is not None:
            agreement, self._agreement = self._agreement, None
            agreement.require()

    def parameters(self) -> Collection[nn.Parameter]:
        """Whose gradients are averaged here."""
        return self._bucket_of.keys()

    @property
    def is_done(self) -> bool:
        """Whether all gradients are means already."""
        return all(p.grad is None or p.grad in self._averaged for p in self._bucket_of)

    def average(self) -> None:
        """Make means of the gradients as they are, one bucket after the other."""
        for bucket in self.plan.buckets:
            self._finish(bucket, self._start(bucket))

    # --- what autograd calls ---

    def _accumulated(self, parameter: nn.Parameter) -> None:
        if parameter.grad is None:
            raise PassError(
                _WHO,
                "a gradient was taken away before it was averaged",
                hint="an optimizer must not step inside the backward pass: let it step behind it",
            )
        self._averaged.pop(parameter.grad, None)
        if self.accumulates:
            return
        number = backward_pass()
        if self._pass is None or self._pass.number != number:  # one before has ended by an error
            self._pass = _Pass(number, self.plan)
            Variable._execution_engine.queue_callback(partial(self._end, self._pass))
        if not self._runs_ahead:
            return
        self._pass.completed(parameter, self._bucket_of[parameter])
        for bucket in self._pass.startable(self._cap):
            self._pass.flying[bucket] = self._start(bucket)

    @property
    def _runs_ahead(self) -> bool:
        """Whether buckets leave before the end of the pass. Not where each is waited for at once: another process may
        start it at the end of its own pass only, and waits for this one until then."""
        return self._mode == "scheduled" and not waits_at_once()

    @property
    def _cap(self) -> int:
        """Bytes that may be in flight."""
        return self.plan.parallel.schedule.max_in_flight_mib << 20

    def _end(self, current: _Pass) -> None:
        """The backward pass is over: start what is missing, and wait for all."""
        self._pass = None
        if self._runs_ahead:
            self._warn_of_late(current)
        for bucket in current.left():
            while current.flying and (not self._runs_ahead or not current.has_room(bucket, self._cap)):
                oldest = next(iter(current.flying))
                self._finish(oldest, current.flying.pop(oldest))
            current.flying[bucket] = self._start(bucket)
        for bucket, landing in current.flying.items():
            self._finish(bucket, landing)

    def _warn_of_late(self, current: _Pass) -> None:
        """Say once what had no gradient and so kept buckets from leaving under the pass."""
        late = current.without_gradient()
        if not late or self._warned:
            return
        self._warned = True
        more = f", and {len(late) - _NAMED} more" if len(late) > _NAMED else ""
        warnings.warn(
            f"fxskip: schedule.gradients: in_backward: a backward pass gave no gradient to {', '.join(late[:_NAMED])}"
            f"{more}; {len(current.left())} of {len(self.plan.buckets)} buckets waited for its end. Freeze what is not "
            "used: requires_grad_(False)",
            stacklevel=2,
        )

    # --- one bucket ---

    def _start(self, bucket: Bucket) -> Landing | None:
        with torch.no_grad():
            return bucket.start()

    def _finish(self, bucket: Bucket, landing: Landing | None) -> None:
        with torch.no_grad():
            bucket.finish(landing)
        for parameter in bucket.parameters:
            if parameter.grad is not None:
                self._averaged[parameter.grad] = True


class _Pass:
    """One backward pass."""

    def __init__(self, number: int, plan: GradientPlan) -> None:
        self.number = number
        self.flying: dict[Bucket, Landing | None] = {}
        """In the order in which they were started."""
        self._missing = {bucket: set(bucket.parameters) for bucket in plan.buckets}
        # One queue for all that one group sends: there, processes must start in the same order.
        self._queues: dict[Any, deque[Bucket]] = {}
        for bucket in plan.buckets:
            queue = bucket.lane if bucket.lane.group is None else bucket.lane.group
            self._queues.setdefault(queue, deque()).append(bucket)

    def completed(self, parameter: nn.Parameter, bucket: Bucket) -> None:
        """The gradient of `parameter` is complete."""
        self._missing[bucket].discard(parameter)

    def startable(self, cap: int) -> Iterator[Bucket]:
        """The buckets to start now, each once: complete ones with none before them that is not, as far as there is
        room. What finds none stays for a later call, for to wait in the pass could be to wait for ever."""
        for queue in self._queues.values():
            while queue and not self._missing[queue[0]] and self.has_room(queue[0], cap):
                yield queue.popleft()

    def has_room(self, bucket: Bucket, cap: int) -> bool:
        """Whether `bucket` and what is in flight are together at most `cap` bytes, or nothing else is in flight."""
        held = sum(
            b.bytes for b, landing in self.flying.items() if landing is not None and landing.is_under_way
        )
        return not bucket.sends or held == 0 or held + bucket.bytes <= cap

    def without_gradient(self) -> list[str]:
        """Names of the parameters that buckets still wait for."""
        return [
            name
            for bucket in self.left()
            for name, parameter in zip(bucket.names, bucket.parameters, strict=True)
            if parameter in self._missing[bucket]
        ]

    def left(self) -> list[Bucket]:
        """The buckets that were not started, group by group in the order of the plan."""
        return [bucket for queue in self._queues.values() for bucket in queue]


class Agreement:
    """A comparison of what the processes of a mesh are about to average, under way.

    accumulates   whether this one averages nothing yet, for another backward pass will add to the gradients
    """

    def __init__(self, plan: GradientPlan, who: str, *, accumulates: bool = False) -> None:
        self._plan, self._who, self._accumulates = plan, who, accumulates
        self._comparison = Comparison(
            Sent(f"{_COMPARISON} ({DATA}) of decoder layer 0", Place(0, _COMPARISON, DATA)),
            plan.everyone,
            torch.tensor([0 if accumulates else plan.number], device=plan.device),
        )

    def require(self) -> None:
        """Wait for it. Raises CollectiveError on all processes where some differ; it says how."""
        if len({number for (number,) in self._comparison.get()}) == 1:
            return
        group = self._plan.everyone
        lines = (_NOTHING,) if self._accumulates else self._plan.lines
        everyone: list[tuple[str, ...]] = [()] * dist.get_world_size(group)
        dist.all_gather_object(everyone, lines, group=group)
        ranks = dist.get_process_group_ranks(group)
        raise CollectiveError(
            self._who,
            "the processes train different parameters",
            where="\n".join(
                f"rank {rank}: {said}" for rank, said in zip(ranks, _apart(everyone), strict=True)
            ),
            hint="freeze and add the same parameters, in the same dtypes, on all processes, and open no_sync on all",
        )


_COMPARISON = "comparison of what trains"
_NOTHING = "nothing is averaged, inside of no_sync"


def _apart(everyone: Sequence[Sequence[str]]) -> Iterator[str]:
    """Of each process, what not all have; where all have the same in another order, the first that is elsewhere."""
    common = set(everyone[0]).intersection(*everyone)
    at = next((n for n, lines in enumerate(zip(*everyone, strict=False)) if len(set(lines)) > 1), 0)
    same_names = all(common.issuperset(lines) for lines in everyone)
    for lines in everyone:
        if same_names:
            yield f"number {at} is {lines[at]}"
            continue
        extra = [line for line in lines if line not in common]
        more = f", and {len(extra) - _NAMED} more" if len(extra) > _NAMED else ""
        yield (", ".join(extra[:_NAMED]) + more) or "none of these"


def _scaled(factor: float, gradient: Tensor) -> Tensor:
    return gradient * factor


def _refuse_ddp() -> None:
    if DistributedDataParallel._active_ddp_module is not None:
        raise PassError(
            _WHO,
            "the model is inside DistributedDataParallel, which averages gradients itself",
            hint="call the model without it; or leave schedule.gradients out, and call "
            "fxskip.average_gradients(model, dense=False) after the backward pass",
        )


def _refuse_fsdp(model: nn.Module) -> None:
    if is_sharded(model):
        raise PassError(
            _WHO,
            "the model is sharded by fully_shard, which averages gradients itself",
            hint="leave schedule.gradients out, and call fxskip.average_gradients(model) after the backward pass",
        )
