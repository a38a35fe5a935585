"""The checks on two processes that every change goes through; the rest of this folder is slow."""

from functools import partial
from pathlib import Path

import pytest

from tests.collectives.test_modes import all_modes_and_one_process
from tests.collectives.test_wrappers import checkpointing, ddp
from tests.training_loop.ranks import run_on_ranks


@pytest.mark.distributed
def test_two_processes(tmp_path: Path) -> None:
    checks = (partial(all_modes_and_one_process, "qwen2_moe", "farskip"), ddp, checkpointing)
    run_on_ranks(checks, tmp_path, limit_s=300)
