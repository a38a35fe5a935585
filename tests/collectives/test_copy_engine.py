"""Exchanges by copies between devices: slots and their order, with a stand-in for the memory that ranks share."""

import random
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fxskip
from fxskip.collectives import peer_memory
from fxskip.collectives.copy_engine import Slots, tried, use_slots
from fxskip.collectives.failures import Work
from fxskip.collectives.landing import poisoned_buffers
from fxskip.parallel import LayerMesh
from tests.collectives.device import DEVICE
from tests.collectives.shared_memory import SharedMemory
from tests.collectives.spreads import (
    Batch,
    assert_same_bits,
    in_mode,
    model,
    own_batch,
    regions,
    spread,
    step,
)
from tests.collectives.test_uneven import route_to
from tests.training_loop.ranks import run_on_ranks

ON_CPUS = pytest.mark.skipif(DEVICE != "cpu", reason="test_copy_engine_gpu.py has the memory of GPUs")
Table = list[list[int]]
"""Rows that each rank sends to each."""


class Exchange:
    """One on all ranks: how many rows, of what, and what each should get."""

    def __init__(self, table: Table, dtype: torch.dtype, width: int, seed: int) -> None:
        self.table, self.ranks = table, len(table)
        generator = torch.Generator().manual_seed(seed)
        self.rows = [torch.rand(sum(sent), width, generator=generator).to(dtype) for sent in table]
        others = [[n for to, n in enumerate(sent) if to != rank] for rank, sent in enumerate(table)]
        self.most = max(max(sent) for sent in others)

    def received(self, rank: int) -> tuple[int, ...]:
        return tuple(sent[rank] for sent in self.table)

    def start(self, slots: Slots, rank: int) -> tuple[Tensor, Work]:
        rows = self.rows[rank]
        buffer = rows.new_empty(sum(self.received(rank)), *rows.shape[1:])
        sent = tuple(self.table[rank])
        return buffer, slots.start(rows, buffer, sent, self.received(rank), self.most)

    def wanted(self, rank: int) -> Tensor:
        """By the definition of an all-to-all: from each rank in turn, its rows for this one."""
        return torch.cat([r.split(sent)[rank] for r, sent in zip(self.rows, self.table, strict=True)])


def on_ranks(ranks: int, body: Callable[[int], Any]) -> list[Any]:
    """body(rank) in a thread for each; an error of one is raised."""
    with ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(body, range(ranks)))


def drawn(ranks: int, count: int, seed: int) -> list[Exchange]:
    """Random sizes, zeros among them, that tend to grow, and now and then an exchange in which no rank has a row."""
    draw = random.Random(seed)
    found = []
    for number in range(count):
        largest = draw.choice([0, 3, 3 + 4 * number])
        table = [[draw.randint(0, largest) for _ in range(ranks)] for _ in range(ranks)]
        dtype = draw.choice([torch.float32, torch.bfloat16, torch.float64])
        found.append(Exchange(table, dtype, draw.choice([1, 5, 16]), seed + number))
    return found


@pytest.mark.parametrize("poisoned", [False, True])
@pytest.mark.parametrize("ranks", [2, 3])
def test_each_rank_gets_the_rows_for_it(ranks: int, poisoned: bool, tmp_path: Path) -> None:
    """With ranks out of step by several exchanges, and larger slots in between."""
    exchanges = drawn(ranks, 30, seed=ranks)
    allocated: dict[int, list[int]] = {}

    def body(rank: int) -> None:
        memory = SharedMemory(tmp_path, rank, ranks, pause_s=4e-3)
        slots = Slots(memory)
        begun = [exchange.start(slots, rank) for exchange in exchanges]
        for exchange, (buffer, work) in zip(exchanges, begun, strict=True):
            work.wait()
            assert torch.equal(buffer, exchange.wanted(rank))
        allocated[rank] = memory.sizes

    if poisoned:
        with poisoned_buffers():
            on_ranks(ranks, body)
    else:
        on_ranks(ranks, body)
    sizes = allocated[0]
    assert all(other == sizes for other in allocated.values())
    assert sizes == sorted(set(sizes)) and 1 < len(sizes) < 10  # grown, never shrunk, never twice as large


def late_rank(tmp_path: Path, exchanges: list[Exchange], **options: Any) -> list[list[Tensor]]:
    """What each rank gets while rank 1 is late with every copy."""

    def body(rank: int) -> list[Tensor]:
        slots = Slots(SharedMemory(tmp_path, rank, 2, pause_s=0.2 * rank, **options))
        begun = [exchange.start(slots, rank) for exchange in exchanges]
        for _, work in begun:
            work.wait()
        return [buffer for buffer, _ in begun]

    return on_ranks(2, body)


