"""What stays in memory between forward and backward, with exchanges that cross the border and without."""

import gc
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from tests.backward.test_scheduled_memory import Memory
from tests.collectives.spreads import in_mode, model, own_batch, regions, spread
from tests.training_loop.ranks import run_on_ranks

LAYERS = 4
ROWS, COLUMNS = 2, 32
TOKENS = ROWS * COLUMNS
WIDTH, CHOICES = 64, 2
ROW_BYTES = 4 * WIDTH
"""One hidden state in float32."""


@cache
def student() -> nn.Module:
    return spread(model("mixtral", layers=LAYERS))


class LiveMemory(Memory):
    """Beside layers that are captured already."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True


def kept_bytes(module: nn.Module, rank: int) -> int:
    """What is alive of a forward pass when its backward pass may begin."""
    inputs = own_batch(rank, ROWS, COLUMNS)
    module(**inputs, use_cache=False).loss.backward()  # captured now
    module.zero_grad(set_to_none=True)
    gc.collect()
    with LiveMemory() as memory:
        loss = module(**inputs, use_cache=False).loss
        kept = memory.now
        loss.backward()
    return kept


def checkpointing_keeps_what_arrives(rank: int, folder: Path) -> None:
    """Under checkpointing a layer keeps its arguments; one whose streams are not finished has more of them."""
    kept = {}
    for mode in ("reference", "scheduled"):
        twin: Any = in_mode(student(), mode)
        twin.gradient_checkpointing_enable({"use_reentrant": False})
        kept[mode] = kept_bytes(twin, rank)
    # A finished stream against: rows in flight, tokens x choices, their order and its inverse (int64), and
    # routing weights (float32).
    crossing = LAYERS - 1
    rows = TOKENS * CHOICES * (ROW_BYTES + 8 + 8 + 4)
    assert kept["scheduled"] - kept["reference"] == pytest.approx(
        crossing * (rows - TOKENS * ROW_BYTES), rel=0.1
    )
    if rank == 0:
        (folder / "checkpointing.txt").write_text(f"{kept}")


def recompute_keeps_what_was_received(rank: int, folder: Path) -> None:
    """The spec's recompute also keeps what dispatch brought, once, and exchanges nothing again."""
    kept = {}
    for how in ("none", "layer", "selective"):
        twin = in_mode(student(), "scheduled")
        for region in regions(twin):
            region.fxskip_recompute = how
        kept[how] = kept_bytes(twin, rank)
    assert kept["layer"] < kept["selective"] < kept["none"]
    if rank == 0:
        (folder / "recompute.txt").write_text(f"{kept}")


@pytest.mark.distributed
@pytest.mark.slow
def test_memory(tmp_path: Path) -> None:
    run_on_ranks((checkpointing_keeps_what_arrives, recompute_keeps_what_was_received), tmp_path, limit_s=300)
    for name in ("checkpointing.txt", "recompute.txt"):
        print(name, (tmp_path / name).read_text())
