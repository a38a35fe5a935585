"""`fxskip.tune`: several orders in turn, and the fastest stays."""

import json
from collections import Counter
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

import fxskip
from fxskip.collectives.landing import under_way
from fxskip.errors import ScheduleError
from fxskip.parallel import RegionParallel
from fxskip.schedule.cost_table import CostKey, CostTable, load_costs
from fxskip.tracing.runs import Stepper, Times
from fxskip.tracing.tune import Order, Timed, Tuning
from tests.collectives.spreads import assert_same_bits, difference, model, own_batch, regions, spread, step
from tests.training_loop.ranks import run_on_ranks

ROOFLINE = [Order("roofline", "mirrored"), Order("roofline", "explicit")]
ORDERS = [(is_measured, backward) for is_measured in (False, True) for backward in ("mirrored", "explicit")]
"""Whether costs are measured, and the backward."""
TABLE = CostTable(
    key=CostKey(
        model="M", shapes={}, parallel={}, dtype="bfloat16", device="cpu", transport="gloo", versions={}
    ),
    tokens=8,
    costs_us={"experts": 5.0},
)


def of_first_layer(student: Any) -> RegionParallel:
    parallel = regions(student)[0].fxskip_parallel
    assert parallel is not None
    return parallel


class Clock:
    """In the place of `Stepper.timed`: the step is run, and takes what the test says of its order."""

    def __init__(self, step_ms: dict[tuple[bool, str], float]) -> None:
        self.step_ms = step_ms
        self.seen: list[tuple[bool, str]] = []

    def __call__(self, stepper: Stepper, **_: bool) -> Times:
        stepper.run()
        parallel = of_first_layer(stepper.model)
        self.seen.append((parallel.measured is not None, parallel.schedule.backward))
        return Times(1.0, 1e3 * self.step_ms[self.seen[-1]])

    def __get__(self, stepper: Stepper, _: Any) -> Any:
        return lambda **given: self(stepper, **given)


def tuned(student: Any, rank: int, out: Path, clock: Clock | None = None, **options: Any) -> Tuning:
    if clock is None:
        return fxskip.tune(student, own_batch(rank), out, **options)
    with patch.object(Stepper, "timed", clock):
        return fxskip.tune(student, own_batch(rank), out, **options)


def the_fastest_stays(rank: int, folder: Path) -> None:
    """By a backward of its own and measured costs. Bits, and gradients that were there, are as before; the spec names
    the table, by which the saved student is spread again."""
    student, out = spread(model("qwen2_moe", layers=2)), folder / "costs.json"
    inputs = own_batch(rank)
    before = step(student, inputs)
    held = {p: torch.full_like(p, 3.0) for p in student.parameters()}
    for parameter, gradient in held.items():
        parameter.grad = gradient
    # On rank 0 another order is faster; the slowest rank counts.
    times = {(False, "mirrored"): 5.0, (False, "explicit"): 1.0 + 8 * rank, (True, "mirrored"): 4.0}
    clock = Clock(times | {(True, "explicit"): 3.0})
    found = tuned(student, rank, out, clock, steps=2)
    assert all(p.grad is gradient and bool((gradient == 3).all()) for p, gradient in held.items())
    assert [one.order for one in found.timed][:2] == ROOFLINE
    assert [one.ms for one in found.timed] == pytest.approx([5, 9, 4, 3])
    assert found.chosen == Order(str(out), "explicit", is_new=True)
    assert Counter(clock.seen[-12:]) == dict.fromkeys(ORDERS, 3)  # a round for captures, two that count
    assert_same_bits(before, step(student, inputs))
    spec = fxskip.spec_of(student)
    assert spec.schedule is not None and (spec.schedule.costs, spec.schedule.backward) == (
        str(out),
        "explicit",
    )
    assert load_costs(out) == found.costs
    everyone: list[Any] = [None, None]
    dist.all_gather_object(everyone, json.dumps(found.as_data()))
    assert everyone[0] == everyone[1]
    student.save_pretrained(folder / "saved")
    again = fxskip.parallelize(AutoModelForCausalLM.from_pretrained(folder / "saved").train())
    assert of_first_layer(again) == of_first_layer(student)
    assert (
        difference(step(again, inputs).logits, before.logits) < 1e-5
    )  # loaded experts lie otherwise in memory


def what_it_has_may_stay(rank: int, folder: Path) -> None:
    """Of equal times, that; then nothing is written. A table that the student has is tried beside the new one."""
    out = folder / "costs.json"
    student = spread(model("qwen2_moe", layers=2), schedule={"costs": str(out)})
    was, spec, text = of_first_layer(student), fxskip.spec_of(student), out.read_text()
    found = tuned(student, rank, out, Clock(dict.fromkeys(ORDERS, 2.0)), steps=1)
    old, new = Order(str(out), "mirrored"), Order(str(out), "mirrored", is_new=True)
    orders = [one.order for one in found.timed]
    assert orders[0] == found.chosen == old and new in orders and len(orders) == 5
    assert "as it was, chosen" in str(found)
    assert of_first_layer(student) == was and fxskip.spec_of(student) == spec and out.read_text() == text


