"""Figures of what was measured, against sampling of times and against values worked out by hand."""

import random
from types import SimpleNamespace

import pytest

from fxskip.schedule.intervals import length, uncovered, union
from fxskip.tracing.figures import figures
from fxskip.tracing.kernels import kind_of, read_events
from fxskip.tracing.records import Flight, Kernel, StepRecord, Task
from fxskip.tracing.runs import ModeRuns, Times


def task(start, end, phase="forward", lane="compute"):
    return Task(0, "moe1.0", lane, phase, float(start), float(end))


def flight(start, end, phase="forward"):
    return Flight(
        0, "dispatch", "expert", phase, 64, float(start), float(start), float(end), float(end), float(end)
    )


def runs(tasks=(), flights=(), times=((50.0, 100.0),), kernels=()):
    record = StepRecord(tuple(tasks), tuple(flights), {"forward": 50.0, "backward": 100.0})
    return ModeRuns(tuple(Times(*one) for one in times), (record,), kernels)


def sampled(spans, by=None):
    """Unit steps of 0..200 in which one of `spans` is open, and none of `by`. Spans have whole ends."""
    covering = by or []
    return sum(
        any(a <= t < b for a, b in spans) and not any(a <= t < b for a, b in covering) for t in range(200)
    )


@pytest.mark.parametrize("seed", range(40))
def test_against_sampling(seed):
    draw = random.Random(seed)

    def spans(count):
        starts = [draw.randrange(0, 150) for _ in range(count)]
        return [(start, start + draw.randrange(1, 40)) for start in starts]

    collectives, compute = spans(draw.randrange(1, 8)), spans(draw.randrange(0, 8))
    assert length(union(compute)) == sampled(compute)
    assert uncovered(collectives, compute) == sampled(collectives, compute)
    own = runs([task(*s) for s in compute], [flight(*s) for s in collectives])
    found = figures([{"as it is": own}], "forward")
    assert found.exposed_us == sampled(collectives, compute)
    assert found.compute_us == sampled(compute)
    assert found.coincidence == pytest.approx(
        1 - sampled(collectives, compute) / sampled(collectives), abs=1e-12
    )
    both = [*collectives, *compute]
    span = max(end for _, end in both) - min(start for start, _ in both)
    assert found.idle_us == span - sampled(both)


def test_by_step_time():
    """t = 100, t_blocking = 140, t_none = 90: communication costs 50 if it blocks, and 10 of that are left."""
    ranks = [
        {
            "as it is": runs(times=[(50, 98), (50, 100), (50, 101)]),
            "blocking": runs(times=[(60, 140)] * 3),
            "nothing sent": runs(times=[(45, 80), (45, 90), (45, 95)]),
        },
        {
            "as it is": runs(times=[(50, 100), (50, 99), (50, 101)]),
            "blocking": runs(times=[(60, 130)] * 3),
            "nothing sent": runs(times=[(45, 85), (45, 85), (45, 90)]),
        },
    ]
    found = figures(ranks, "step")
    assert (found.step_us, found.blocking_us, found.none_us) == (100, 140, 90)
    assert found.hidden == pytest.approx(1 - 10 / 50)
    backward = figures(ranks, "backward")
    assert (backward.step_us, backward.blocking_us, backward.none_us) == (50, 80, 45)


def test_nothing_to_hide():
    ranks = [{mode: runs(times=[(50, 100)]) for mode in ("as it is", "blocking", "nothing sent")}]
    assert figures(ranks, "step").hidden is None
    assert figures([{"as it is": runs()}], "step").hidden is None
    assert figures([{"as it is": runs()}], "step").coincidence == 1.0


def test_the_rank_with_the_most_exposed_time():
    good = runs([task(0, 50)], [flight(10, 30)])
    bad = runs([task(0, 20)], [flight(10, 60)])
    found = figures([{"as it is": good}, {"as it is": bad}], "forward")
    assert (found.exposed_us, found.compute_us, found.collective_us) == (40, 20, 50)
    assert found.min_collective_us == 20  # the rank that came last did not wait


