"""The exchange of rows by copies between devices, on their copy engines, so that compute keeps its multiprocessors.

The copies of a rank's own rows, within one device, do take some of them.

A rank copies the rows for each other rank into a slot of its own memory, meets the others, and copies what they have
for it out of their slots:

    rows ──copy──▶ own slot ──meet──▶ peers' slots ──copy──▶ buffer          own rows ──copy──▶ buffer

A slot has one section for each other rank, all equally large, so that everybody knows where to read: the counts of rows
that ranks exchange beforehand say how many there are for whom, and the most that any rank has for another.

There are two slots, used in turn, and one meeting an exchange. It says that rows may be read, and also that the slot of
the exchange before it may be written again: each rank comes to a meeting behind its copies for the exchange before.

    rank 0    write slot 0 ─ meet ─ read slot 0 ─ write slot 1 ─ meet ─ read slot 1 ─ write slot 0
    rank 1    write slot 0 ─ meet ─ read slot 0 ─ write slot 1 ─ meet ─ ...
                                                                  └─ has read slot 0: rank 0 may write it
"""

# R rows, D width; sizes in bytes

from __future__ import annotations

import weakref
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from fxskip.collectives.all_to_all import AllToAll
from fxskip.collectives.failures import Work
from fxskip.collectives.landing import buffers_are_poisoned
from fxskip.collectives.peer_memory import (
    PeerMemory,
    SymmetricMemory,
    impossible,
    require_device_mesh,
    require_peers,
    warn_without_access,
)
from fxskip.errors import CollectiveError, PassError, first_line

SLOTS = 2
"""With two, the meeting of one exchange tells that the slot of the one before is free."""
_ROOM = 1.25
"""A slot that has to grow is made larger than needed by this factor, for each growth holds up all ranks."""
_ALIGNMENT = 512
"""Bytes. A section begins where copies are fastest, whatever the size of a row."""
_POISON = 0xFF
"""A byte; as a number of any floating-point type, bytes of it are NaN."""


class Slots:
    """The slots of one group in the memory that its ranks share. They grow when rows need it, and never shrink."""

    def __init__(self, memory: PeerMemory) -> None:
        self._memory = memory
        self._section = 0
        self._turn = 0

    @property
    def device(self) -> torch.device:
        """Of the rows that can be sent."""
        return self._memory.device

    def start(
        self, rows: Tensor, buffer: Tensor, sent: tuple[int, ...], received: tuple[int, ...], most: int
    ) -> Work:
        """Queue one exchange; all ranks of the group call it equally often, in the same order.

        rows     [sum(sent), ...], contiguous: `sent[r]` for rank r
        buffer   [sum(received), ...], contiguous: `received[r]` from rank r
        most     rows that a rank has for another at most, over all pairs of ranks: the same number on all of them

        Neither tensor may be freed or written before the work is done. Raises CollectiveError where more rows are to
        be sent or received than `most` says, or where they are on another device than the slots, and a RuntimeError of
        torch where there is no memory for larger slots.
        """
        memory, me = self._memory, self._memory.rank
        _require_fit(rows, memory.device, sent, received, me, most)
        leaving, arriving = _parts(rows, sent), _parts(buffer, received)
        own = (arriving[me], leaving[me])
        needed = most * rows.element_size() * prod(rows.shape[1:])
        if not needed:
            return memory.run(lambda: _copy([own]))
        self._reserve(needed)
        self._turn = (self._turn + 1) % SLOTS
        # Each rank begins with its neighbour, so that no rank is read by all at once.
        others = [(me + step) % memory.ranks for step in range(1, memory.ranks)]
        to_slot = [(self._section_of(me, r)[: leaving[r].numel()], leaving[r]) for r in others]
        read = [self._section_of(r, me) for r in others]
        from_slots = [
            (arriving[r], part[: arriving[r].numel()]) for r, part in zip(others, read, strict=True)
        ]
        poison = buffers_are_poisoned()

        def job() -> None:
            _copy(to_slot)
            memory.meet()
            _copy([own, *from_slots])
            if poison:
                _fill(read)

        return memory.run(job)

    def _reserve(self, needed: int) -> None:
        """Have sections of `needed` bytes, the same number on all ranks."""
        if needed <= self._section:
            return
        section = _aligned(int(needed * _ROOM))
        self._memory.allocate(SLOTS * (self._memory.ranks - 1) * section)
        self._section = section
        if buffers_are_poisoned():
            own = self._memory.of(self._memory.rank)
            self._memory.run(lambda: _fill([own]))

    def _section_of(self, owner: int, reader: int) -> Tensor:
        """Where `owner` has bytes for `reader`, in the slot whose turn it is."""
        place = reader - (reader > owner)  # nobody is their own reader
        begin = (self._turn * (self._memory.ranks - 1) + place) * self._section
        return self._memory.of(owner)[begin : begin + self._section]


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _require_fit(
    rows: Tensor, device: torch.device, sent: tuple[int, ...], received: tuple[int, ...], me: int, most: int
) -> None:
    if rows.device != device:
        raise CollectiveError(
            "copy_engine",
            f"the rows are on {rows.device}, and the slots of this process on {device}",
            hint=f"move the model and its inputs to {device}, which was the current device when the model was spread",
        )
    for what, counts in (("send to", sent), ("receive from", received)):
        for rank, count in enumerate(counts):
            if rank != me and count > most:
                raise CollectiveError(
                    "copy_engine",
                    f"{count} rows to {what} rank {rank} of the group, and the slots are for {most}",
                    hint="this is a defect in fxskip: please report it",
                )


