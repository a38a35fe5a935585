"""One process that measures as if it were one of several: the others are its mirror images.

A mirror image has as many rows for this rank as this rank has for it. So the process group needs no other process: what
arrives is what was sent. The rows themselves travel, for their time is what is measured: those of another rank lie in
the host's pinned memory, and come from there by the GPU's copy engine, over PCIe.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import HashStore

from fxskip.collectives.copy_engine import Slots, use_slots
from fxskip.collectives.failures import Work
from fxskip.collectives.peer_memory import enqueued

BACKEND = "mirror"
HOST_COPIES = ("memcpy htod",)
"""How the profiler names the copies that bring the rows of other ranks."""
_DTYPE, _SPREAD = torch.bfloat16, 0.02
"""Type and standard deviation of the numbers that other ranks seem to send."""


class _Done(dist.Work):
    """Of collectives that are done when they are issued."""

    def wait(self, timeout: timedelta = timedelta()) -> bool:
        """Nothing to wait for."""
        return True

    def is_completed(self) -> bool:
        """Always."""
        return True

    def get_future(self) -> torch.futures.Future[None]:
        """One that is done."""
        done: torch.futures.Future[None] = torch.futures.Future()
        done.set_result(None)
        return done


class MirrorGroup(dist.ProcessGroup):
    """Collectives of rank 0 of several, whose others do what it does. Sums, which would be wrong, are not here."""

    def __init__(self, options: Any, _: Any = None) -> None:
        super().__init__(options.group_rank, options.group_size)  # type: ignore[call-arg]  # torch's stub has a store first
        self._name: str = options.group_id
        self._done = _Done()  # torch holds what is returned no longer than its C++ part

    def getBackendName(self) -> str:
        """What torch asks for."""
        return BACKEND

    @property
    def group_name(self) -> str:  # type: ignore[override]
        """By which torch finds the group; a group that is written in Python has to know."""
        return self._name

    def alltoall_base(
        self, output: Tensor, given: Tensor, received: list[int], sent: list[int], _: Any = None
    ) -> dist.Work:
        """What is kept, and as much from each image as goes there."""
        if received != sent:
            raise ValueError(f"a mirror image sends {sent}, and {received} are to be received")
        output.copy_(given)
        return self._done

    def allgather(  # type: ignore[override]
        self, outputs: list[list[Tensor]], given: list[Tensor], _: Any = None
    ) -> dist.Work:
        """Each image has the same."""
        for images, own in zip(outputs, given, strict=True):
            for image in images:
                image.copy_(own)
        return self._done

    def barrier(self, opts: Any = None) -> dist.Work:
        """All are here."""
        return self._done


class HostMemory:
    """`PeerMemory` in which the other ranks' bytes lie in the host's pinned memory. They hold small normal numbers."""

    def __init__(self, ranks: int, device: torch.device) -> None:
        self.rank, self.ranks, self.device = 0, ranks, device
        self._zero = False
        self._stream = torch.cuda.Stream(device, priority=-1)
        self._parts: tuple[Tensor, ...] = ()

    def allocate(self, size: int) -> None:
        """As `PeerMemory` has it."""
        self._stream.synchronize()
        self._parts = ()
        with torch.inference_mode(False):
            own = torch.empty(size, dtype=torch.uint8, device=self.device)
            others = [self._images(size) for _ in range(1, self.ranks)]
        self._parts = (own, *others)

    def _images(self, size: int) -> Tensor:
        numbers = torch.zeros(size // _DTYPE.itemsize, dtype=_DTYPE, device=self.device)
        if not self._zero:
            numbers.normal_(std=_SPREAD)
        return numbers.view(torch.uint8).cpu().pin_memory()

    def zero(self) -> None:
        """Have the other ranks send zeros from now on."""
        self._stream.synchronize()
        self._zero = True
        for part in self._parts[1:]:
            part.zero_()

    def of(self, rank: int) -> Tensor:
        """[size] uint8: the bytes that `rank` owns."""
        return self._parts[rank]

    def run(self, job: Callable[[], None]) -> Work:
        """Enqueue what `job` enqueues on a stream of high priority."""
        return enqueued(job, self._stream)

    def meet(self) -> None:
        """The others are there already."""


@contextmanager
def mirrored(ranks: int) -> Iterator[HostMemory | None]:
    """The default process group is that of rank 0 of `ranks` and its images, in the place of the one there is; in the
    end there is none.

    On a GPU rows that copy engines move come from the memory that is given. Without one they are what was sent.
    """
    if dist.is_initialized():
        dist.destroy_process_group()
    if BACKEND not in dist.Backend.backend_list:
        dist.Backend.register_backend(BACKEND, MirrorGroup, extended_api=True, devices=["cpu", "cuda"])
    dist.init_process_group(BACKEND, store=HashStore(), rank=0, world_size=ranks)
    memory = None
    if torch.cuda.is_available():
        memory = HostMemory(ranks, torch.device("cuda", torch.cuda.current_device()))
        use_slots(dist.group.WORLD, Slots(memory))
    try:
        yield memory
    finally:
        dist.destroy_process_group()
