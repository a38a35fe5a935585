"""`runtime.transport: measured`: the exchange of rows by the process group against that by copies between devices.

What counts is not the exchange alone but the time until it and the products beside it are done: what stays exposed, and
what the products lose to it.

    device of a rank    products │ start of the exchange ─ products ─ wait │
                       (lead-in) └──────────── the time taken ─────────────┘

The products of the lead-in keep the device busy while the host enqueues what follows, as in a step. The two are timed
in turn, round by round, on all ranks of the mesh together.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from fxskip.collectives.all_to_all import AllToAll
from fxskip.collectives.copy_engine import Slots, slots_between_devices
from fxskip.collectives.failures import Work
from fxskip.collectives.peer_memory import NoCopies
from fxskip.errors import first_line
from fxskip.runtime.same_everywhere import gather
from fxskip.schedule.costs import ModelCosts
from fxskip.transport import Load, Moves, TransportChoice, faster, without_copies

TOKENS = 4096
"""Of each rank, whose rows are exchanged."""
LARGEST_BYTES = 256 << 20
"""Of a tensor. There are four of at most this size on a device, and slots of at most two and a half times as much."""
ROUNDS = 15
"""Of one sample of each kind; odd, so that a median is one of them."""
_UNTIMED = 2
"""Rounds before those: allocations, kernels that are loaded, connections that are made."""

Issue = Callable[[], Work]


def measured(mesh: DeviceMesh, axis: str, group: Moves, load: Callable[[], Load]) -> TransportChoice:
    """What moves the rows of experts on `axis` faster; the same on all ranks of `mesh`, which call it together.

    group   what the process group moves rows by; it is taken where copies are impossible
    load    called where they are not
    """
    slots, reason = None, None
    try:
        slots = slots_between_devices(mesh[axis], warns=False)
    except NoCopies as error:
        reason = f"copies between devices are impossible: {error.reason}"
    # Other groups of the axis may lack what this one has.
    if found := _obstacle_of_any(reason, mesh):
        return without_copies(group, found)
    assert slots is not None
    return _compared(mesh, axis, group, load(), slots)


def _compared(mesh: DeviceMesh, axis: str, group: Moves, load: Load, slots: Slots) -> TransportChoice:
    """As `measured`, where both are possible; `slots` are those of the ranks of `axis`."""
    bench, failed = None, None
    try:
        bench = _Bench(mesh[axis], load, slots)
    except torch.OutOfMemoryError as error:
        failed = f"rank {dist.get_rank()} has no memory to time copies between devices: {first_line(error)}"
    if found := _obstacle_of_any(failed, mesh):
        return without_copies(group, found)
    assert bench is not None
    issues = (bench.by_group, bench.by_copies)
    for issue in issues * _UNTIMED:
        bench.sample_ms(issue)
    samples: tuple[list[float], list[float]] = ([], [])
    for number in range(ROUNDS):
        for which in (0, 1) if number % 2 else (1, 0):
            dist.barrier(mesh[axis].get_group())
            samples[which].append(bench.sample_ms(issues[which]))
    everyone = list(gather(samples, mesh).values())
    return faster(group, load, *([own[which] for own in everyone] for which in (0, 1)))


def _obstacle_of_any(mine: str | None, mesh: DeviceMesh) -> str | None:
    """That of the first rank that has one, on all ranks; None where no rank has."""
    return next((one for one in gather(mine, mesh).values() if one is not None), None)


def load_of(costs: ModelCosts, experts: nn.Module, ranks: int) -> Load:
    """What is timed for a student.

    experts   the module of its first layer's routed experts, with all of them
    ranks     that share them
    """
    block = next(one for one in costs.blocks if one.experts != 0)
    choices = block.experts_per_token or 1
    matrices = tuple((p.shape[1], p.shape[2]) for p in experts.parameters() if p.dim() == 3)
    width = _width(matrices, block.hidden_size)
    dtype: torch.dtype = getattr(torch, costs.dtype)
    widest = max(width, *(size for matrix in matrices for size in matrix))
    fitting = LARGEST_BYTES // (widest * dtype.itemsize)
    rows = max(1, min(TOKENS * choices, fitting) // ranks) * ranks
    return Load(TOKENS, choices, rows, width, costs.dtype, matrices)


def _width(matrices: Sequence[tuple[int, int]], stream: int) -> int:
    """Of a row: the stream's, unless experts work on another, which all their matrices then have."""
    if not matrices or all(stream in matrix for matrix in matrices):
        return stream
    common = set(matrices[0]).intersection(*matrices[1:])
    return max(common, default=stream)


class _Bench:
    """The tensors of a load on this rank's device; random, from a generator of their own."""

    def __init__(self, axis: DeviceMesh, load: Load, slots: Slots) -> None:
        ranks, device = axis.size(), slots.device
        self._group, self._device, self._slots = axis.get_group(), device, slots
        self._most = load.rows // ranks
        self._counts = (self._most,) * ranks
        dtype: torch.dtype = getattr(torch, load.dtype)
        generator = torch.Generator(device).manual_seed(0)

        def drawn(*size: int) -> Tensor:
            return torch.randn(size, generator=generator, device=device, dtype=dtype)

        self._rows = drawn(load.rows, load.width)
        self._buffer = torch.empty_like(self._rows)
        left = drawn(load.rows * max((rows for rows, _ in load.matrices), default=0))
        out = left.new_empty(load.rows * max((columns for _, columns in load.matrices), default=0))
        self._products = [
            (left[: load.rows * a].view(-1, a), drawn(a, b) / a**0.5, out[: load.rows * b].view(-1, b))
            for a, b in load.matrices
        ]

    def by_group(self) -> Work:
        """Start an exchange by the process group."""
        return AllToAll(self._group, self._counts, self._counts).send(self._buffer, self._rows)

    def by_copies(self) -> Work:
        """Start one by copies."""
        return self._slots.start(self._rows, self._buffer, self._counts, self._counts, self._most)

    def multiply(self) -> None:
        """The products, one after the other."""
        for left, right, out in self._products:
            torch.mm(left, right, out=out)

    def sample_ms(self, issue: Issue) -> float:
        """From the start of an exchange until it and the products beside it are done."""
        clock = _HostClock() if self._device.type == "cpu" else _DeviceClock(self._device)
        self.multiply()
        clock.begin()
        work = issue()
        self.multiply()
        work.wait()
        return clock.end_ms()


class _HostClock:
    """For devices that are done when the host is."""

    def begin(self) -> None:
        self._begun = time.perf_counter()

    def end_ms(self) -> float:
        return 1e3 * (time.perf_counter() - self._begun)


class _DeviceClock:
    """Between two places of the current stream."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.current_stream(device)
        self._events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]

    def begin(self) -> None:
        self._events[0].record(self._stream)

    def end_ms(self) -> float:
        """Waits for the device."""
        self._events[1].record(self._stream)
        self._events[1].synchronize()
        return float(self._events[0].elapsed_time(self._events[1]))
