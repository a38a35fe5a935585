"""schedule.gradients: in_backward leaves the bits of average_gradients, and sends while the backward pass runs."""

import copy
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import fxskip
from fxskip.collectives.landing import poisoned_buffers, under_way
from fxskip.runtime.gradient_buckets import Bucket
from fxskip.runtime.gradients_in_backward import GradientsInBackward
from tests.collectives.spreads import MODES, gradients, in_mode, model, own, own_batch, regions, spread
from tests.collectives.test_failures import (
    ATTENTION,
    FailAt,
    Mishap,
    backward_of,
    on_a_group_of_its_own,
    run,
)
from tests.collectives.test_gradients import assert_close, gradients_of_the_mean
from tests.ranks import run_ranks
from tests.training_loop.ranks import run_on_ranks

LAYERS = 2
Gradients = dict[str, Tensor]
Loop = Callable[[nn.Module, int], None]


@cache
def pair(backward: str = "mirrored", **overrides: Any) -> tuple[nn.Module, nn.Module]:
    """The same model: averaged by call, and in the backward pass."""
    original = model("qwen2_moe", layers=LAYERS, **overrides)
    by_call = spread(original, schedule={"backward": backward})
    return by_call, spread(original, schedule={"backward": backward, "gradients": "in_backward"})


def copies(mode: str = "scheduled", **options: Any) -> tuple[nn.Module, nn.Module]:
    by_call, in_backward = (in_mode(student, mode) for student in pair(**options))
    return by_call, in_backward


def buckets(student: nn.Module) -> tuple[Bucket, ...]:
    found = regions(student)[0].fxskip_gradients
    assert found is not None
    return found.plan.buckets


def backward(module: nn.Module, rank: int, rows: int = 2) -> None:
    backward_of_rows(module, rank, rows).backward()


def backward_of_rows(module: nn.Module, rank: int, rows: int = 2) -> Tensor:
    loss: Tensor = module(**own_batch(rank, rows), use_cache=False).loss
    return loss


def assert_same_gradients(found: nn.Module, want: nn.Module) -> None:
    """To the last bit, and there are some."""
    got, expected = gradients(found), gradients(want)
    assert got.keys() == expected.keys() and len(got) > 20
    assert [n for n, g in got.items() if not torch.equal(own(g), own(expected[n]))] == []


def assert_as_by_call(loop: Loop, rank: int, modes: tuple[str, ...] = ("scheduled",), **options: Any) -> None:
    """`loop` without averages, and a call at its end; and with averages in its last backward pass."""
    for mode in modes:
        by_call, in_backward = copies(mode, **options)
        loop(by_call, rank)
        fxskip.average_gradients(by_call)
        with poisoned_buffers():
            loop(in_backward, rank)
        assert under_way() == []
        assert_same_gradients(in_backward, by_call)


# --- the same bits -------------------------------------------------------------------------------


def one_backward_pass(rank: int, folder: Path) -> None:
    assert_as_by_call(backward, rank, MODES)


@contextmanager
def watched(student: nn.Module) -> Iterator[list[str]]:
    """The parameters whose gradients are complete, and the buckets that are started, as they come."""
    seen: list[str] = []
    original = Bucket.start

    def noting(bucket: Bucket) -> Any:
        seen.append(bucket.name)
        return original(bucket)

    def arrived(name: str, _: Tensor) -> None:
        seen.append(name)

    hooks = [
        p.register_post_accumulate_grad_hook(partial(arrived, name)) for name, p in student.named_parameters()
    ]
    with patch.object(Bucket, "start", noting):
        yield seen
    for hook in hooks:
        hook.remove()


