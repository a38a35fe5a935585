"""Memory of each rank that all ranks of a group can read, over PyTorch's symmetric memory, and where it is to be had.

Multicast is not used: nothing here is sent to all ranks at once, and setting it up can fail where plain access works.
"""

from __future__ import annotations

import os
import socket
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _get_default_timeout

from fxskip.collectives.failures import Work
from fxskip.errors import PassError

_ASKED = "runtime.transport: copy_engine: "
_OVERLAPPING = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"
"""PyTorch's permission for several ranks on one device, which only tests have a use for."""


class PeerMemory(Protocol):
    """Bytes that each rank of a group has and all ranks can read, and a queue for what is done with them.

    All ranks call `allocate` equally often with the same sizes, and queue equally many meetings.
    """

    @property
    def rank(self) -> int:
        """Of this process in the group."""

    @property
    def ranks(self) -> int:
        """In the group."""

    @property
    def device(self) -> torch.device:
        """Of this rank's bytes, and of what is copied to and from them."""

    def allocate(self, size: int) -> None:
        """Have each rank own `size` bytes, in the place of what it had; what is queued is done before."""

    def of(self, rank: int) -> Tensor:
        """[size] uint8: those that `rank` owns."""

    def run(self, job: Callable[[], None]) -> Work:
        """Queue what `job` does: behind what was queued before, and behind what the caller's stream has been given."""

    def meet(self) -> None:
        """In a job: what follows waits until all ranks have come here; what they did before is seen by all."""


class _Copies:
    """Work of the queue up to an event; whoever waits has their stream wait, not the host."""

    def __init__(self, event: torch.cuda.Event, device: torch.device) -> None:
        self._event, self._device = event, device

    def wait(self, timeout: timedelta = timedelta()) -> bool:
        torch.cuda.current_stream(self._device).wait_event(self._event)
        return True

    def is_completed(self) -> bool:
        return bool(self._event.query())


def enqueued(job: Callable[[], None], stream: torch.cuda.Stream) -> Work:
    """What `job` enqueues, on `stream`, behind what the current stream of its device has now."""
    stream.wait_stream(torch.cuda.current_stream(stream.device))
    with torch.cuda.stream(stream):
        job()
        return _Copies(stream.record_event(), stream.device)


class SymmetricMemory:
    """`PeerMemory` of CUDA devices that reach each other's memory. The queue is a stream of high priority.

    Copies between devices run on copy engines. A meeting is a kernel of one block, which signals to each rank and
    waits for the signal of each; high priority has it start beside larger kernels.
    """

    def __init__(self, group: Any, device: torch.device) -> None:
        self.rank, self.ranks, self.device = dist.get_rank(group), dist.get_world_size(group), device
        self._group_name = group.group_name  # not the group, which would then live as long as this
        self._patience_ms = patience_ms(group, device)
        self._stream = torch.cuda.Stream(device, priority=-1)
        self._handle: Any = None
        self._parts: tuple[Tensor, ...] = ()

    def allocate(self, size: int) -> None:
        """As `PeerMemory` has it. Raises a RuntimeError of torch where a rank cannot map the memory of another."""
        from torch._C._distributed_c10d import _SymmetricMemory
        from torch.distributed._symmetric_memory import rendezvous

        self._stream.synchronize()
        self._parts, self._handle = (), None
        # Inference mode would make tensors that no later training step may write to.
        with torch.inference_mode(False), torch.cuda.device(self.device), _without_multicast():
            # Not symmetric_memory.empty, whose memory pool would keep what is replaced here.
            own = _SymmetricMemory.empty_strided_p2p((size,), (1,), torch.uint8, self.device)
            self._handle = rendezvous(own, self._group_name)
            self._parts = tuple(
                own if rank == self.rank else self._handle.get_buffer(rank, (size,), torch.uint8)
                for rank in range(self.ranks)
            )

    def of(self, rank: int) -> Tensor:
        """[size] uint8: the bytes that `rank` owns."""
        return self._parts[rank]

    def run(self, job: Callable[[], None]) -> Work:
        """Enqueue what `job` enqueues on the stream."""
        return enqueued(job, self._stream)

    def meet(self) -> None:
        """Have the stream wait for those of all ranks."""
        self._handle.barrier(channel=0, timeout_ms=self._patience_ms)


