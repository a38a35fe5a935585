"""DDP, FSDP2 and checkpointing around a student with exchanges in flight: to the last bit what blocking layers give."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
    set_checkpoint_early_stop,
)

import fxskip
from fxskip.collectives import failures
from tests.collectives.spreads import assert_same_bits, in_mode, model, own_batch, regions, spread, step
from tests.training_loop.ranks import run_on_ranks

LAYERS = 3

Wrap = Callable[[nn.Module], nn.Module]


@cache
def student() -> nn.Module:
    """Experts in three layers, two of which leave their last exchange to the next; copied before each use."""
    found = spread(model("mixtral", layers=LAYERS, attention_dropout=0.2))
    assert [r.fxskip_parallel.defers for r in regions(found)] == [True, True, False]
    return found


def assert_as_blocking(wrap: Wrap, rank: int, *, steps: int = 2, mode: str = "scheduled") -> None:
    """Several batches of several sizes; dropout draws the same numbers."""
    blocking, overlapping = wrap(in_mode(student(), "reference")), wrap(in_mode(student(), mode))
    for number in range(steps):
        inputs = own_batch(rank, 2 + number, 9 + number)
        assert_same_bits(step(overlapping, inputs, use_cache=False), step(blocking, inputs, use_cache=False))


def experts(module: nn.Module) -> set[nn.Parameter]:
    return {
        p
        for p in module.parameters()
        if isinstance(p, DTensor) and p.device_mesh.mesh_dim_names == ("expert",)
    }


# --- DDP -----------------------------------------------------------------------------------------


def ddp(rank: int, folder: Path) -> None:
    for options in ({}, {"find_unused_parameters": True}, {"static_graph": True}):
        assert_as_blocking(partial(DistributedDataParallel, **options), rank, steps=3)


def ddp_accumulates_without_sync(rank: int, folder: Path) -> None:
    found = []
    for mode in ("reference", "scheduled"):
        parallel = DistributedDataParallel(in_mode(student(), mode))
        torch.manual_seed(3)
        with parallel.no_sync():
            parallel(**own_batch(rank), use_cache=False).loss.backward()
        parallel(**own_batch(rank, 3, 7), use_cache=False).loss.backward()
        found.append({name: p.grad for name, p in parallel.named_parameters()})
    for name, gradient in found[0].items():
        assert torch.equal(whole(gradient), whole(found[1][name])), name


def whole(tensor: Any) -> Any:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


# --- FSDP2 ---------------------------------------------------------------------------------------

FULL = MixedPrecisionPolicy()
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def sharded(module: nn.Module, policy: MixedPrecisionPolicy = FULL, between: Any = None) -> nn.Module:
    """`fully_shard` for each layer and the root, experts left out; `between` is for all layers but the last."""
    *layers, last = module.model.layers  # type: ignore[misc,union-attr]
    for part in (*layers, last, module):
        chosen = between if between and part in layers else policy
        fully_shard(part, mp_policy=chosen, ignored_params=experts(module))
    return module


def fsdp(rank: int, folder: Path) -> None:
    assert_as_blocking(sharded, rank)


def in_bf16(module: nn.Module, **policies: Any) -> nn.Module:
    """Experts, which FSDP2 does not manage, in bfloat16 as well."""
    for region in regions(module):
        region.mlp.experts.to(torch.bfloat16)  # type: ignore[union-attr,operator]
    return sharded(module, BF16, **policies)


def fsdp_in_mixed_precision(rank: int, folder: Path) -> None:
    """Weights in bfloat16, gradients reduced in float32, routing weights in float32 on their way to the next layer."""
    assert_as_blocking(in_bf16, rank)


def fsdp_casts_at_the_border(rank: int, folder: Path) -> None:
    """Each layer returns float32, and the next one's arguments are cast again."""
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, output_dtype=torch.float32)
    assert_as_blocking(partial(in_bf16, between=policy), rank)


# --- checkpointing -------------------------------------------------------------------------------


def checkpointed(module: nn.Module, **options: Any) -> nn.Module:
    """By transformers' own switch, or with other arguments of torch's checkpoint."""
    module.gradient_checkpointing_enable({"use_reentrant": False} | options)  # type: ignore[operator]
    return module


