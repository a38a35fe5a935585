"""What the simulator knows of a machine beside the costs of tasks: how lanes disturb each other, and the host."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from fxskip.errors import ScheduleError
from fxskip.schedule.hardware import Hardware
from fxskip.schedule.tasks import Task, WorkKind
from fxskip.transport import Transport


@dataclass(frozen=True)
class Contention:
    """How a collective and the kernels beside it disturb each other. The default: not at all."""

    start_behind_long_us: float = 0.0
    """A collective that becomes ready while a kernel of long thread blocks runs (GEMM, attention) gets its SMs when
    that kernel drains: after this time, or the rest of the task if that is less."""
    start_behind_short_us: float = 0.0
    """The same behind a kernel of short blocks (residual add, norm, activation)."""
    stretch: Mapping[WorkKind, float] = field(
        default_factory=lambda: {"matrix": 1.0, "attention": 1.0, "elementwise": 1.0}
    )
    """Time of a kernel beside the collective, in times alone."""
    collective_stretch: float = 1.0
    """Time of the collective beside compute, in times alone."""

    def start_delay_us(self, task: Task, done_us: float) -> float:
        """For a collective that becomes ready when `task` has run for `done_us`; the rest of the task not counted."""
        if task.work == "elementwise" or (task.kernel == "short" and done_us <= self.start_behind_short_us):
            return self.start_behind_short_us
        return self.start_behind_long_us


@dataclass(frozen=True)
class Machine:
    """Ranks that run one program each. The default is the scheduler's simple model: lanes leave each other alone."""

    ranks: int = 1
    contention: Mapping[str, Contention] = field(default_factory=dict)
    """By lane; for a lane that is not named nothing is modelled."""
    launch_us: float = 0.0
    """Host time of each step, in addition to what its task says."""


def contention_of(hardware: Hardware, transport: Transport) -> Contention | None:
    """The hardware file's figures for that transport; None where it has none, so that nothing can be modelled."""
    found = hardware.contention.get(transport)
    if found is None:
        return None
    return Contention(
        1e6 * found.start_behind_long_s.value,
        1e6 * found.start_behind_short_s.value,
        {
            "matrix": found.matrix_stretch.value,
            "attention": found.attention_stretch.value,
            "elementwise": found.elementwise_stretch.value,
        },
        found.collective_stretch.value,
    )


def check_machine(machine: Machine) -> None:
    """Raise ScheduleError for values that no machine has."""
    faults = [
        (machine.ranks < 1, f"ranks is {machine.ranks}", "write 1 or more"),
        (machine.launch_us < 0, f"launch_us is {machine.launch_us}", "write microseconds, 0 or more"),
    ]
    for lane, one in machine.contention.items():
        stretches = (*one.stretch.values(), one.collective_stretch)
        delays = (one.start_behind_long_us, one.start_behind_short_us)
        faults.append((min(stretches) < 1, f"a stretch on the lane {lane!r} is below 1", "write 1 or more"))
        faults.append((min(delays) < 0, f"a start delay on the lane {lane!r} is below 0", "write 0 or more"))
    for is_wrong, found, hint in faults:
        if is_wrong:
            raise ScheduleError("simulate", found, where="Machine", hint=hint)
