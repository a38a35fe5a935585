"""`runtime.transport: measured`: what is timed, what is chosen, and what the record says."""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import fxskip
from fxskip.collectives.all_to_all import AllToAll
from fxskip.collectives.copy_engine import Slots, tried, use_slots
from fxskip.collectives.peer_memory import impossible, patience_ms
from fxskip.runtime import measured_transport, parallelize
from fxskip.runtime.measured_transport import LARGEST_BYTES, ROUNDS, TOKENS, load_of, measured
from fxskip.schedule.costs import Costs, ModelCosts
from fxskip.transport import Load, TransportChoice, faster
from tests.collectives.device import DEVICE
from tests.collectives.shared_memory import SharedMemory
from tests.collectives.spreads import model, own_batch, regions, spread
from tests.plain.models import Model, SkippingMoE
from tests.training_loop.ranks import run_on_ranks

ON_CPUS = pytest.mark.skipif(DEVICE != "cpu", reason="test_copy_engine_gpu.py has the memory of GPUs")
LOAD = Load(4096, 2, 8192, 64, "float32", ((64, 64),))
SLOW_S = 0.05


@pytest.mark.parametrize(
    ("by_group", "by_copies", "chosen", "ms"),
    [
        ([[3, 1, 9], [2, 2, 2]], [[2, 2, 2], [9, 1, 2.5]], "copy_engine", (3, 2.5)),
        ([[1, 1, 9], [2, 2, 2]], [[1, 1, 1], [3, 9, 1]], "nccl", (2, 3)),
        ([[1, 1, 1], [2, 2, 2]], [[2, 9, 0], [1, 1, 1]], "nccl", (2, 2)),
    ],
)
def test_the_slowest_rank_decides(
    by_group: list[list[float]], by_copies: list[list[float]], chosen: str, ms: tuple[float, float]
) -> None:
    """By its median; one sample that went wrong does not, nor does a faster rank. Equals are the process group's."""
    found = faster("nccl", LOAD, by_group, by_copies)
    assert tuple(one.ms for one in found.timed) == ms
    assert found.chosen == chosen


class Stacks(nn.Module):
    """Experts of the given matrices, without memory."""

    def __init__(self, *matrices: tuple[int, int]) -> None:
        super().__init__()
        for number, matrix in enumerate(matrices):
            self.register_parameter(f"m{number}", nn.Parameter(torch.empty(8, *matrix, device="meta")))
        self.bias = nn.Parameter(torch.empty(8, 5, device="meta"))


def costs(width: int, chosen: int | None, dtype: str = "bfloat16") -> ModelCosts:
    experts = None if chosen is None else 8
    return ModelCosts((Costs((), width), Costs((), width, experts, chosen)), dtype, 0, None, None)


def test_the_load_is_the_student_s() -> None:
    found = load_of(costs(64, 2), Stacks((96, 64), (64, 48)), 2)
    assert found == Load(TOKENS, 2, 2 * TOKENS, 64, "bfloat16", ((96, 64), (64, 48)))
    assert load_of(costs(64, None), Stacks((96, 64), (64, 48)), 2).rows == TOKENS  # the router is hidden
    assert load_of(costs(64, 2), Stacks((96, 64), (64, 48)), 3).rows == 8190  # equally many for each
    latent = load_of(costs(64, 2), Stacks((96, 32), (32, 48)), 2)
    assert latent.width == 32  # experts between projections to a smaller width


def test_no_tensor_of_the_load_is_too_large() -> None:
    """Mixtral 8x22B in bfloat16: gate and up are [32768, 6144]."""
    found = load_of(costs(6144, 2), Stacks((32768, 6144), (6144, 16384)), 8)
    assert found.rows * 32768 * 2 <= LARGEST_BYTES < (found.rows + 8) * 32768 * 2
    assert found.rows % 8 == 0


def test_a_model_in_one_process_has_no_transport() -> None:
    original = model("mixtral", layers=2)
    with pytest.raises(fxskip.PassError, match="transport_of"):
        fxskip.transport_of(original)
    with pytest.raises(fxskip.PassError, match="runs in one process, where nothing moves"):
        fxskip.transport_of(fxskip.transform(original, "farskip"))


def gathered(mine: Any) -> list[Any]:
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    return found


def measured_student() -> tuple[nn.Module, TransportChoice]:
    """And what its ranks say alike."""
    original, before = model("mixtral", layers=2), torch.random.get_rng_state()
    student = spread(original, runtime={"transport": "measured"})
    assert torch.equal(torch.random.get_rng_state(), before)
    choice = fxskip.transport_of(student)
    assert gathered(choice) == [choice, choice]
    for layer in regions(student):
        assert layer.fxskip_parallel is not None and layer.fxskip_parallel.transport == choice.chosen
    return student, choice


def cpus_have_no_copies(rank: int, folder: Path) -> None:
    """The student is that of `auto`."""
    student, choice = measured_student()
    why = "copies between devices are impossible: the mesh is one of cpu devices"
    assert choice == TransportChoice("measured", "gloo", why)
    by_group = spread(model("mixtral", layers=2))
    assert fxskip.transport_of(by_group) == TransportChoice("auto", "gloo", "the process group's backend")
    assert [r.fxskip_parallel for r in regions(student)] == [r.fxskip_parallel for r in regions(by_group)]
    timeline = fxskip.trace(student.eval(), own_batch(rank), steps=1)
    assert f"transport of rows: gloo (measured: {why})" in timeline.text()
    assert timeline.about.choice == choice
    assert json.loads(timeline.to_json())["about"]["choice"] == choice.as_data()


