"""Scheduled, reference and eager-wait mode give the same bits; one process gives the same to rounding."""

from functools import partial
from pathlib import Path

import pytest

import fxskip
from tests.collectives.spreads import (
    assert_all_modes_agree,
    assert_one_process_gives_the_same,
    deferring,
    model,
    own_batch,
    spread,
)
from tests.training_loop.ranks import run_on_ranks

KINDS = ("deepseek_v2", "qwen2_moe", "qwen3_moe", "mixtral", "olmoe", "glm4_moe")
WITH_SHARED_EXPERTS = ("deepseek_v2", "qwen2_moe", "glm4_moe")
"""For the others `sum: split` changes nothing, and is refused (tests/test_wiring.py)."""
PRESETS = ("farskip", "identity", "ladder", "farskip-attention", "farskip-moe", "farskip-last-75", "split")
"""Not "parallel", whose wiring is farskip-moe's (tests/test_specs_folder.py). "split" is farskip with sum: split."""
OF_ONE_STREAM = ("identity", "farskip-moe")
"""Attention reads the full stream, so the next layer has nothing to do before an exchange arrives."""


def all_modes_and_one_process(kind: str, preset: str, rank: int, folder: Path) -> None:
    original = model(kind, double=True)
    sections = {"sum": "split"} if preset == "split" else {}
    name = "farskip" if preset == "split" else preset
    student = spread(original, name, **sections)
    assert bool(deferring(student)) == (preset not in OF_ONE_STREAM)
    found = assert_all_modes_agree(student, own_batch(rank))
    alone = fxskip.transform(original, {"fxskip": 1, "preset": name, **sections})
    assert_one_process_gives_the_same(found, alone, own_batch(rank))


def grouped_kernels_in_float32(kind: str, rank: int, folder: Path) -> None:
    """Where transformers runs its own kernels, with dropout drawn in the order of the program."""
    assert_all_modes_agree(spread(model(kind, attention_dropout=0.3)), own_batch(rank, 3, 11, padded=True))


def experts_that_cannot_be_spread(rank: int, folder: Path) -> None:
    """llama4 sorts its tokens outside of the experts; the refusal comes before the model is touched."""
    original = model("llama4_text", layers=2)
    before = dict(original.named_parameters())
    with pytest.raises(fxskip.PassError, match=r"Llama4TextExperts is called with \(hidden_states\)"):
        fxskip.transform(original, {"fxskip": 1, "preset": "farskip", "parallel": {"expert": {"size": 2}}})
    assert all(p is before[name] for name, p in original.named_parameters())


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.parametrize("presets", [PRESETS[:3], PRESETS[3:]], ids="+".join)
@pytest.mark.parametrize("kind", KINDS)
def test_every_architecture_and_preset(kind: str, presets: tuple[str, ...], tmp_path: Path) -> None:
    fitting = [preset for preset in presets if preset != "split" or kind in WITH_SHARED_EXPERTS]
    checks = [partial(all_modes_and_one_process, kind, preset) for preset in fitting]
    run_on_ranks(checks, tmp_path, limit_s=560)


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_grouped_kernels(kind: str, tmp_path: Path) -> None:
    run_on_ranks([partial(grouped_kernels_in_float32, kind)], tmp_path, limit_s=300)


@pytest.mark.distributed
@pytest.mark.slow
def test_refusal(tmp_path: Path) -> None:
    run_on_ranks((experts_that_cannot_be_spread,), tmp_path, limit_s=120)
