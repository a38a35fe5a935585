"""Batches that differ between processes, in size, kind and where their tokens go."""

from functools import cache
from pathlib import Path

import pytest
import torch
from torch import nn

import fxskip
from tests.collectives.spreads import (
    Batch,
    assert_one_process_gives_the_same,
    assert_same_bits,
    in_mode,
    model,
    own_batch,
    spread,
    step,
)
from tests.training_loop.ranks import run_on_ranks


@cache
def pair() -> tuple[nn.Module, nn.Module]:
    """A spread student and the same in one process, in float64."""
    original = model("mixtral", double=True)
    return spread(original), fxskip.transform(original, "farskip")


def assert_right(inputs: Batch, student: nn.Module | None = None, alone: nn.Module | None = None) -> None:
    """Scheduled gives the bits of reference mode, and to rounding what one process gives."""
    student, alone = student or pair()[0], alone or pair()[1]
    found = step(in_mode(student, "scheduled"), inputs, use_cache=False)
    assert_same_bits(step(in_mode(student, "reference"), inputs, use_cache=False), found)
    assert_one_process_gives_the_same(found, alone, inputs, use_cache=False)


def route_to(chosen: list[int], module: nn.Module) -> nn.Module:
    """Have every router choose these experts, whatever the token."""
    for layer in module.model.layers:  # type: ignore[union-attr]
        layer.mlp.gate.register_forward_hook(_Choose(chosen))  # type: ignore[union-attr]
    return module


class _Choose:
    """A hook that gives each token these experts."""

    def __init__(self, chosen: list[int]) -> None:
        self.chosen = chosen

    def __call__(
        self, module: nn.Module, args: object, out: tuple[torch.Tensor, ...]
    ) -> tuple[torch.Tensor, ...]:
        logits, weights, index = out
        return logits, weights, torch.zeros_like(index) + torch.tensor(self.chosen, device=index.device)


def uneven_batches(rank: int, folder: Path) -> None:
    """More tokens on one rank than on the other, another number in each step, batch 1 and length 1 among them."""
    for rows, columns in (((2, 3), (9, 4)), ((1, 2), (5, 5)), ((3, 1), (1, 7)), ((1, 1), (1, 1))):
        assert_right(own_batch(rank, rows[rank], columns[rank]))


def other_kinds_of_calls(rank: int, folder: Path) -> None:
    """One rank evaluates, pads and masks while the other does not."""
    student, alone = (in_mode(pair()[0], "scheduled"), pair()[1])
    for module in (student, alone):
        module.train(rank == 0)
    assert_right(own_batch(rank, 2, 8, padded=rank == 1), student, alone)
    alone.train()


def no_tokens_for_a_rank(rank: int, folder: Path) -> None:
    """All tokens go to the experts of rank 0; those of rank 1 get none, and gradients of zeros."""
    for chosen in ([0, 1], [3, 2]):
        student = route_to(chosen, in_mode(pair()[0], "scheduled"))
        found = step(student, own_batch(rank), use_cache=False)
        reference = step(in_mode(student, "reference"), own_batch(rank), use_cache=False)
        assert_same_bits(found, reference)
        idle = 1 if chosen == [0, 1] else 0
        mine = {n: g.to_local() for n, g in found.gradients.items() if hasattr(g, "to_local")}  # type: ignore[attr-defined]
        assert mine and all(bool(g.any()) == (rank != idle) for g in mine.values())


@pytest.mark.distributed
@pytest.mark.slow
def test_uneven(tmp_path: Path) -> None:
    run_on_ranks(
        (uneven_batches, other_kinds_of_calls, no_tokens_for_a_rank),
        tmp_path,
        limit_s=400,
    )