def patience_ms(group: Any, device: torch.device) -> int:
    """How long a rank waits for the others: the timeout that `group` has now, as init_process_group was told.

    Of a backend that does not say (not NCCL or gloo, or torch's wrapper for debugging), PyTorch's default.
    """
    options = getattr(group._get_backend(device), "options", None)  # torch.distributed shows it nowhere else
    timeout: timedelta = (
        _get_default_timeout(dist.get_backend(group)) if options is None else options._timeout
    )
    return max(1, round(timeout / timedelta(milliseconds=1)))


@contextmanager
def _without_multicast() -> Iterator[None]:
    name = "TORCH_SYMM_MEM_DISABLE_MULTICAST"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def require_device_mesh(mesh: DeviceMesh) -> None:
    """Raise NoCopies where `mesh` is not one of CUDA devices."""
    if mesh.device_type != "cuda":
        raise impossible(
            f"the mesh is one of {mesh.device_type} devices",
            hint='init_process_group("nccl") with a CUDA device for each process, or leave runtime.transport out',
        )


def require_peers(group: Any, device: torch.device) -> tuple[str, ...]:
    """Names of the devices of all ranks of `group`, as `_device_name` has them; one exchange.

    Raises NoCopies, on all ranks alike, where they cannot have symmetric memory. What cannot be known beforehand, such
    as two devices without a link between them, shows at the first `allocate`.
    """
    obstacle = _obstacle(device)
    mine = (socket.gethostname(), str(device) if obstacle else _device_name(device), obstacle)
    everyone = [mine] * dist.get_world_size(group)
    dist.all_gather_object(everyone, mine, group=group)
    hosts, devices, obstacles = zip(*everyone, strict=True)
    ranks = dist.get_process_group_ranks(group)
    where = "\n".join(f"rank {r}: host {h}, device {d}" for r, (h, d, _) in zip(ranks, everyone, strict=True))
    found = next((obstacle for obstacle in obstacles if obstacle is not None), None)
    if found is not None:
        raise impossible(found, where=where)
    if len(set(hosts)) > 1:
        raise impossible("the ranks of the axis are on several hosts", where=where)
    if len(set(devices)) < len(devices) and os.environ.get(_OVERLAPPING) != "1":
        raise impossible(
            "several ranks share a device",
            where=where,
            hint="torch.cuda.set_device(local_rank) before the model is spread; or leave runtime.transport out",
        )
    return tuple(devices)


def warn_without_access(device: torch.device, names: Iterable[str]) -> None:
    """Warn where PyTorch says that `device` has no access to the memory of one of the devices `names`.

    Devices that this process does not see are not asked about.
    """
    seen = (torch.device("cuda", number) for number in range(torch.cuda.device_count()))
    others = {_device_name(one): one for one in seen if one != device}
    closed = [
        f"{others[name]} ({name})"
        for name in names
        if name in others and not torch.cuda.can_device_access_peer(device, others[name])
    ]
    if closed:
        warnings.warn(
            f"fxskip: {_ASKED}{device} has no direct access to the memory of {', '.join(closed)}: "
            "copies are slow there, or fail; write transport: measured to take what is faster",
            stacklevel=2,
        )


def _device_name(device: torch.device) -> str:
    """One that no other device has, whatever number a process gives it."""
    return str(torch.cuda.get_device_properties(device).uuid)


def _obstacle(device: torch.device) -> str | None:
    """Why this process has no symmetric memory that others can map; None if it has."""
    try:
        from torch.distributed._symmetric_memory import get_backend
    except ImportError as error:
        return f"this build of PyTorch has no symmetric memory ({error})"
    backend = get_backend(device)
    if backend is None:
        return "this build of PyTorch has no symmetric memory for CUDA"
    if backend != "CUDA":
        return (
            f"symmetric memory is set to the backend {backend}, whose memory other ranks cannot map; set CUDA"
        )
    return None


class NoCopies(PassError):
    """Copies between devices are impossible here. All ranks of the group that wanted them have it."""

    @property
    def reason(self) -> str:
        """One line."""
        where = f" ({'; '.join(self.where.splitlines())})" if self.where else ""
        return self.found.removeprefix(_ASKED) + where


def impossible(found: str, *, where: str | None = None, hint: str | None = None) -> NoCopies:
    """The error for what copies between devices need and this machine does not have."""
    return NoCopies(
        "parallelize",
        _ASKED + found,
        where=where,
        hint=hint
        or "the ranks of the axis expert need a device each, all on one host, that reach each other's memory (NVLink); "
        "or leave runtime.transport out, to exchange rows over the process group",
    )
