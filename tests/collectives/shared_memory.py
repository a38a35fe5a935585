"""A stand-in for symmetric memory on CPUs: files that all ranks map, and a thread as each rank's queue.

Ranks may be processes, or threads of one process. What a device does behind its host's back happens here in the thread,
with pauses that differ from rank to rank and job to job, so that a missing wait is a wrong value.
"""

import queue
import random
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
from torch import Tensor

LIMIT_S = 60.0


class Job:
    """What the queue was given, as `Work`."""

    def __init__(self, run: Callable[[], None]) -> None:
        self._run = run
        self._done = threading.Event()
        self._error: BaseException | None = None

    def __call__(self) -> None:
        try:
            self._run()
        except BaseException as error:
            self._error = error
        self._done.set()

    def wait(self, timeout: timedelta = timedelta(seconds=LIMIT_S)) -> bool:
        if not self._done.wait(timeout.total_seconds()):
            raise RuntimeError(f"not done after {timeout}")
        if self._error is not None:
            raise RuntimeError(f"{type(self._error).__name__}: {self._error}")
        return True

    def is_completed(self) -> bool:
        return self._done.is_set()


class SharedMemory:
    """`PeerMemory` in a folder that all ranks have.

    pause_s    a job's copies begin after up to so many seconds
    meetings   after so many a meeting does nothing, as with a broken signal
    """

    device = torch.device("cpu")

    def __init__(
        self, folder: Path, rank: int, ranks: int, *, pause_s: float = 0.0, meetings: int | None = None
    ) -> None:
        self.rank, self.ranks = rank, ranks
        self.sizes: list[int] = []
        """That were allocated."""
        self._folder, self._pause_s, self._meetings = folder, pause_s, meetings
        self._random = random.Random(rank)
        self._parts: tuple[Tensor, ...] = ()
        self._on_host, self._in_queue = (self._counters(name) for name in ("host", "queue"))
        self._jobs: queue.SimpleQueue[Job] = queue.SimpleQueue()
        threading.Thread(target=self._work, daemon=True).start()

    def allocate(self, size: int) -> None:
        self.run(lambda: None).wait()
        self.sizes.append(size)
        self._parts = tuple(
            self._mapped(f"{len(self.sizes)}-{rank}", size, torch.uint8) for rank in range(self.ranks)
        )
        self._meet(self._on_host)

    def others_have_allocated(self) -> None:
        """Have `allocate` wait for nobody."""
        self._on_host.fill_(1 << 40)[self.rank] = 0

    def of(self, rank: int) -> Tensor:
        return self._parts[rank]

    def run(self, job: Callable[[], None]) -> Job:
        queued = Job(job)
        self._jobs.put(queued)
        return queued

    def meet(self) -> None:
        self._pause()
        if self._meetings is None or self._in_queue[self.rank] < self._meetings:
            self._meet(self._in_queue)
        self._pause()

    def _work(self) -> None:
        while True:
            self._pause()
            self._jobs.get()()

    def _pause(self) -> None:
        time.sleep(self._pause_s * self._random.random())

    def _meet(self, counters: Tensor) -> None:
        """Count one more for this rank, and wait until all have counted as far."""
        counters[self.rank] += 1
        goal, deadline = int(counters[self.rank]), time.monotonic() + LIMIT_S
        while int(counters.min()) < goal:
            if time.monotonic() > deadline:
                raise RuntimeError(f"rank {self.rank} waits at meeting {goal}: {counters.tolist()}")
            time.sleep(1e-5)

    def _counters(self, name: str) -> Tensor:
        return self._mapped(name, self.ranks, torch.int64)

    def _mapped(self, name: str, size: int, dtype: torch.dtype) -> Tensor:
        return torch.from_file(str(self._folder / name), shared=True, size=size, dtype=dtype)
