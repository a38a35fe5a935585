"""Exchanges by copies on GPUs: bits of the process group's, on one device that two processes share and on two."""

import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import fxskip
from fxskip.collectives.copy_engine import Slots
from fxskip.collectives.landing import poisoned_buffers
from fxskip.collectives.peer_memory import SymmetricMemory
from tests.collectives.spreads import assert_same_bits, in_mode, model, own_batch, step
from tests.collectives.test_copy_engine import drawn
from tests.training_loop.ranks import run_on_ranks

SHARED = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"


def device_of(rank: int) -> torch.device:
    """Of a process, with attention and sums that give the same bits in each run."""
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    torch.use_deterministic_algorithms(True, warn_only=True)
    for kernel in ("flash", "mem_efficient", "cudnn"):
        getattr(torch.backends.cuda, f"enable_{kernel}_sdp")(False)
    os.environ[SHARED] = "1"
    return device


def group_of(backend: str) -> Any:
    return dist.group.WORLD if backend == "gloo" else dist.new_group(backend=backend)


def rows_arrive(backend: str, rank: int, folder: Path) -> None:
    """With larger slots in between, all exchanges begun before the first is waited for, and with poison."""
    device, group = device_of(rank), group_of(backend)
    exchanges = drawn(2, 40, seed=7)
    for exchange in exchanges:
        exchange.rows = [rows.to(device) for rows in exchange.rows]
    slots = Slots(SymmetricMemory(group, device))
    for poisoned in (False, True, False):
        begun = []
        for exchange in exchanges:
            if poisoned:
                with poisoned_buffers():
                    begun.append(exchange.start(slots, rank))
            else:
                begun.append(exchange.start(slots, rank))
        for exchange, (buffer, work) in zip(exchanges, begun, strict=True):
            work.wait()
            assert torch.equal(buffer, exchange.wanted(rank))
    torch.cuda.set_sync_debug_mode("error")
    try:
        for exchange in exchanges:
            exchange.start(slots, rank)[1].wait()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()


def spread_over(original: nn.Module, mesh: DeviceMesh, **runtime: Any) -> nn.Module:
    """A student that is spread over both processes."""
    spec = {"fxskip": 1, "preset": "farskip", "parallel": {"expert": {"size": 2}}, "runtime": runtime}
    return fxskip.transform(original, spec, mesh=mesh)


def bits_of_the_process_group(backend: str, dtype: torch.dtype, rank: int, folder: Path) -> None:
    """Logits and all gradients."""
    device = device_of(rank)
    mesh = DeviceMesh.from_group(group_of(backend), "cuda", mesh_dim_names=("expert",))
    original = model("qwen2_moe", double=True).to(device, dtype)
    by_group = spread_over(original, mesh)
    by_copies = spread_over(original, mesh, transport="copy_engine")
    recomputed = spread_over(original, mesh, transport="copy_engine", recompute="layer")
    # Of other sizes on the other rank and in the other step, so that slots grow.
    for inputs in (own_batch(rank, 2, 5 + 3 * rank), own_batch(rank, 3, 11)):
        want = step(by_group, inputs, use_cache=False)
        assert not bool(want.logits.isnan().any())
        assert_same_bits(step(by_group, inputs, use_cache=False), want)  # or nothing could be compared
        for student in (by_copies, in_mode(by_copies, "reference"), recomputed):
            assert_same_bits(step(student, inputs, use_cache=False), want)


def a_shared_device_is_refused(rank: int, folder: Path) -> None:
    device = device_of(rank)
    del os.environ[SHARED]
    mesh = DeviceMesh.from_group(dist.new_group(backend="gloo"), "cuda", mesh_dim_names=("expert",))
    original = model("mixtral", layers=2).to(device)
    with pytest.raises(fxskip.PassError, match="copy_engine: several ranks share a device") as caught:
        spread_over(original, mesh, transport="copy_engine")
    assert f"rank {rank}: host" in str(caught.value)
    choice = fxskip.transport_of(spread_over(original, mesh, transport="measured"))
    assert (choice.chosen, choice.timed) == ("gloo", ())
    assert "copies between devices are impossible: several ranks share a device (rank 0: host" in choice.why


def the_faster_one_is_taken(backend: str, rank: int, folder: Path) -> None:
    """Both are timed, and all ranks choose by the same numbers."""
    device = device_of(rank)
    mesh = DeviceMesh.from_group(group_of(backend), "cuda", mesh_dim_names=("expert",))
    original = model("mixtral", layers=2, double=True).to(device)
    free = torch.cuda.memory_allocated()
    student = spread_over(original, mesh, transport="measured")
    choice = fxskip.transport_of(student)
    everyone: list[Any] = [None, None]
    dist.all_gather_object(everyone, choice)
    assert everyone == [choice, choice]
    group, copies = choice.timed
    assert group.transport.startswith(backend) and copies.transport == "copy_engine"
    assert choice.chosen == ("copy_engine" if copies.ms < group.ms else group.transport)
    assert min(min(own) for one in choice.timed for own in one.samples_ms) > 0
    assert torch.cuda.memory_allocated() < free + (64 << 20)  # what was timed is gone
    inputs = own_batch(rank)
    want = step(spread_over(original, mesh), inputs, use_cache=False)
    assert_same_bits(step(student, inputs, use_cache=False), want)


@pytest.mark.distributed
@pytest.mark.gpu(1)
@pytest.mark.skipif(torch.cuda.device_count() < 1, reason="needs a CUDA device")
def test_two_processes_on_one_device(tmp_path: Path) -> None:
    """Rows over gloo, through the host, against copies on the device."""
    checks = (
        partial(rows_arrive, "gloo"),
        partial(bits_of_the_process_group, "gloo", torch.float64),
        partial(the_faster_one_is_taken, "gloo"),
    )
    run_on_ranks(checks, tmp_path, limit_s=300)


@pytest.mark.distributed
@pytest.mark.gpu(1)
@pytest.mark.skipif(torch.cuda.device_count() != 1, reason="needs one CUDA device, and no second one")
def test_a_device_that_ranks_share(tmp_path: Path) -> None:
    run_on_ranks((a_shared_device_is_refused,), tmp_path, limit_s=120)


@pytest.mark.distributed
@pytest.mark.gpu(2)
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_two_devices(tmp_path: Path) -> None:
    """Rows over NCCL against copies between the devices."""
    checks = (
        partial(rows_arrive, "nccl"),
        partial(bits_of_the_process_group, "nccl", torch.float64),
        partial(bits_of_the_process_group, "nccl", torch.bfloat16),
        partial(the_faster_one_is_taken, "nccl"),
    )
    run_on_ranks(checks, tmp_path, limit_s=300)