@contextmanager
def stand_in(folder: Path, pause_s: float) -> Iterator[None]:
    """Copies are possible: one folder for the slots that are timed, one for those that the student keeps."""
    rank, ranks = dist.get_rank(), dist.get_world_size()

    def memory(name: str) -> SharedMemory:
        (folder / name).mkdir(parents=True, exist_ok=True)
        return SharedMemory(folder / name, rank, ranks, pause_s=pause_s)

    def slots(mesh: Any, *, warns: bool) -> Slots:
        assert not warns
        return tried(memory("timed"))

    def keep(mesh: Any, *, warns: bool) -> None:
        assert not warns
        use_slots(mesh.get_group(), tried(memory("kept")))

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(measured_transport, "slots_between_devices", slots)
        patched.setattr(parallelize, "connect_devices", keep)
        yield


def assert_both_were_timed(choice: TransportChoice) -> None:
    group, copies = choice.timed
    assert (group.transport, copies.transport) == ("gloo", "copy_engine")
    for one in choice.timed:
        assert [len(own) for own in one.samples_ms] == [ROUNDS, ROUNDS]
        assert min(min(own) for own in one.samples_ms) > 0
        assert one.ms == max(median(own) for own in one.samples_ms)
        assert f"{one.transport} {one.ms:.3f} ms" in choice.why
    assert choice.load is not None and choice.load.rows == 2 * TOKENS  # Mixtral's tokens have two experts


def slow_copies(rank: int, folder: Path) -> None:
    with stand_in(folder / "slow copies", SLOW_S):
        _, choice = measured_student()
    assert_both_were_timed(choice)
    assert choice.chosen == "gloo" and choice.timed[1].ms > choice.timed[0].ms


def logits(student: nn.Module, rank: int) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = student.eval()(**own_batch(rank), use_cache=False).logits
    return found


def slow_process_group(rank: int, folder: Path) -> None:
    """The faster one moves the rows of the student, too."""
    send, moved = AllToAll.send, []

    def late(self: AllToAll, *tensors: Any) -> Any:
        time.sleep(SLOW_S)
        return send(self, *tensors)

    start = Slots.start

    def noted(self: Slots, rows: Any, *others: Any) -> Any:
        moved.append(rows.shape[0])
        return start(self, rows, *others)

    with stand_in(folder / "slow group", 0.0), pytest.MonkeyPatch.context() as patched:
        patched.setattr(AllToAll, "send", late)
        student, choice = measured_student()
    assert_both_were_timed(choice)
    assert choice.chosen == "copy_engine" and choice.timed[0].ms > 1e3 * SLOW_S
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Slots, "start", noted)
        found = logits(student, rank)
    assert len(moved) == 4  # two layers, there and back
    assert torch.equal(found, logits(spread(model("mixtral", layers=2)), rank))


def one_rank_s_obstacle_is_everybody_s(rank: int, folder: Path) -> None:
    """A group of the axis that has no copies has those of the others do without, and so does a lack of memory."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("expert",))
    with stand_in(folder / "obstacle", 0.0), pytest.MonkeyPatch.context() as patched:
        if rank == 1:
            patched.setattr(measured_transport, "slots_between_devices", no_peers)
        else:
            patched.setattr(measured_transport, "slots_between_devices", lambda mesh, *, warns: None)
        found = measured(mesh, "expert", "gloo", lambda: LOAD)
    why = "copies between devices are impossible: none here (rank 1: host a; rank 3: host b)"
    assert found == TransportChoice("measured", "gloo", why)
    with stand_in(folder / "memory", 0.0), pytest.MonkeyPatch.context() as patched:
        if rank == 1:
            patched.setattr(measured_transport, "_Bench", no_memory)
        found = measured(mesh, "expert", "gloo", lambda: LOAD)
    why = "rank 1 has no memory to time copies between devices: all is full"
    assert found == TransportChoice("measured", "gloo", why)


def no_peers(mesh: Any, *, warns: bool) -> Slots:
    raise impossible("none here", where="rank 1: host a\nrank 3: host b")


def no_memory(*arguments: Any) -> None:
    raise torch.OutOfMemoryError("all is full\nfree some")


def the_group_s_timeout_is_the_patience(rank: int, folder: Path) -> None:
    group = dist.new_group(timeout=timedelta(seconds=7.5))
    assert patience_ms(group, torch.device("cpu")) == 7500
    group._get_backend(torch.device("cpu")).set_timeout(timedelta(seconds=9))
    assert patience_ms(group, torch.device("cpu")) == 9000


def nothing_to_exchange(rank: int, folder: Path) -> None:
    """Ranks with the same tokens only add up; experts that are a module each are not spread at all."""
    sums = {"expert": {"size": 2, "exchange": "all_reduce"}}
    with pytest.raises(
        fxskip.PassError, match="measured moves rows between experts, and this spec only adds"
    ):
        spread(model("mixtral", layers=2), runtime={"transport": "measured"}, parallel=sums)
    torch.manual_seed(0)
    spec = {"fxskip": 1, "parallel": {"expert": {"size": 2}}, "runtime": {"transport": "measured"}}
    with pytest.raises(fxskip.PassError, match="no layer of Model has its routed experts as stacks"):
        fxskip.transform(Model(SkippingMoE), spec, example_inputs=(torch.zeros(2, 8, dtype=torch.long),))


@ON_CPUS
@pytest.mark.distributed
def test_two_processes(tmp_path: Path) -> None:
    checks = (
        cpus_have_no_copies,
        slow_copies,
        slow_process_group,
        one_rank_s_obstacle_is_everybody_s,
        the_group_s_timeout_is_the_patience,
        nothing_to_exchange,
    )
    run_on_ranks(checks, tmp_path, limit_s=300)
