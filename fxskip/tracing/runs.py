"""Training steps of a model under what is measured: as it is, blocking, and with nothing sent."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fxskip.collectives.measuring import sending_nothing, waiting_at_once, watched_by
from fxskip.errors import PassError
from fxskip.schedule.order_region import RegionSchedule
from fxskip.tracing.clocks import Clock, finish
from fxskip.tracing.kernels import kernels_of
from fxskip.tracing.recorder import Recorder
from fxskip.tracing.records import Kernel, Phase, StepRecord

T = TypeVar("T")
Mode = Literal["as it is", "blocking", "nothing sent"]
MODES: dict[Mode, Callable[[], AbstractContextManager[None]]] = {
    "as it is": nullcontext,
    "blocking": waiting_at_once,
    "nothing sent": sending_nothing,
}


@dataclass(frozen=True)
class Times:
    """Of one step without anybody watching, in microseconds."""

    forward_us: float
    step_us: float

    def of(self, phase: Phase | Literal["step"]) -> float:
        """The time of a phase, or of all of it."""
        return {
            "forward": self.forward_us, "backward": self.step_us - self.forward_us, "step": self.step_us
        }[phase]  # fmt: skip


@dataclass(frozen=True)
class ModeRuns:
    """What one rank measured in one mode, step by step."""

    times: tuple[Times, ...]
    records: tuple[StepRecord, ...]
    kernels: tuple[tuple[Kernel, ...], ...]
    """Of steps under the profiler; empty without a GPU."""


@dataclass(frozen=True)
class Stepper:
    """Runs steps of `model` on `batch`."""

    model: nn.Module
    batch: Mapping[str, Any]
    device: torch.device
    gradients: bool
    together: bool
    """Other ranks run the same steps."""
    gradient: Tensor | None = None
    """Of the model's first result; None for the gradient of the loss, or a constant one."""
    exchanges: tuple[str, ...] = ()
    """How names of further pieces of a GPU's work begin that communicate, in small letters."""

    def run(self, between: Callable[[], None] = lambda: None) -> None:
        """One step: forward and, with gradients, backward; `between` is called after each of the two."""
        with torch.set_grad_enabled(self.gradients):
            out = self.model(**self.batch)
            if self.gradients:
                target = differentiable(out)
            between()
            if not self.gradients:
                return
            gradient = self.gradient
            if (
                gradient is None
            ):  # of a loss 1; else a fixed one, for what a loss would cost is not asked here
                gradient = torch.full_like(target, 1 / target.numel())
            target.backward(gradient)
        del out, target
        between()
        self.forget_gradients()

    def forget_gradients(self) -> None:
        """Drop what the step left."""
        for parameter in self.model.parameters():
            parameter.grad = None

    def meet(self) -> None:
        """Wait for all ranks, so that a step begins on all of them at once."""
        if self.together:
            dist.barrier()

    def timed(self, *, behind_another: bool = False) -> Times:
        """A step of which nothing but its time is known.

        behind_another   right after another one: a GPU then has its clock, and the host is ahead as it is in training
        """
        self.meet()
        if behind_another:
            self.run()
        clock = Clock.begin(self.device, idle=not behind_another)
        marks = []
        self.run(lambda: marks.append(clock.mark()))
        finish(self.device)
        ends = [clock.us(mark) for mark in marks]
        return Times(ends[0], ends[-1])

    def recorded(self) -> tuple[StepRecord, dict[int, RegionSchedule | None]]:
        """A step with each task and collective, and what its layers were scheduled by."""
        self.meet()
        recorder = Recorder(self.device)
        with watched_by(recorder):
            self.run(recorder.end_phase)
        return recorder.record(), recorder.schedules

    def profiled(self) -> tuple[Kernel, ...]:
        """A step under the profiler of PyTorch."""
        self.meet()
        return kernels_of(self.run, self.exchanges)


def run_modes(
    stepper: Stepper, modes: Sequence[Mode], steps: int
) -> tuple[dict[Mode, ModeRuns], dict[int, RegionSchedule | None]]:
    """`steps` steps in each mode, in turn, and what the layers were scheduled by.

    All ranks call it. Two steps a mode go before, for captures and allocations.
    """
    found: dict[Mode, list[tuple[Times, StepRecord, tuple[Kernel, ...]]]] = {mode: [] for mode in modes}
    schedules: dict[int, RegionSchedule | None] = {}
    on_gpu = stepper.device.type == "cuda"
    with kept_gradients(stepper.model):
        for number in range(-1, steps):
            for mode in modes:
                with MODES[mode]():
                    times = stepper.timed()
                    record, schedules = stepper.recorded()
                    kernels = stepper.profiled() if on_gpu else ()
                if number >= 0:
                    found[mode].append((times, record, kernels))
    runs = {
        mode: ModeRuns(
            tuple(times for times, _, _ in rows),
            tuple(record for _, record, _ in rows),
            tuple(kernels for _, _, kernels in rows) if on_gpu else (),
        )
        for mode, rows in found.items()
    }
    return runs, schedules


def gathered(mine: T) -> list[T]:
    """What all ranks of the default group have, by rank."""
    found: list[T | None] = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    return cast(list[T], found)


def median_over_ranks(per_rank: Sequence[Sequence[float]]) -> float:
    """Of steps, each of which is as long as on its slowest rank, the median."""
    found: float = statistics.median(max(step) for step in zip(*per_rank, strict=True))
    return found


@contextmanager
def kept_gradients(model: nn.Module) -> Iterator[None]:
    """Put the gradients that parameters have aside, and back in the end."""
    held = {p: p.grad for p in model.parameters() if p.grad is not None}
    for parameter in held:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter in model.parameters():
            parameter.grad = held.get(parameter)


def differentiable(out: Any) -> Tensor:
    """The loss that a model returns, or else its first result.

    Raises PassError where neither has a gradient.
    """
    if isinstance(out, Tensor):
        found: Any = out
    elif (loss := getattr(out, "loss", None)) is not None:
        found = loss
    else:
        values = out.values() if isinstance(out, Mapping) else out if isinstance(out, Sequence) else ()
        found = next((v for v in values if isinstance(v, Tensor) and v.is_floating_point()), None)
    if not isinstance(found, Tensor) or not found.requires_grad:
        raise PassError(
            "trace",
            f"the model returned {type(out).__name__}, in which nothing has a gradient",
            hint="pass a batch with labels, unfreeze what trains, or trace it in eval mode",
        )
    return found