def buckets_leave_under_the_backward_pass(rank: int, folder: Path) -> None:
    """Each as soon as its last gradient is there, in the order of the plan; by reference after the pass."""
    for how in ("mirrored", "explicit"):
        student = copies(backward=how)[1]
        backward(student, rank)
        student.zero_grad()
        with watched(student) as seen:
            backward(student, rank)
        names = {bucket.name for bucket in buckets(student)}
        for bucket in buckets(student):
            at = seen.index(bucket.name)
            last = next(
                one for one in seen[at:] if one not in names
            )  # fxskip's hook runs before that of `watched`
            assert set(bucket.names) - set(seen[:at]) == {last}, bucket.name
        assert [one for one in seen if one in names and "expert" not in one] == [
            "head_gradients (data) of decoder layer 1",
            "gradients (data) of decoder layer 1",
            "gradients (data) of decoder layer 0",
            "embedding_gradients (data) of decoder layer 0",
        ]
    student = copies("reference")[1]
    with watched(student) as seen:
        backward(student, rank)
    assert set(seen[-len(buckets(student)) :]) == {bucket.name for bucket in buckets(student)}


# --- training loops ------------------------------------------------------------------------------


def accumulation(module: nn.Module, rank: int) -> None:
    is_by_call = regions(module)[0].fxskip_gradients is None
    if is_by_call:
        backward(module, rank, 1)
    else:
        with fxskip.no_sync(module):
            backward(module, rank, 1)
    backward(module, rank, 3)


def two_live_forwards(module: nn.Module, rank: int) -> None:
    (backward_of_rows(module, rank, 1) + backward_of_rows(module, rank, 2)).backward()


def recomputed(module: nn.Module, rank: int) -> None:
    module.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
    backward(module, rank)
    module.gradient_checkpointing_disable()  # type: ignore[operator]


def frozen(module: nn.Module, rank: int) -> None:
    regions(module)[0].requires_grad_(False)
    backward(module, rank)
    regions(module)[0].requires_grad_(True)
    module.zero_grad()
    backward(module, rank)
    module.model.embed_tokens.requires_grad_(False)  # type: ignore[union-attr,operator]
    module.zero_grad()
    backward(module, rank)


def accumulates(rank: int, folder: Path) -> None:
    assert_as_by_call(accumulation, rank, MODES)
    for loop in (two_live_forwards, frozen, recomputed):
        assert_as_by_call(loop, rank)
    for loop in (backward, accumulation, two_live_forwards, recomputed):
        assert_as_by_call(loop, rank, backward="explicit")
    assert_as_by_call(accumulation, rank, tie_word_embeddings=True)


def without_no_sync(rank: int, folder: Path) -> None:
    """Means add up, also of experts, whose mean has another factor than its sum over processes; in float64."""
    by_call, in_backward = copies(double=True)
    for rows in (1, 3):
        backward(by_call, rank, rows)
        backward(in_backward, rank, rows)
    fxskip.average_gradients(by_call)
    assert_close(in_backward, {n: whole_of(g) for n, g in gradients(by_call).items()})
    backward_of_rows(in_backward, rank)
    before = gradients(in_backward)
    with pytest.warns(UserWarning, match="the backward pass has averaged the gradients"):
        fxskip.average_gradients(in_backward)
    assert all(torch.equal(own(g), own(before[n])) for n, g in gradients(in_backward).items())


def whole_of(gradient: Any) -> Tensor:
    return gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient  # type: ignore[no-any-return]


def as_one_process(rank: int, folder: Path) -> None:
    """In float64 to rounding, and the norm of the whole gradient."""
    original = model("mixtral", layers=LAYERS, double=True)
    alone, student = (
        fxskip.transform(original, "farskip"),
        spread(original, schedule={"gradients": "in_backward"}),
    )
    backward(student, rank)
    assert_close(student, gradients_of_the_mean(alone, 2))
    want = torch.nn.utils.clip_grad_norm_(alone.parameters(), 0.01)
    got = fxskip.clip_grad_norm_(student.parameters(), 0.01)
    assert abs(got - want) < 1e-12 * want and want > 0.01
    assert_close(student, {n: p.grad for n, p in alone.named_parameters() if p.grad is not None})


def only_no_sync_and_a_call(rank: int, folder: Path) -> None:
    """What no backward pass has averaged, a call does, once."""
    by_call, in_backward = copies()
    backward(by_call, rank)
    fxskip.average_gradients(by_call)
    with fxskip.no_sync(in_backward):
        backward(in_backward, rank)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fxskip.average_gradients(in_backward)
    assert_same_gradients(in_backward, by_call)


