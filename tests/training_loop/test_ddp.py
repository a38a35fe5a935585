"""DistributedDataParallel on two processes: the averaged gradients are those of the hand-written model."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import fxskip
from tests.training_loop.ranks import RANKS, run_on_ranks
from tests.transform.compare import assert_same_gradients, outcome
from tests.transform.wirings import FARSKIP
from tests.zoo import batch, tiny


def pair() -> tuple[nn.Module, nn.Module]:
    """A student and its hand-written reference, in training mode."""
    model = tiny("qwen2_moe", layers=2).train()
    return fxskip.transform(model, FARSKIP.spec), FARSKIP.reference(model)


def gradients(model: nn.Module) -> dict[str, Tensor]:
    found = {n.removeprefix("module."): p.grad for n, p in model.named_parameters() if p.grad is not None}
    return {name: gradient.clone() for name, gradient in found.items()}


def assert_mean_over_ranks(got: dict[str, Tensor], each: list[dict[str, Tensor]]) -> None:
    assert not torch.equal(each[0]["lm_head.weight"], each[1]["lm_head.weight"])
    want = {name: torch.stack([gradients[name] for gradients in each]).mean(dim=0) for name in each[0]}
    assert_same_gradients(got, want)


def gradients_are_the_mean_over_ranks(rank: int, folder: Path) -> None:
    student, reference = pair()
    parallel = DistributedDataParallel(student)  # its reducer lives as long as it does
    parallel(**batch(seed=rank)).loss.backward()

    assert_mean_over_ranks(
        gradients(student), [outcome(reference, batch(seed=r)).gradients for r in range(RANKS)]
    )


def no_sync_accumulates(rank: int, folder: Path) -> None:
    student, reference = pair()
    parallel = DistributedDataParallel(student)
    with parallel.no_sync():
        parallel(**batch(seed=rank)).loss.backward()
    parallel(**batch(3, 11, seed=10 + rank)).loss.backward()

    each = []
    for r in range(RANKS):
        reference.zero_grad()
        reference(**batch(seed=r)).loss.backward()
        reference(**batch(3, 11, seed=10 + r)).loss.backward()
        each.append(gradients(reference))
    assert_mean_over_ranks(gradients(student), each)


def parameters_without_a_use_are_found(rank: int, folder: Path) -> None:
    student, reference = pair()
    student.model.layers[1].register_parameter("unused", nn.Parameter(torch.ones(3)))
    parallel = DistributedDataParallel(student, find_unused_parameters=True)
    for _ in range(2):  # a second step fails where the first one's reduction was not finished
        student.zero_grad()
        parallel(**batch(seed=rank)).loss.backward()

    got = gradients(student)
    assert not got.pop("model.layers.1.unused", torch.zeros(1)).any()
    assert_mean_over_ranks(got, [outcome(reference, batch(seed=r)).gradients for r in range(RANKS)])


def static_graph(rank: int, folder: Path, **options: Any) -> None:
    student, reference = pair()
    if options:
        student.gradient_checkpointing_enable(**options)
    parallel = DistributedDataParallel(student, static_graph=True)
    for step in range(3):  # DDP learns the graph in the first step and relies on it from the second on
        student.zero_grad()
        parallel(**batch(seed=10 * step + rank)).loss.backward()
        each = [outcome(reference, batch(seed=10 * step + r)).gradients for r in range(RANKS)]
        assert_mean_over_ranks(gradients(student), each)


def static_graph_and_checkpointing(rank: int, folder: Path) -> None:
    static_graph(rank, folder, gradient_checkpointing_kwargs={"use_reentrant": False})


@pytest.mark.distributed
@pytest.mark.slow
def test_distributed_data_parallel(tmp_path: Path) -> None:
    checks = (
        gradients_are_the_mean_over_ranks,
        no_sync_accumulates,
        parameters_without_a_use_are_found,
        static_graph,
        static_graph_and_checkpointing,
    )
    run_on_ranks(checks, tmp_path, limit_s=300)
