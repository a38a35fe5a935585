"""DistributedDataParallel on two processes: the averaged gradients are those of the hand-written model."""

from pathlib import Path

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import fxskip
from tests.ranks import run_ranks
from tests.transform.compare import assert_same_gradients, outcome
from tests.transform.wirings import FARSKIP
from tests.zoo import batch, tiny

RANKS = 2


def one_rank(rank: int) -> None:
    model = tiny("qwen2_moe", layers=2).train()
    reference = FARSKIP.reference(model)
    student = fxskip.transform(model, FARSKIP.spec)

    got = outcome(DistributedDataParallel(student), batch(seed=rank)).gradients

    each = [outcome(reference, batch(seed=other)).gradients for other in range(RANKS)]
    assert not torch.equal(each[0]["lm_head.weight"], each[1]["lm_head.weight"])
    want = {name: torch.stack([gradients[name] for gradients in each]).mean(dim=0) for name in each[0]}
    assert_same_gradients({name.removeprefix("module."): g for name, g in got.items()}, want)


@pytest.mark.distributed
def test_gradients_are_the_mean_over_ranks(tmp_path: Path) -> None:
    run_ranks(one_rank, RANKS, tmp_path / "store")