# --- parameters without a gradient, of other types --------------------------------------------------


def missing_gradients(rank: int, folder: Path) -> None:
    """On one rank only: zeros from the other; on none: none. Of another dtype: a bucket of its own."""
    student = copies()[1]
    one, none = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    wide = nn.Parameter(torch.ones(3, dtype=torch.float64))
    for name, parameter in (("on_one_rank", one), ("on_none", none), ("wide", wide)):
        student.register_parameter(name, parameter)
    loss = backward_of_rows(student, rank) + (1.0 + rank) * wide.sum().float()
    left_out = "on_none" if rank == 0 else "on_none, on_one_rank"
    said = f"gave no gradient to {left_out}; [0-9] of [0-9] buckets waited for its end"
    with pytest.warns(UserWarning, match=said):
        (loss + (4.0 * one.sum() if rank == 0 else 0.0)).backward()
    assert one.grad is not None and torch.equal(one.grad, torch.full_like(one, 2.0))
    assert none.grad is None
    assert wide.grad is not None and torch.equal(wide.grad, torch.full_like(wide, 1.5))
    of = {name: bucket for bucket in buckets(student) for name in bucket.names}
    assert of["wide"] is not of["on_one_rank"] and of["on_none"] is of["on_one_rank"]


def missing_in_front(rank: int, folder: Path) -> None:
    """Parameters of the head and of a layer that one rank uses alone: its buckets leave earlier than the other's, in
    all modes and with hardly anything in flight at a time, and nobody waits for ever."""
    for mode, cap in (("scheduled", 1 << 30), ("scheduled", 1), ("eager_wait", 1 << 30), ("reference", 1)):
        found = []
        for student in copies(mode):
            extra = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2))]
            student.lm_head.extra = extra[0]  # type: ignore[union-attr]
            regions(student)[1].extra = extra[1]  # type: ignore[assignment]
            loss = backward_of_rows(student, rank)
            if rank == 0:
                loss = loss + sum(p.sum() for p in extra)
            limit = patch.object(GradientsInBackward, "_cap", property(lambda self, cap=cap: cap))
            with limit, warnings.catch_warnings():
                warnings.simplefilter("ignore")
                loss.backward()
                fxskip.average_gradients(student)
            found.append(gradients(student))
        by_call, in_backward = found
        assert [n for n, g in by_call.items() if not torch.equal(own(g), own(in_backward[n]))] == []
        assert torch.equal(in_backward["lm_head.extra"], torch.full((3,), 0.5))


def a_copy_is_evaluated(rank: int, folder: Path) -> None:
    """Before it has had a forward pass that records gradients."""
    student = copies()[1]
    want = student.eval()(**own_batch(rank)).logits
    with torch.no_grad():
        assert torch.equal(copy.deepcopy(student)(**own_batch(rank)).logits, want)


def sizes(rank: int, folder: Path) -> None:
    """No bucket is larger than bucket_mib but for one parameter, and no more than max_in_flight_mib are in flight."""
    original = model("qwen2_moe", layers=LAYERS, vocab_size=8192)
    options = {"gradients": "in_backward", "bucket_mib": 1, "max_in_flight_mib": 3}
    student, by_call = spread(original, schedule=options), spread(original)
    found = {bucket.role: bucket.bytes for bucket in buckets(student)}
    table = 8192 * 64 * 4
    assert found["head_gradients"] == table and found["head_gradients.2"] == 64 * 4
    flying: list[int] = []
    started: dict[Bucket, Any] = {}
    original_start = Bucket.start

    def noting(bucket: Bucket) -> Any:
        before = sum(
            b.bytes for b, landing in started.items() if landing is not None and landing.is_under_way
        )
        flying.append(before + bucket.bytes)
        started[bucket] = original_start(bucket)
        return started[bucket]

    with patch.object(Bucket, "start", noting):
        backward(student, rank)
    assert len(flying) == len(buckets(student))
    assert (
        table < max(flying) <= 3 << 20 < 2 * table
    )  # head and embedding, 2 MiB each, were never there together
    backward(by_call, rank)
    fxskip.average_gradients(by_call)
    assert_same_gradients(student, by_call)


