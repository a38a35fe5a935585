"""Experts of replicated tokens: two processes with the same batch compute what one process does."""

from functools import partial
from pathlib import Path

import pytest

import fxskip
from fxskip.errors import PassError
from tests.collectives.replicated import (
    ROUNDING,
    assert_equal_in_all_wirings,
    difference,
    model,
    outcome,
    spread,
    whole,
    wrong_without_sums_of_gradients,
)
from tests.training_loop.ranks import run_on_ranks
from tests.zoo import tiny

PARALLEL = {"expert": {"size": 2, "exchange": "all_reduce"}}
KINDS = ("deepseek_v2", "qwen2_moe", "qwen3_moe", "mixtral", "olmoe")


def shows_a_dropped_sum(rank: int, folder: Path) -> None:
    """Behind the experts' inputs, hidden states and routing weights."""
    wrong = wrong_without_sums_of_gradients(PARALLEL)
    assert {"model.embed_tokens.weight", "model.layers.0.mlp.gate.weight"} <= wrong


def may_have_no_tokens(rank: int, folder: Path) -> None:
    """All tokens go to the first two experts, so that the second rank has none; its gradients are zeros."""
    original = model("deepseek_v3", layers=2, first_k_dense_replace=0)
    original.model.layers[1].mlp.gate.e_score_correction_bias[:2] += 1e3
    want = outcome(fxskip.transform(original, "farskip"))
    got = outcome(spread(original, "farskip", PARALLEL, "scheduled"))
    assert difference(got.logits, want.logits) < ROUNDING
    experts = "model.layers.1.mlp.experts.down_proj"
    assert difference(whole(got.gradients[experts]), want.gradients[experts]) < ROUNDING
    assert bool(got.gradients[experts].to_local().any()) == (rank == 0)


@pytest.mark.distributed
@pytest.mark.slow
def test_two_processes_with_the_same_tokens(tmp_path: Path) -> None:
    run_on_ranks([shows_a_dropped_sum, may_have_no_tokens], tmp_path, limit_s=400)


def all_wirings(kind: str, rank: int, folder: Path) -> None:
    assert_equal_in_all_wirings(kind, PARALLEL)


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_all_wirings(kind: str, tmp_path: Path) -> None:
    run_on_ranks([partial(all_wirings, kind)], tmp_path, limit_s=580)


def test_sizes_of_replicated_axes_must_agree() -> None:
    spec = {
        "fxskip": 1,
        "preset": "farskip",
        "parallel": {"expert": {"size": 4, "exchange": "all_reduce"}, "tensor": {"size": 2}},
    }
    with pytest.raises(PassError, match="write equal sizes"):
        fxskip.transform(tiny("qwen3_moe", layers=2), spec)
