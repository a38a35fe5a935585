"""schedule.gradients: in_backward leaves the bits of average_gradients, and sends while the backward pass runs."""

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxskip
from tests.collectives.averages import (
    LAYERS,
    accumulation,
    assert_as_by_call,
    assert_same_gradients,
    backward,
    buckets,
    copies,
    loss_of,
    pair,
)
from tests.collectives.spreads import (
    MODES,
    gradients,
    model,
    own_batch,
    regions,
    spread,
    unequal,
)
from tests.collectives.test_gradients import assert_close, gradients_of_the_mean
from tests.ranks import run_ranks
from tests.training_loop.ranks import run_on_ranks


def one_backward_pass(rank: int, folder: Path) -> None:
    assert_as_by_call(backward, rank, MODES)


def two_live_forwards(module: nn.Module, rank: int) -> None:
    (loss_of(module, rank, 1) + loss_of(module, rank, 2)).backward()


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
    loss_of(in_backward, rank)
    before = gradients(in_backward)
    with pytest.warns(UserWarning, match="the backward pass has averaged the gradients"):
        fxskip.average_gradients(in_backward)
    assert unequal(gradients(in_backward), before) == []


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


def a_copy_is_evaluated(rank: int, folder: Path) -> None:
    """Before it has had a forward pass that records gradients."""
    student = copies()[1]
    want = student.eval()(**own_batch(rank)).logits
    with torch.no_grad():
        assert torch.equal(copy.deepcopy(student)(**own_batch(rank)).logits, want)


def other_uses_of_gradients(rank: int, folder: Path) -> None:
    """Neither reading gradients by autograd.grad nor replacing `.grad` changes what is accumulated."""
    student = copies()[1]
    backward(student, rank)
    backward(student, rank)
    want = gradients(student)
    student.zero_grad()
    backward(student, rank)
    torch.autograd.grad(loss_of(student, rank), list(student.parameters()), allow_unused=True)
    for parameter in student.parameters():
        parameter.grad = None if parameter.grad is None else parameter.grad.clone()
    backward(student, rank)
    assert unequal(gradients(student), want) == []


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
    assert unequal(*means) == []


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
        loss = loss_of(student, rank // 2)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            (loss + extra.sum() if rank < 2 else loss).backward()
            fxskip.average_gradients(student)
        found.append(gradients(student))
    assert unequal(*found) == []


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
    run_on_ranks((one_backward_pass,), tmp_path, limit_s=240)


@pytest.mark.distributed
@pytest.mark.slow
def test_training_loops(tmp_path: Path) -> None:
    checks = (
        accumulates,
        without_no_sync,
        as_one_process,
        only_no_sync_and_a_call,
        other_uses_of_gradients,
        a_module_around_the_student,
        a_copy_is_evaluated,
    )
    run_on_ranks(checks, tmp_path, limit_s=560)
