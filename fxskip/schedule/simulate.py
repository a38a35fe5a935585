"""A machine that runs the steps of a host order: streams, ranks that meet in collectives, contention.

Written apart from the scheduler, and knows nothing of its rules: what it is given runs as CUDA and NCCL would run it.

    host        does its steps in order; each costs its launch time
    compute     one queue a rank, in host order. A wait in it stops it until the collective is done on this rank
    lanes       one queue for each group and rank. A collective may start when everything that the host had enqueued
                on the compute stream before it is done, gets its SMs after a start delay if a kernel is running, and
                moves data while all ranks are in it
    contention  a kernel beside a collective, and a collective beside a kernel, take longer by a factor

Streams know nothing of data: a kernel runs when its turn comes, and `faults` says if what it reads was not there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fxskip.errors import ScheduleError
from fxskip.schedule.machine import Machine, check_machine
from fxskip.schedule.rank import Rank
from fxskip.schedule.steps import Step
from fxskip.schedule.tasks import TaskGraph
from fxskip.schedule.transfer import NEVER, Fault, Interval, Transfer


@dataclass(frozen=True)
class Simulation:
    """What happened."""

    step_us: float
    """Until the last rank is done."""
    intervals: tuple[tuple[Interval, ...], ...]
    """Of each rank, by start."""
    faults: tuple[Fault, ...]
    peak_bytes: int
    """Most bytes in flight on a rank: of each collective from its issue in the compute stream to the end of its last
    consumer, or of the step if it has none. A collective that reads it takes it over at its own issue."""

    def require_sound(self) -> Simulation:
        """Raise ScheduleError where a rank hung, read early, or did a task twice or never."""
        if self.faults:
            raise ScheduleError(
                "simulate",
                self.faults[0].text,
                where="\n".join(map(str, self.faults[:10])),
                hint="run the steps of a Schedule as they are, and the same ones on every rank",
            )
        return self


def simulate(
    graph: TaskGraph,
    steps: Sequence[Step] | Sequence[Sequence[Step]],
    machine: Machine | None = None,
    *,
    communication: bool = True,
    rank_costs: Sequence[Mapping[str, float]] = (),
) -> Simulation:
    """Run the steps on every rank of the machine (the default has one), or those of each rank on it.

    communication  False: a collective takes no time and disturbs nobody
    rank_costs     costs in microseconds that differ from the graph's, by name, one mapping for each rank

    Raises ScheduleError for arguments that contradict each other; what goes wrong in the run is in `faults`.
    """
    machine = machine or Machine()
    check_machine(machine)
    programs = _programs(steps, machine.ranks)
    if rank_costs and len(rank_costs) != machine.ranks:
        raise ScheduleError(
            "simulate",
            f"{len(rank_costs)} rank_costs for {machine.ranks} ranks",
            hint="give one for each rank",
        )
    costs = [graph.with_costs(own) for own in rank_costs] or [graph] * machine.ranks
    transfers: dict[tuple[str, int], Transfer] = {}
    ranks = [
        Rank(number, graphs, program, machine, transfers, communication)
        for number, (graphs, program) in enumerate(zip(costs, programs, strict=True))
    ]
    now = 0.0
    while True:
        while sum(rank.settle(now) for rank in ranks):  # each of them
            pass
        then = min((rank.next_event(now) for rank in ranks), default=NEVER)
        if then == NEVER:
            break
        for rank in ranks:
            rank.advance(then - now)
        for transfer in transfers.values():
            transfer.advance(then - now)
        now = then
    intervals = tuple(
        tuple(sorted(rank.intervals, key=lambda one: (one.start_us, one.end_us))) for rank in ranks
    )
    return Simulation(
        max((one.end_us for own in intervals for one in own), default=0.0),
        intervals,
        tuple(fault for rank in ranks for fault in rank.conclude()),
        max(rank.peak_bytes for rank in ranks),
    )


def _programs(steps: Sequence[Step] | Sequence[Sequence[Step]], ranks: int) -> list[Sequence[Step]]:
    """The steps of each rank."""
    flat = [one for one in steps if isinstance(one, Step)]
    if len(flat) == len(steps):
        return [flat] * ranks
    own = [one for one in steps if not isinstance(one, Step)]
    if len(own) != len(steps) or len(own) != ranks:
        raise ScheduleError(
            "simulate",
            f"steps of {len(own)} ranks for a machine of {ranks}",
            hint="give one list of steps for all ranks, or one for each, and Machine(ranks=...)",
        )
    return own
