"""Start processes of which some are to die, and wait for the others."""

import time
from collections.abc import Callable
from pathlib import Path

import pytest
from torch import multiprocessing

from tests.ranks import one_rank


def run_until_all_end(
    body: Callable[[int], None], ranks: int, store: Path, *, limit_s: int
) -> dict[int, int]:
    """How each rank ended: 0, a positive status after an error, or minus the signal. A hang names the ranks."""
    context = multiprocessing.get_context("spawn")
    processes = [
        context.Process(target=one_rank, args=(rank, body, ranks, str(store))) for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    deadline = time.monotonic() + limit_s
    try:
        for process in processes:
            process.join(max(0.0, deadline - time.monotonic()))
        alive = [rank for rank, process in enumerate(processes) if process.is_alive()]
        if alive:
            pytest.fail(f"ranks {alive} of {ranks} were not done after {limit_s} s")
    finally:
        for process in processes:
            process.kill()
    return {rank: int(process.exitcode or 0) for rank, process in enumerate(processes)}