def orders_that_cannot_be(rank: int, folder: Path) -> None:
    """Are listed with the reason. Any other error leaves the student as it was."""
    student, inputs, out = spread(model("qwen2_moe", layers=2)), own_batch(rank), folder / "none.json"
    before, was = step(student, inputs), of_first_layer(student)
    full = ScheduleError("solve", "no order keeps to 1 MiB", hint="allow more")
    with patch("fxskip.backward.explicit_region.order_backward", side_effect=full):
        found = tuned(student, rank, out, steps=1)
    assert [bool(one.why_not) for one in found.timed] == [False, True, False, True]
    assert found.chosen == min(found.timed, key=lambda one: one.ms).order
    assert found.chosen.backward == "mirrored" and "no order keeps to 1 MiB" in str(found)
    assert under_way() == []
    assert_same_bits(before, step(student, inputs))
    student = spread(model("qwen2_moe", layers=2))
    with (
        patch.object(Stepper, "timed", side_effect=[Times(1, 1)] * 9 + [KeyboardInterrupt]),
        pytest.raises(KeyboardInterrupt),
    ):
        fxskip.tune(student, inputs, folder / "interrupted.json")
    assert of_first_layer(student) == was and not (folder / "interrupted.json").exists()
    assert_same_bits(before, step(student, inputs))


def without_a_backward(rank: int, folder: Path) -> None:
    student = spread(model("qwen2_moe", layers=2))
    forward = tuned(student.eval(), rank, folder / "eval.json", steps=1)
    assert {one.order.backward for one in forward.timed} == {"mirrored"}
    assert "forward alone (the model is in eval mode)" in str(forward)


def refusals(rank: int, folder: Path) -> None:
    student, inputs = spread(model("qwen2_moe", layers=2)), own_batch(rank)
    (folder / "a_file").touch()
    for writing in (fxskip.tune, fxskip.trace):
        with pytest.raises(fxskip.PassError, match="a_file.*: (File exists|Not a directory)"):
            writing(student, inputs, folder / "a_file" / "costs.json")
    with pytest.raises(fxskip.SpecError, match="neither a path nor a word"):
        fxskip.tune(student, inputs, "costs")
    with (
        patch("torch.distributed.get_world_size", return_value=4),
        pytest.raises(fxskip.PassError, match="spread over 2 of 4 processes"),
    ):
        fxskip.tune(student, inputs)
    blocking = spread(model("qwen2_moe", layers=2), mode="reference")
    with pytest.raises(fxskip.PassError, match="nothing is scheduled"):
        fxskip.tune(blocking, inputs)


@pytest.mark.distributed
def test_two_processes(tmp_path: Path) -> None:
    run_on_ranks((the_fastest_stays, refusals), tmp_path, limit_s=240)


@pytest.mark.distributed
@pytest.mark.slow
def test_two_processes_whole(tmp_path: Path) -> None:
    checks = (the_fastest_stays, what_it_has_may_stay, orders_that_cannot_be, without_a_backward)
    run_on_ranks(checks, tmp_path, limit_s=300)


def test_in_one_process() -> None:
    original = model("qwen2_moe", layers=2)
    with pytest.raises(fxskip.PassError, match="was not rewired by fxskip"):
        fxskip.tune(original, own_batch(0))
    with pytest.raises(fxskip.PassError, match="one process, where nothing is in flight"):
        fxskip.tune(fxskip.transform(original, "farskip"), own_batch(0))


def test_the_text() -> None:
    timed = (
        Timed(ROOFLINE[0], ((5.0, 7.0, 6.0), (4.0, 8.0, 5.0))),
        Timed(ROOFLINE[1], why_not="no order keeps to 1 MiB"),
        Timed(Order("costs.json", "mirrored", is_new=True), ((5.0, 5.0, 5.0), (5.5, 5.0, 5.0))),
    )
    found = Tuning(timed, timed[2].order, TABLE, "forward and backward")
    assert str(found) == (
        "a step, forward and backward: median of 3 rounds on the slowest rank\n"
        "  costs       backward          ms\n"
        "  roofline    mirrored        6.00  as it was\n"
        "  roofline    explicit        none  no order keeps to 1 MiB\n"
        "  costs.json  mirrored        5.00  measured now, chosen\n"
        "schedule: {costs: costs.json, backward: mirrored}"
    )
    assert [one["ms"] for one in found.as_data()["timed"]] == [6.0, None, 5.0]
    json.dumps(found.as_data())