def test_ranks_with_different_collectives_have_no_least_time():
    one, two = runs([], [flight(0, 10)]), runs([], [flight(0, 10), flight(20, 30)])
    assert figures([{"as it is": one}, {"as it is": two}], "forward").min_collective_us is None


def test_stretch():
    """Compute of 60 us beside collectives takes 50 without."""
    ranks = [
        {"as it is": runs([task(0, 30), task(40, 70)]), "nothing sent": runs([task(0, 30), task(40, 60)])}
    ]
    assert figures(ranks, "forward").stretch_us == 10


def test_host_tasks_are_no_compute():
    found = figures([{"as it is": runs([task(0, 50, lane="host")], [flight(0, 50)])}], "forward")
    assert (found.compute_us, found.exposed_us) == (0, 50)


def test_phases_are_told_apart():
    own = runs([task(0, 20), task(60, 90, "backward")], [flight(10, 40), flight(70, 75, "backward")])
    found = {part: figures([{"as it is": own}], part) for part in ("forward", "backward", "step")}
    assert {part: one.exposed_us for part, one in found.items()} == {
        "forward": 20, "backward": 0, "step": 20,
    }  # fmt: skip


def test_kernels_come_before_what_the_host_saw():
    kernels = (
        Kernel("gemm", False, "forward", 0.0, 10.0, 7),
        Kernel("ncclDevKernel_SendRecv", True, "forward", 5.0, 25.0, 20),
    )
    found = figures([{"as it is": runs([task(0, 50)], [flight(0, 50)], kernels=(kernels,))}], "forward")
    assert (found.source, found.exposed_us, found.compute_us, found.coincidence) == (
        "kernels", 15, 10, 0.25,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", "communication"),
        ("ncclKernel_AllReduce_RING_LL_Sum_bf16", "communication"),
        ("Memcpy PtoP (Device -> Device)", "communication"),
        (
            "c10d::symmetric_memory::barrier_kernel(unsigned int**, int, int, int, unsigned long)",
            "communication",
        ),
        ("Memcpy DtoD (Device -> Device)", ""),
        ("Memcpy DtoH (Device -> Pinned)", ""),
        ("Memset (Device)", ""),
        ("nvjet_tst_128x256_64x4_2x1_v_bz_TNT", "compute"),
        ("void cudnn::fusion::compute_dot_do_o", "compute"),
    ],
)
def test_kinds_of_kernels(name, expected):
    assert kind_of(name) == expected


def event(name, start, end, device="CUDA", note=False):
    return SimpleNamespace(
        name=name, device_type=SimpleNamespace(name=device), is_user_annotation=note, device_resource_id=7,
        time_range=SimpleNamespace(start=start, end=end),
    )  # fmt: skip


def test_events_of_the_profiler():
    """Two phases, with a fill, a range that the profiler shows on the GPU as well, and operations of the host."""
    found = read_events(
        [
            event("aten::mm", 90, 95, device="CPU"),
            event("gemm", 100, 110),
            event("ncclDevKernel_SendRecv", 105, 130),
            event("nccl:all_to_all", 105, 130, note=True),
            event("fxskip: a phase ends", 101, 131, device="CPU"),
            event("fxskip: a phase ends", 101, 131, note=True),
            event("Memset (Device)", 140, 141),
            event("gemm", 150, 160),
            event("fxskip: a phase ends", 151, 161, device="CPU"),
        ]
    )
    assert [(k.name, k.communicates, k.phase, k.start_us, k.end_us) for k in found] == [
        ("gemm", False, "forward", 0, 10),
        ("ncclDevKernel_SendRecv", True, "forward", 5, 30),
        ("gemm", False, "backward", 50, 60),
    ]