# --- refusals and errors -------------------------------------------------------------------------


def refused(rank: int, folder: Path) -> None:
    by_call, student = copies()
    with pytest.raises(fxskip.PassError, match=r"in_backward: the model is inside DistributedDataParallel"):
        backward(DistributedDataParallel(student), rank)
    by_itself = pytest.raises(fxskip.PassError, match="no backward pass of .* averages gradients")
    with by_itself, fxskip.no_sync(by_call):
        pass
    sharded = copies()[1]
    for layer in regions(sharded):
        fully_shard(layer, ignored_params={p for p in layer.parameters() if hasattr(p, "to_local")})
    with pytest.raises(fxskip.PassError, match=r"in_backward: the model is sharded by fully_shard"):
        backward(sharded, rank)
    table = by_call.lm_head.weight  # type: ignore[union-attr]
    table.grad = torch.zeros_like(table).to_sparse()  # type: ignore[arg-type,operator,union-attr]
    with pytest.raises(
        fxskip.PassError, match="the gradient of lm_head.weight is float32 sparse_coo, the parameter"
    ):
        fxskip.average_gradients(by_call)
    with pytest.raises(fxskip.PassError, match="all processes have the same tokens"):
        spread(
            model("mixtral", layers=LAYERS),
            parallel={"tensor": {"size": 2}},
            schedule={"gradients": "in_backward"},
        )


def other_parameters_train(rank: int) -> None:
    """Said in the forward pass, before rows are sent."""
    student = on_a_group_of_its_own(in_mode(pair()[1], "scheduled"))
    if rank == 1:
        student.lm_head.requires_grad_(False)  # type: ignore[union-attr,operator]
    with pytest.raises(fxskip.CollectiveError, match=r"rank 0: .* averages gradients of set [0-9a-f]{4}"):
        backward(student, rank)


def others_would_be_averaged(rank: int, folder: Path) -> None:
    """By call: what differs is named, with the ranks that have it, and what is in another order."""
    by_call = copies()[0]
    with pytest.raises(fxskip.PassError, match="parallelize: the model is spread already"):
        fxskip.parallelize(by_call)
    by_call.lm_head.requires_grad_(rank == 0)  # type: ignore[union-attr,operator]
    with pytest.raises(
        fxskip.CollectiveError, match="average_gradients: the processes train different"
    ) as caught:
        fxskip.average_gradients(by_call)
    assert "rank 0: lm_head.weight float32[" in str(caught.value)
    assert "rank 1: none of these" in str(caught.value)
    by_call.requires_grad_(False)
    for name in ("one", "other") if rank == 0 else ("other", "one"):
        by_call.register_parameter(name, nn.Parameter(torch.ones(2)))
    with pytest.raises(fxskip.CollectiveError, match="rank 1: number 0 is one ") as caught:
        fxskip.average_gradients(by_call)
    assert "rank 0: number 0 is other float32[2]" in str(caught.value)  # the last one registered comes first


def all_fail_in_backward(rank: int) -> None:
    """While a bucket is in flight; all go on together."""
    by_call, student = copies()
    backward(by_call, rank)
    fxskip.average_gradients(by_call)
    loss = backward_of(student, rank)
    said = "error ended a backward pass, with .*head_gradients .data. of decoder layer 1.* in flight"
    with pytest.warns(UserWarning, match=said), pytest.raises(Mishap), FailAt(f"{ATTENTION}_backward", 1):
        loss.backward()
    assert under_way() == []
    student.zero_grad()
    backward(student, rank)
    assert_same_gradients(student, by_call)


def one_fails_in_backward(rank: int) -> None:
    """In the first layer, behind its last exchange: the other is at the end of the pass."""
    student = on_a_group_of_its_own(in_mode(pair()[1], "scheduled"))
    embedding = student.model.embed_tokens.weight  # type: ignore[union-attr]
    loss = backward_of(student, rank)
    if rank == 1:
        hook = embedding.register_hook(_go_wrong)  # type: ignore[operator,union-attr]
        with pytest.warns(UserWarning, match="in flight"), pytest.raises(Mishap):
            loss.backward()
        hook.remove()
        return
    said = r"embedding_gradients \(data\) of decoder layer 0: waited for in vain: rank 1 had an error"
    with pytest.raises(fxskip.CollectiveError, match=said):
        loss.backward()


