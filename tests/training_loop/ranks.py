"""Run checks on two processes over gloo. An error or a hang names the rank and the check."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import multiprocessing

RANKS = 2

Check = Callable[[int, Path], None]
"""A module-level function of the rank and a folder that all ranks share."""


def run_on_ranks(checks: Sequence[Check], folder: Path, *, limit_s: int) -> None:
    """Start the processes once, for the imports take longest, and run all checks in each, one after the other."""
    processes = multiprocessing.start_processes(
        _rank, args=(tuple(checks), folder), nprocs=RANKS, join=False, start_method="spawn"
    )
    assert processes is not None
    deadline = time.monotonic() + limit_s
    try:
        while not processes.join(timeout=1):  # raises, with the rank and its traceback, when one has failed
            if time.monotonic() > deadline:
                alive = [rank for rank, process in enumerate(processes.processes) if process.is_alive()]
                pytest.fail(
                    f"ranks {alive} of {RANKS} were not done after {limit_s} s; begun: {_begun(folder)}"
                )
    finally:
        for process in processes.processes:
            process.kill()


def _rank(rank: int, checks: Sequence[Check], folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=RANKS)
    for check in checks:
        (folder / f"rank{rank}").write_text(check.__name__)
        torch._dynamo.reset()
        try:
            check(rank, folder)
        except BaseException as error:
            error.add_note(f"in the check {check.__name__!r} on rank {rank}")
            raise
        dist.barrier()
    dist.destroy_process_group()


def _begun(folder: Path) -> str:
    return ", ".join(f"{file.name}: {file.read_text()}" for file in sorted(folder.glob("rank*")))
