"""Attention, dense MLPs and shared experts cut over two processes compute what one process does."""

from copy import deepcopy
from functools import partial
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.tensor import DTensor, Shard
from transformers.models.olmoe.modeling_olmoe import OlmoeRMSNorm

import fxskip
from fxskip.capture.region import capture_count
from fxskip.errors import CollectiveError, PassError
from tests.collectives.device import on_device
from tests.collectives.replicated import (
    assert_equal_in_all_wirings,
    assert_equal_to_one_process,
    assert_rounding_only,
    assert_same_bits,
    model,
    norm_in_float64,
    outcome,
    spread,
    wrong_without_sums_of_gradients,
)
from tests.training_loop.ranks import run_on_ranks
from tests.zoo import batch

TENSOR = {"tensor": {"size": 2}}
BOTH = {"tensor": {"size": 2}, "expert": {"size": 2, "exchange": "all_reduce"}}
KINDS = ("deepseek_v2", "qwen2_moe", "qwen3_moe", "mixtral", "olmoe", "llama4_text")


def is_equal_to_one_process(rank: int, folder: Path) -> None:
    """With experts on the same ranks, so that sums of attention and shared experts, gated here, are merged."""
    assert_equal_to_one_process("qwen2_moe", "farskip", BOTH, ("reference", "scheduled"), layers=2)


def shows_a_dropped_sum(rank: int, folder: Path) -> None:
    """In front of the cut matrices and between them, not behind."""
    wrong = wrong_without_sums_of_gradients(TENSOR)
    # The norm before the cut matrices, and those of queries and keys between them.
    layer = "model.layers.1"
    assert {f"{layer}.input_layernorm.weight", f"{layer}.self_attn.q_norm.weight"} <= wrong
    assert f"{layer}.self_attn.o_proj.weight" not in wrong


def is_a_module_like_others(rank: int, folder: Path) -> None:
    """Parameters are DTensors that optimizer, deepcopy, state dict and torch.distributed.checkpoint take."""
    original = model("qwen3_moe", layers=2)
    student = spread(original, "farskip", TENSOR, "scheduled")
    reference = fxskip.transform(original, "farskip")
    attention = student.model.layers[1].self_attn
    assert _cuts(attention) == {"q_proj": 0, "k_proj": 0, "v_proj": 0, "o_proj": 1}
    assert isinstance(attention.q_proj, nn.Linear)
    assert attention.q_norm.weight.shape == reference.model.layers[1].self_attn.q_norm.weight.shape

    outcome(student)
    captured = capture_count()
    copied = deepcopy(student)
    assert_same_bits(outcome(copied), outcome(student))
    assert capture_count() == captured
    for step_of in (student, reference):
        outcome(step_of)
        torch.optim.SGD(step_of.parameters(), lr=0.01).step()
    assert_rounding_only(outcome(student), outcome(reference))

    dcp.save(student.state_dict(), checkpoint_id=folder / "weights")
    state = copied.state_dict()
    dcp.load(state, checkpoint_id=folder / "weights")
    copied.load_state_dict(state)
    assert_same_bits(outcome(copied), outcome(student))


def _cuts(module: nn.Module) -> dict[str, int]:
    found = {}
    for name, parameter in module.named_parameters():
        if isinstance(parameter, DTensor):
            (placement,) = parameter.placements
            assert isinstance(placement, Shard)
            found[name.removesuffix(".weight")] = placement.dim
    return found


def refuses_what_would_be_wrong(rank: int, folder: Path) -> None:
    student = spread(model("qwen3_moe", layers=2), "farskip", TENSOR, "scheduled")
    with pytest.raises(PassError, match="use_cache=False"):
        student(**on_device(batch()), use_cache=True)
    with pytest.raises(PassError, match="outside its decoder layer"):
        student.model.layers[0].self_attn.q_proj(torch.zeros(1, 64, dtype=torch.float64))
    with pytest.raises(PassError, match="which 2 processes cannot share"):
        spread(
            model("qwen2_moe", layers=2, shared_expert_intermediate_size=33), "farskip", TENSOR, "scheduled"
        )
    with pytest.raises(PassError, match="and no plain nn.Linear"):
        changed = model("qwen3_moe", layers=2)
        for layer in changed.model.layers:
            layer.self_attn.q_proj.__class__ = _OtherLinear
        spread(changed, "farskip", TENSOR, "scheduled")


class _OtherLinear(nn.Linear):
    pass


def notices_other_tokens(rank: int, folder: Path) -> None:
    """In the first pass; of other lengths too, before sums of other sizes would meet."""
    for inputs in (batch(seed=rank), batch(columns=9 + rank)):
        student = spread(model("qwen3_moe", layers=2), "farskip", TENSOR, "scheduled")
        with pytest.raises(CollectiveError, match="the ranks of the axis tensor have different tokens"):
            student(**on_device(inputs), use_cache=False)


@pytest.mark.distributed
def test_two_processes(tmp_path: Path) -> None:
    run_on_ranks([is_equal_to_one_process, notices_other_tokens], tmp_path, limit_s=300)


@pytest.mark.distributed
@pytest.mark.slow
def test_two_processes_in_detail(tmp_path: Path) -> None:
    run_on_ranks(
        [shows_a_dropped_sum, is_a_module_like_others, refuses_what_would_be_wrong],
        tmp_path,
        limit_s=400,
    )


def all_wirings(kind: str, rank: int, folder: Path) -> None:
    # A norm over cut features adds up parts: in float32, as transformers has it, that shows rounding of float32.
    with patch.object(OlmoeRMSNorm, "forward", norm_in_float64):
        assert_equal_in_all_wirings(kind, TENSOR if kind == "llama4_text" else BOTH)


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_all_wirings(kind: str, tmp_path: Path) -> None:
    run_on_ranks([partial(all_wirings, kind)], tmp_path, limit_s=580)
