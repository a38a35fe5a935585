"""Runs a function in several processes that form a gloo group."""

import faulthandler
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import multiprocessing

LIMIT_S = 120


def run_ranks(
    body: Callable[[int], None],
    ranks: int,
    store: Path,
    *,
    limit_s: int = LIMIT_S,
    begun: Callable[[], str] = lambda: "not known",
) -> None:
    """Calls body(rank) in each process; an error or a hang names the rank, and no process is left behind.

    store    a file that does not exist yet, by which the processes find each other
    begun    says, where they hang, what they had begun
    """
    processes = multiprocessing.start_processes(
        one_rank, args=(body, ranks, str(store)), nprocs=ranks, join=False, start_method="spawn"
    )
    assert processes is not None
    deadline = time.monotonic() + limit_s
    try:
        while not processes.join(timeout=1):  # raises, with the rank and its traceback, when one has failed
            if time.monotonic() > deadline:
                alive = [rank for rank, process in enumerate(processes.processes) if process.is_alive()]
                pytest.fail(f"ranks {alive} of {ranks} were not done after {limit_s} s; begun: {begun()}")
    finally:
        for process in processes.processes:
            process.kill()


def one_rank(rank: int, body: Callable[[int], None], ranks: int, store: str) -> None:
    faulthandler.enable()  # a crash says where
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    body(rank)
    dist.destroy_process_group()
