"""What the buckets of gradients hold, and when they leave in the backward pass."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

import fxskip
from fxskip.collectives.landing import Landing
from fxskip.runtime.gradient_buckets import Bucket
from fxskip.runtime.gradients_in_backward import GradientsInBackward
from tests.collectives.averages import (
    LAYERS,
    assert_same_gradients,
    backward,
    buckets,
    copies,
    loss_of,
)
from tests.collectives.spreads import gradients, model, regions, spread, unequal
from tests.training_loop.ranks import run_on_ranks


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


def missing_gradients(rank: int, folder: Path) -> None:
    """On one rank only: zeros from the other; on none: none. Of another dtype: a bucket of its own."""
    student = copies()[1]
    one, none = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    wide = nn.Parameter(torch.ones(3, dtype=torch.float64))
    for name, parameter in (("on_one_rank", one), ("on_none", none), ("wide", wide)):
        student.register_parameter(name, parameter)
    loss = loss_of(student, rank) + (1.0 + rank) * wide.sum().float()
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
            loss = loss_of(student, rank)
            if rank == 0:
                loss = loss + sum(p.sum() for p in extra)
            limit = patch.object(GradientsInBackward, "_cap", property(lambda self, cap=cap: cap))
            with limit, warnings.catch_warnings():
                warnings.simplefilter("ignore")
                loss.backward()
                fxskip.average_gradients(student)
            found.append(gradients(student))
        by_call, in_backward = found
        assert unequal(by_call, in_backward) == []
        assert torch.equal(in_backward["lm_head.extra"], torch.full((3,), 0.5))


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

    # However fast the transport is: in flight until somebody waits.
    slow = patch.object(Landing, "is_under_way", property(lambda self: self._issued is not None))
    with slow, patch.object(Bucket, "start", noting):
        backward(student, rank)
    assert len(flying) == len(buckets(student))
    # Head and embedding, 2 MiB each, were never there together.
    assert table < max(flying) <= 3 << 20 < 2 * table
    backward(by_call, rank)
    fxskip.average_gradients(by_call)
    assert_same_gradients(student, by_call)


@pytest.mark.distributed
@pytest.mark.slow
def test_two_processes(tmp_path: Path) -> None:
    checks = (buckets_leave_under_the_backward_pass, missing_gradients, missing_in_front, sizes)
    run_on_ranks(checks, tmp_path, limit_s=400)