def _parts(rows: Tensor, counts: tuple[int, ...]) -> list[Tensor]:
    """The bytes of the rows of each rank."""
    ends = list(accumulate(counts))
    return [
        rows[end - count : end].view(-1).view(torch.uint8) for end, count in zip(ends, counts, strict=True)
    ]


def _copy(pairs: list[tuple[Tensor, Tensor]]) -> None:
    for to, source in pairs:
        if source.numel():
            to.copy_(source, non_blocking=True)


def _fill(sections: list[Tensor]) -> None:
    for section in sections:
        section.fill_(_POISON)


@dataclass(frozen=True)
class CopyExchange(AllToAll):
    """`AllToAll` by copies between devices."""

    most: int
    """Rows that a rank has for another at most, over all pairs of ranks; the way back has the same."""

    def send(self, buffer: Tensor, rows: Tensor) -> Work:
        """Start it."""
        return slots_of(self.group).start(rows, buffer, self.sent, self.received, self.most)


_SLOTS: weakref.WeakKeyDictionary[Any, Slots] = weakref.WeakKeyDictionary()


def slots_of(group: Any) -> Slots:
    """Those that `use_slots` was given."""
    return _SLOTS[group]


def use_slots(group: Any, slots: Slots) -> None:
    """Have the exchanges of `group` by copies go through `slots`."""
    _SLOTS[group] = slots


def tried(memory: PeerMemory) -> Slots:
    """Slots in `memory`, after a first exchange of a row to and from each rank.

    Raises NoCopies where wrong rows arrive, and a RuntimeError of torch where there is no such memory.
    """
    me, ranks = memory.rank, memory.ranks
    slots, ones = Slots(memory), (1,) * memory.ranks
    rows = torch.tensor([[me * ranks + to] for to in range(ranks)], device=memory.device)
    buffer = torch.full_like(rows, -1)
    slots.start(rows, buffer, ones, ones, 1).wait()
    arrived, expected = buffer.flatten().tolist(), [source * ranks + me for source in range(ranks)]
    if arrived != expected:
        raise impossible(f"in a first exchange the others sent {expected}, and {arrived} arrived")
    return slots


def _raise_everywhere(group: Any, error: Exception | None) -> None:
    """Raise on all ranks where one had an error: the others would wait for it in their first exchange."""
    mine = None if error is None else f"rank {dist.get_rank()}: {first_line(error)}"
    everyone: list[str | None] = [mine] * dist.get_world_size(group)
    dist.all_gather_object(everyone, mine, group=group)
    if failed := [one for one in everyone if one is not None]:
        raise impossible("the ranks cannot read each other's memory", where="\n".join(failed)) from error


def connect_devices(mesh: DeviceMesh, *, warns: bool) -> None:
    """Have the ranks of `mesh`, which has one axis, exchange rows by copies; once for each group.

    warns   as `slots_between_devices` has it

    Raises NoCopies, on all of them alike.
    """
    group = mesh.get_group()
    if group not in _SLOTS:
        use_slots(group, slots_between_devices(mesh, warns=warns))


def slots_between_devices(mesh: DeviceMesh, *, warns: bool) -> Slots:
    """Slots in symmetric memory of the ranks of `mesh`, which has one axis, each time new ones.

    warns   where PyTorch says that a device has no access to another's memory

    Raises NoCopies, on all ranks alike.
    """
    require_device_mesh(mesh)
    group, device = mesh.get_group(), torch.device("cuda", torch.cuda.current_device())
    names = require_peers(group, device)
    if warns:
        warn_without_access(device, names)
    slots, failed = None, None
    try:
        slots = tried(SymmetricMemory(group, device))
    except (RuntimeError, PassError) as error:
        failed = error
    _raise_everywhere(group, failed)
    assert slots is not None
    return slots