def _go_wrong(gradient: Tensor) -> Tensor:
    raise Mishap("the embedding went wrong")


def other_uses_of_gradients(rank: int, folder: Path) -> None:
    """Neither reading gradients by autograd.grad nor replacing `.grad` changes what is accumulated."""
    student = copies()[1]
    backward(student, rank)
    backward(student, rank)
    want = gradients(student)
    student.zero_grad()
    backward(student, rank)
    torch.autograd.grad(backward_of_rows(student, rank), list(student.parameters()), allow_unused=True)
    for parameter in student.parameters():
        parameter.grad = None if parameter.grad is None else parameter.grad.clone()
    backward(student, rank)
    assert [n for n, g in gradients(student).items() if not torch.equal(own(g), own(want[n]))] == []


class Around(nn.Module):
    """A module with a parameter of its own around a student."""

    def __init__(self, student: nn.Module) -> None:
        super().__init__()
        self.student, self.scale = student, nn.Parameter(torch.ones(()))

    def forward(self, **inputs: Any) -> Tensor:
        loss: Tensor = self.student(**inputs).loss * self.scale
        return loss


def a_module_around_the_student(rank: int, folder: Path) -> None:
    """`average_gradients` averages its parameters, too: all that is left where the backward pass has the others."""
    means = []
    for student in copies():
        module = Around(student)
        module(**own_batch(rank), use_cache=False).backward()
        assert module.scale.grad is not None
        each = [torch.empty(()) for _ in range(2)]
        torch.distributed.all_gather(each, module.scale.grad)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            fxskip.average_gradients(module)
        assert torch.equal(module.scale.grad, (each[0] / 2 + each[1] / 2))
        means.append(gradients(student))
    assert [n for n, g in means[0].items() if not torch.equal(own(g), own(means[1][n]))] == []