EQUAL = [Exchange([[1, 4], [4, 1]], torch.bfloat16, 8, seed) for seed in range(4)]


def test_a_rank_that_is_early_waits(tmp_path: Path) -> None:
    """For rows that are not there yet, and for slots that are not read yet."""
    for rank, buffers in enumerate(late_rank(tmp_path, EQUAL)):
        for exchange, buffer in zip(EQUAL, buffers, strict=True):
            assert torch.equal(buffer, exchange.wanted(rank))


def test_rows_that_are_read_too_early_are_nan(tmp_path: Path) -> None:
    """Where the signal between ranks breaks after two exchanges, no old rows pass for new ones."""
    with poisoned_buffers():
        found, _ = late_rank(tmp_path, EQUAL, meetings=2)
    for exchange, buffer in zip(EQUAL[:2], found[:2], strict=True):
        assert torch.equal(buffer, exchange.wanted(0))
    for buffer in found[2:]:
        assert buffer.isnan().all(1).tolist() == [False, True, True, True, True]  # the first row is its own


def test_more_rows_than_was_said_are_refused(tmp_path: Path) -> None:
    slots = Slots(SharedMemory(tmp_path, 0, 2))
    rows = torch.zeros(5, 2)
    with pytest.raises(
        fxskip.CollectiveError, match="5 rows to send to rank 1 of the group, and the slots are for 4"
    ):
        slots.start(rows, rows, (0, 5), (0, 4), 4)
    with pytest.raises(fxskip.CollectiveError, match="5 rows to receive from rank 1"):
        slots.start(rows, rows, (0, 4), (0, 5), 4)


def test_rows_on_another_device_are_refused(tmp_path: Path) -> None:
    slots, rows = Slots(SharedMemory(tmp_path, 0, 2)), torch.zeros(5, 2, device="meta")
    with pytest.raises(
        fxskip.CollectiveError, match="the rows are on meta, and the slots of this process on cpu"
    ):
        slots.start(rows, rows, (0, 5), (0, 5), 5)


def test_a_build_without_cuda_has_no_symmetric_memory() -> None:
    if torch.version.cuda is not None:
        pytest.skip("this build has CUDA")
    assert (
        peer_memory._obstacle(torch.device("cuda"))
        == "this build of PyTorch has no symmetric memory for CUDA"
    )


def test_a_first_exchange_finds_a_memory_that_is_not_shared(tmp_path: Path) -> None:
    """Each rank maps files of its own, and signals nobody."""

    def body(rank: int) -> None:
        own = tmp_path / str(rank)
        own.mkdir()
        memory = SharedMemory(own, rank, 2, meetings=0)
        memory.others_have_allocated()
        with pytest.raises(fxskip.PassError, match=r"the others sent \[.*\], and \[.*\] arrived"):
            tried(memory)

    on_ranks(2, body)


def by_copies(student: nn.Module, folder: Path) -> tuple[nn.Module, SharedMemory]:
    """A copy of a student spread over gloo whose rows go through the stand-in; that, which notes sizes."""
    twin = in_mode(student, "scheduled")
    for layer in regions(twin):
        assert layer.fxskip_parallel is not None and isinstance(layer.fxskip_mesh, LayerMesh)
        layer.fxskip_parallel = replace(layer.fxskip_parallel, transport="copy_engine")
        group = layer.fxskip_mesh.axis("expert").get_group()
    folder.mkdir(exist_ok=True)
    memory = SharedMemory(folder, dist.get_rank(), 2, pause_s=2e-3)
    use_slots(group, tried(memory))
    return twin, memory


def assert_bits_of_the_process_group(student: nn.Module, twin: nn.Module, inputs: Batch) -> None:
    want = step(student, inputs, use_cache=False)
    assert_same_bits(step(twin, inputs, use_cache=False), want)


def growing_batches(rank: int, folder: Path) -> None:
    """Logits and all gradients, with sizes that differ between ranks and steps."""
    student = spread(model("qwen2_moe", layers=2))
    twin, memory = by_copies(student, folder / "growing")
    for rows, columns in ((2, 5 + 3 * rank), (3, 11)):
        assert_bits_of_the_process_group(student, twin, own_batch(rank, rows, columns))
    assert len(memory.sizes) > 2  # one for the first exchange of all, then grown more than once