def keep_exchanges(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    own = operator is torch.ops.fxskip.issue.default
    return CheckpointPolicy.MUST_SAVE if own else CheckpointPolicy.PREFER_RECOMPUTE


def selective(policy: Any) -> dict[str, Any]:
    return {"context_fn": partial(create_selective_checkpoint_contexts, policy)}


@contextmanager
def counted() -> Iterator[list[int]]:
    """How many exchanges this process starts while it is open: one number, in a list."""
    seen = [0]
    original = dist.all_to_all_single

    def counting(*args: Any, **kwargs: Any) -> Any:
        seen[0] += 1
        return original(*args, **kwargs)

    with patch.object(dist, "all_to_all_single", counting):
        yield seen


def exchanges(module: nn.Module, rank: int) -> int:
    with counted() as seen:
        step(module, own_batch(rank), use_cache=False)
    return seen[0]


PLAIN = 5 * LAYERS
"""Exchanges of a step: in each layer counts, dispatch and combine, and back a combine and a dispatch."""


def checkpointing(rank: int, folder: Path) -> None:
    """Counts and dispatch are exchanged again, and the combine of the last layer, which no next one has."""
    assert_as_blocking(checkpointed, rank)
    with set_checkpoint_early_stop(False):
        assert_as_blocking(checkpointed, rank)
    assert exchanges(in_mode(student(), "scheduled"), rank) == PLAIN
    assert exchanges(checkpointed(in_mode(student(), "scheduled")), rank) == PLAIN + 2 * LAYERS + 1
    assert not any(member.told for member in failures._MEMBERS.values())  # the early stop is no error


def selective_checkpointing(rank: int, folder: Path) -> None:
    """A policy that keeps the exchanges exchanges nothing again."""
    assert_as_blocking(partial(checkpointed, **selective(keep_exchanges)), rank)
    twin = checkpointed(in_mode(student(), "scheduled"), **selective(keep_exchanges))
    assert exchanges(twin, rank) == PLAIN


def several_layers_in_one_checkpoint(rank: int, folder: Path) -> None:
    """The recomputed second layer waits for what the recomputed first one put off."""

    def together(module: nn.Module) -> nn.Module:
        first, second, last = module.model.layers  # type: ignore[misc,union-attr]
        module.model.layers = nn.ModuleList([_Two(first, second), last])  # type: ignore[union-attr]
        return module

    assert_as_blocking(together, rank)


class _Two(nn.Module):
    """Two layers in one checkpoint."""

    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.first, self.second = first, second

    def forward(self, hidden: Any, **kwargs: Any) -> Any:
        return checkpoint(self._both, hidden, use_reentrant=False, **kwargs)

    def _both(self, hidden: Any, **kwargs: Any) -> Any:
        return self.second(self.first(hidden, **kwargs), **kwargs)


def fsdp_and_checkpointing(rank: int, folder: Path) -> None:
    for options in ({}, selective(keep_exchanges)):
        assert_as_blocking(lambda module, o=options: sharded(checkpointed(module, **o)), rank)
    assert_as_blocking(lambda module: in_bf16(checkpointed(module)), rank)


def recompute_of_the_spec(rank: int, folder: Path) -> None:
    """`runtime.recompute` starts no exchange again."""
    for how in ("layer", "selective"):

        def recomputing(module: nn.Module, how: str = how) -> nn.Module:
            for region in regions(module):
                region.fxskip_recompute = how
            return module

        assert_as_blocking(recomputing, rank)
        assert exchanges(recomputing(in_mode(student(), "scheduled")), rank) == PLAIN
        found = recomputing(in_mode(student(), "scheduled"))
        assert_same_bits(
            step(found, own_batch(rank), use_cache=False),
            step(in_mode(student(), "reference"), own_batch(rank)),
        )


def reentrant_checkpointing_is_refused(rank: int, folder: Path) -> None:
    twin = in_mode(student(), "scheduled")
    twin.gradient_checkpointing_enable({"use_reentrant": True})  # type: ignore[operator]
    with pytest.raises(fxskip.PassError, match="use_reentrant"):
        twin(**own_batch(rank), use_cache=False)


@pytest.mark.distributed
@pytest.mark.slow
def test_data_parallel(tmp_path: Path) -> None:
    checks = (ddp, ddp_accumulates_without_sync, fsdp, fsdp_in_mixed_precision, fsdp_casts_at_the_border)
    run_on_ranks(checks, tmp_path, limit_s=560)


@pytest.mark.distributed
@pytest.mark.slow
def test_recomputation(tmp_path: Path) -> None:
    checks = (
        checkpointing,
        recompute_of_the_spec,
        selective_checkpointing,
        several_layers_in_one_checkpoint,
        fsdp_and_checkpointing,
        reentrant_checkpointing_is_refused,
    )
    run_on_ranks(checks, tmp_path, limit_s=560)
