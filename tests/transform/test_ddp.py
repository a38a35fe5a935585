"""DistributedDataParallel on two processes: the averaged gradients are those of the hand-written model."""

import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import multiprocessing
from torch.nn.parallel import DistributedDataParallel

import fxskip
from tests.transform.compare import assert_same_gradients, outcome
from tests.transform.wirings import FARSKIP
from tests.zoo import batch, tiny

RANKS = 2
LIMIT_S = 120


def one_rank(rank: int, store: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    model = tiny("qwen2_moe", layers=2).train()
    reference = FARSKIP.reference(model)
    student = fxskip.transform(model, FARSKIP.spec)

    got = outcome(DistributedDataParallel(student), batch(seed=rank)).gradients

    each = [outcome(reference, batch(seed=other)).gradients for other in range(RANKS)]
    assert not torch.equal(each[0]["lm_head.weight"], each[1]["lm_head.weight"])
    want = {name: torch.stack([gradients[name] for gradients in each]).mean(dim=0) for name in each[0]}
    assert_same_gradients({name.removeprefix("module."): g for name, g in got.items()}, want)
    dist.destroy_process_group()


def run_ranks(store: Path) -> None:
    """Run `one_rank` in each process; an error or a hang names the rank, and no process is left behind."""
    processes = multiprocessing.start_processes(
        one_rank, args=(str(store),), nprocs=RANKS, join=False, start_method="spawn"
    )
    assert processes is not None
    deadline = time.monotonic() + LIMIT_S
    try:
        while not processes.join(timeout=1):  # raises, with the rank and its traceback, when one has failed
            if time.monotonic() > deadline:
                alive = [rank for rank, process in enumerate(processes.processes) if process.is_alive()]
                pytest.fail(f"ranks {alive} of {RANKS} were not done after {LIMIT_S} s")
    finally:
        for process in processes.processes:
            process.kill()


@pytest.mark.distributed
def test_gradients_are_the_mean_over_ranks(tmp_path: Path) -> None:
    run_ranks(tmp_path / "store")