def other_ways_to_run(sections: dict[str, Any], rank: int, folder: Path) -> None:
    """What was received is kept for a recomputation, or arrives in another order, or is waited for at once."""
    student = spread(model("deepseek_v2"), **sections)
    twin, _ = by_copies(student, folder / "-".join(sections))
    for columns in (9, 4 + 3 * rank):
        assert_bits_of_the_process_group(student, twin, own_batch(rank, 2, columns))
    assert_bits_of_the_process_group(student, in_mode(twin, "reference"), own_batch(rank))
    assert_bits_of_the_process_group(student, in_mode(twin, "eager_wait"), own_batch(rank))


def no_rows_for_a_rank(rank: int, folder: Path) -> None:
    """All tokens of both ranks go to the experts of one of them."""
    student = spread(model("mixtral", layers=2))
    twin, _ = by_copies(student, folder / "none")
    for chosen in ([0, 1], [3, 2]):
        want = step(route_to(chosen, in_mode(student, "scheduled")), own_batch(rank), use_cache=False)
        found = step(route_to(chosen, in_mode(twin, "scheduled")), own_batch(rank), use_cache=False)
        assert_same_bits(found, want)


def refusals(rank: int, folder: Path) -> None:
    """Before the model is touched."""
    original = model("mixtral", layers=1)
    with pytest.raises(fxskip.PassError, match="copy_engine: the mesh is one of cpu devices"):
        spread(original, runtime={"transport": "copy_engine"})
    sums = {"expert": {"size": 2, "exchange": "all_reduce"}}
    with pytest.raises(
        fxskip.PassError, match="copy_engine moves rows between experts, and this spec only adds up"
    ):
        spread(original, runtime={"transport": "copy_engine"}, parallel=sums)
    assert not fxskip.is_transformed(original)


def test_a_device_without_access_is_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of three devices that this process sees; another process has a fourth."""
    asked = []

    def can_access(device: torch.device, other: torch.device) -> bool:
        asked.append((device.index, other.index))
        return other.index == 2

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", can_access)
    monkeypatch.setattr(peer_memory, "_device_name", lambda device: f"GPU-{device.index}")
    device = torch.device("cuda", 1)
    with pytest.warns(UserWarning, match=r"cuda:1 has no direct access to the memory of cuda:0 \(GPU-0\): "):
        peer_memory.warn_without_access(device, ("GPU-0", "GPU-1", "GPU-2", "GPU-3"))
    assert asked == [(1, 0), (1, 2)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        peer_memory.warn_without_access(device, ("GPU-1", "GPU-2"))


def peers_that_cannot_be(rank: int, folder: Path) -> None:
    """All ranks say the same, also of what only one of them lacks."""
    device, world = torch.device("cuda", rank), dist.group.WORLD
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(peer_memory, "_device_name", lambda device: f"GPU-{device.index}")
        patched.setattr(peer_memory, "_obstacle", lambda device: None)
        assert peer_memory.require_peers(world, device) == ("GPU-0", "GPU-1")
        with pytest.raises(fxskip.PassError, match="several ranks share a device") as caught:
            peer_memory.require_peers(world, torch.device("cuda", 5))
        assert str(caught.value).count("device GPU-5") == 2
        patched.setattr(peer_memory, "_obstacle", lambda device: "none here" if device.index else None)
        with pytest.raises(fxskip.PassError, match="copy_engine: none here"):
            peer_memory.require_peers(world, device)
        patched.setattr(peer_memory, "_obstacle", lambda device: None)
        patched.setattr("socket.gethostname", lambda: f"host{rank}")
        with pytest.raises(
            fxskip.PassError, match="on several hosts\n  where  rank 0: host host0, device GPU-0"
        ):
            peer_memory.require_peers(world, device)


@ON_CPUS
@pytest.mark.distributed
def test_two_processes(tmp_path: Path) -> None:
    run_on_ranks((growing_batches, refusals, peers_that_cannot_be), tmp_path, limit_s=300)


@ON_CPUS
@pytest.mark.distributed
@pytest.mark.slow
def test_two_processes_in_other_ways(tmp_path: Path) -> None:
    ways: list[dict[str, Any]] = [
        {},
        {"runtime": {"recompute": "layer"}},
        {"schedule": {"backward": "explicit"}},
    ]
    checks = [partial(other_ways_to_run, sections) for sections in ways]
    run_on_ranks([*checks, no_rows_for_a_rank], tmp_path, limit_s=560)