def one_is_in_no_sync(rank: int) -> None:
    student = on_a_group_of_its_own(in_mode(pair()[1], "scheduled"))
    backward(student, rank)
    with pytest.raises(fxskip.CollectiveError, match="averages"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if rank == 1:
            with fxskip.no_sync(student):
                backward(student, rank)
        else:
            backward(student, rank)


def four_processes(rank: int) -> None:
    """Two sets of experts: their gradients are averaged between copies, beside those of everything else."""
    torch.set_num_threads(1)
    assert_as_by_call(accumulation, rank)
    lanes = {bucket.lane.name: bucket.lane.ranks for bucket in buckets(pair()[1])}
    assert lanes == {"data": 4, "expert_data": 2}
    original = model("mixtral", layers=LAYERS, double=True)
    alone, student = (
        fxskip.transform(original, "farskip"),
        spread(original, schedule={"gradients": "in_backward"}),
    )
    backward(student, rank)
    assert_close(student, gradients_of_the_mean(alone, 4))
    backward(student, rank)
    twice = {name: 2 * gradient for name, gradient in gradients_of_the_mean(alone, 4).items()}
    assert_close(student, twice)


def one_group_for_both_lanes(rank: int) -> None:
    """With exchange: all_reduce the experts' copies are those of everything else: one group, one order."""
    torch.set_num_threads(1)
    original = model("qwen2_moe", layers=LAYERS)
    parallel = {"expert": {"size": 2, "exchange": "all_reduce"}}
    found = []
    for how in ({}, {"gradients": "in_backward"}):
        student = fxskip.transform(
            original, {"fxskip": 1, "preset": "farskip", "parallel": parallel, "schedule": how}
        )
        extra = nn.Parameter(torch.ones(3))
        student.lm_head.extra = extra  # type: ignore[union-attr]
        loss = backward_of_rows(student, rank // 2)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            (loss + extra.sum() if rank < 2 else loss).backward()
            fxskip.average_gradients(student)
        found.append(gradients(student))
    assert [n for n, g in found[0].items() if not torch.equal(own(g), own(found[1][n]))] == []


DATA_AXES = {
    "all_reduce": {"expert": {"size": 2, "exchange": "all_reduce"}},
    "tensor": {"tensor": {"size": 2}},
    "all_to_all": {"expert": {"size": 2}},
}


def ranks_that_train_other_parameters(rank: int, kinds: tuple[str, ...]) -> None:
    """On the axis data, and on that of ranks with the same tokens: all four say who, before a gradient is sent, and
    train on when they agree."""
    torch.set_num_threads(1)
    for kind in kinds:
        student = fxskip.transform(
            model("qwen2_moe", layers=LAYERS),
            {
                "fxskip": 1,
                "preset": "farskip",
                "parallel": DATA_AXES[kind],
                "schedule": {"gradients": "in_backward"},
            },
        )
        batch_of = rank if kind == "all_to_all" else rank // 2
        embedding = student.model.embed_tokens.weight
        head = student.lm_head.weight
        for odd, frozen_there in (((2, 3), head), ((1, 3), embedding)):
            frozen_there.requires_grad_(rank not in odd)
            if kind == "all_to_all" and odd == (1, 3):  # these exchange counts, which say it first
                said = [f"rank {rank // 2 * 2}: decoder layer 0"]
            else:
                name = "lm_head.weight" if odd == (2, 3) else "model.embed_tokens.weight"
                line = f"{name} float32{list(frozen_there.shape)}"
                said = [f"rank {r}: {'none of these' if r in odd else line}" for r in range(4)]
            with pytest.raises(fxskip.CollectiveError) as caught:
                backward(student, batch_of)
            assert [line for line in said if line not in str(caught.value)] == [], str(caught.value)
            frozen_there.requires_grad_(True)
        with pytest.raises(fxskip.CollectiveError, match="rank 2: nothing is averaged, inside of no_sync"):
            if rank >= 2:
                with fxskip.no_sync(student):
                    backward(student, batch_of)
            else:
                backward(student, batch_of)
        backward(student, batch_of)
        mine = embedding.grad.clone()
        torch.distributed.broadcast(mine, 0)
        assert torch.equal(mine, embedding.grad) and mine.any()


@pytest.mark.distributed
@pytest.mark.slow
def test_ranks_that_train_other_parameters(tmp_path: Path) -> None:
    body = partial(ranks_that_train_other_parameters, kinds=tuple(DATA_AXES))
    run_ranks(body, 4, tmp_path / "store", limit_s=400)


@pytest.mark.distributed
@pytest.mark.slow
def test_one_group_for_both_lanes(tmp_path: Path) -> None:
    run_ranks(one_group_for_both_lanes, 4, tmp_path / "store", limit_s=300)


@pytest.mark.distributed
@pytest.mark.slow
def test_four_processes(tmp_path: Path) -> None:
    run_ranks(four_processes, 4, tmp_path / "store", limit_s=400)


@pytest.mark.distributed
def test_two_processes(tmp_path: Path) -> None:
    run_on_ranks((one_backward_pass, others_would_be_averaged), tmp_path, limit_s=240)


@pytest.mark.distributed
@pytest.mark.slow
def test_training_loops(tmp_path: Path) -> None:
    checks = (
        buckets_leave_under_the_backward_pass,
        accumulates,
        without_no_sync,
        as_one_process,
        only_no_sync_and_a_call,
        missing_gradients,
        sizes,
        refused,
        other_uses_of_gradients,
        a_module_around_the_student,
        missing_in_front,
        a_copy_is_evaluated,
    )
    run_on_ranks(checks, tmp_path, limit_s=560)


@pytest.mark.distributed
@pytest.mark.slow
def test_errors(tmp_path: Path) -> None:
    checks = (all_fail_in_backward, one_fails_in_backward, other_parameters_train, one_is_in_no_sync)
    ends, last = run(checks, tmp_path)
    assert (ends, last) == ({0: 0, 1: 0}, ["done", "done"])
