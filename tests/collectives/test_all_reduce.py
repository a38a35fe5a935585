"""Experts of replicated tokens: two processes with the same batch compute what one process does."""

from pathlib import Path
from unittest.mock import patch

import pytest
from torch import Tensor

import fxskip
from fxskip.collectives.all_reduce import Enter, Reduce
from fxskip.collectives.in_flight import Issued
from fxskip.errors import PassError
from tests.collectives.replicated import (
    ROUNDING,
    assert_equal_to_one_process,
    difference,
    model,
    outcome,
    spread,
    whole,
)
from tests.training_loop.ranks import run_on_ranks
from tests.zoo import tiny

PARALLEL = {"expert": {"size": 2, "exchange": "all_reduce"}}
KINDS = ("deepseek_v2", "qwen2_moe", "qwen3_moe", "mixtral", "olmoe")


def shows_a_dropped_sum(rank: int, folder: Path) -> None:
    """Without the sum forward the logits are wrong; without the one backward they are right and gradients wrong."""
    original = model("qwen3_moe", layers=2)
    want = outcome(fxskip.transform(original, "farskip"))
    with patch.object(Reduce, "issue", _unsummed):
        assert (
            difference(outcome(spread(original, "farskip", PARALLEL, "scheduled")).logits, want.logits) > 1e-3
        )
    with patch.object(Enter, "issue_reverse", _unsummed):
        got = outcome(spread(original, "farskip", PARALLEL, "scheduled"))
    assert difference(got.logits, want.logits) < ROUNDING
    wrong = {n for n, g in got.gradients.items() if difference(whole(g), want.gradients[n]) > 1e-3}
    assert {"model.embed_tokens.weight", "model.layers.0.mlp.gate.weight"} <= wrong


def _unsummed(self: Reduce | Enter, tensor: Tensor) -> Issued:
    return Issued(tensor.clone(), None, tensor)


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


class AllWirings:
    """A check for each kind of model, by its name."""

    def __init__(self, kind: str) -> None:
        self.kind = self.__name__ = kind

    def __call__(self, rank: int, folder: Path) -> None:
        for preset in ("farskip", "ladder", "identity"):
            assert_equal_to_one_process(self.kind, preset, PARALLEL)


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_all_wirings(kind: str, tmp_path: Path) -> None:
    run_on_ranks([AllWirings(kind)], tmp_path, limit_s=580)


def test_sizes_of_replicated_axes_must_agree() -> None:
    spec = {
        "fxskip": 1,
        "preset": "farskip",
        "parallel": {"expert": {"size": 4, "exchange": "all_reduce"}, "tensor": {"size": 2}},
    }
    with pytest.raises(PassError, match="write equal sizes"):
        fxskip.transform(tiny("qwen3_moe", layers=2), spec)
