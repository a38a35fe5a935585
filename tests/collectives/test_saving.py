"""Distributed checkpoints of a spread model and its optimizer, loaded again on two processes and on one."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import fxskip
from tests.collectives.spreads import in_mode, model, own_batch, spread, whole
from tests.training_loop.ranks import run_on_ranks


@cache
def student() -> nn.Module:
    return spread(model("mixtral", layers=2))


def begin() -> tuple[nn.Module, torch.optim.Optimizer]:
    twin = in_mode(student(), "scheduled")
    return twin, torch.optim.AdamW(twin.parameters(), lr=1e-2)


def steps(module: nn.Module, optimizer: torch.optim.Optimizer, numbers: range, rank: int) -> None:
    for number in numbers:
        module(**own_batch(rank, 2, 6 + number), use_cache=False).loss.backward()
        fxskip.average_gradients(module)
        optimizer.step()
        optimizer.zero_grad()


def state(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    of_model, of_optimizer = get_state_dict(module, optimizer)
    return {"model": of_model, "optimizer": of_optimizer}


def weights(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: whole(p.detach()).clone() for name, p in module.named_parameters()}


def a_run_is_resumed(rank: int, folder: Path) -> None:
    """Three steps are two, a checkpoint, and one."""
    module, optimizer = begin()
    steps(module, optimizer, range(2), rank)
    dcp.save(state(module, optimizer), checkpoint_id=str(folder / "dcp"))
    saved = weights(module)
    if rank == 0:
        torch.save(saved, folder / "weights.pt")
    steps(module, optimizer, range(2, 3), rank)

    resumed, its_optimizer = begin()
    found = state(resumed, its_optimizer)
    dcp.load(found, checkpoint_id=str(folder / "dcp"))
    set_state_dict(
        resumed, its_optimizer, model_state_dict=found["model"], optim_state_dict=found["optimizer"]
    )
    assert all(torch.equal(got, saved[name]) for name, got in weights(resumed).items())
    steps(resumed, its_optimizer, range(2, 3), rank)
    want = weights(module)
    assert all(torch.equal(got, want[name]) for name, got in weights(resumed).items())


@pytest.mark.distributed
@pytest.mark.slow
def test_a_checkpoint_of_two_processes(tmp_path: Path) -> None:
    run_on_ranks((a_run_is_resumed,), tmp_path, limit_s=300)
    alone = fxskip.transform(model("mixtral", layers=2, seed=1), "farskip")
    found = {"model": dict(alone.state_dict())}
    dcp.load(found, checkpoint_id=str(tmp_path / "dcp"))
    alone.load_state_dict(found["model"])
    want = torch.load(tmp_path / "weights.pt")
    for name, parameter in alone.named_parameters():
        assert torch.equal(parameter, want[name]), name
