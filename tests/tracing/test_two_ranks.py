"""A trace of a student that is spread over two processes."""

import json
import os
import warnings
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

import fxskip
from fxskip.bench.overlap_model import WIRINGS, Setting
from fxskip.bench.overlap_ranks import MOVED_BY, measure_pair
from fxskip.collectives.landing import under_way
from fxskip.collectives.measuring import routing_in_turn, sending_nothing, waiting_at_once
from fxskip.schedule.cost_table import load_costs, save_costs
from fxskip.schedule.order_region import schedules_of
from fxskip.tracing.records import StepRecord
from fxskip.tracing.runs import ModeRuns
from tests.collectives.spreads import assert_same_bits, deferring, model, own_batch, spread, step
from tests.strict_html import StrictHtml
from tests.tracing.perfetto_format import assert_valid
from tests.training_loop.ranks import run_on_ranks
from tests.zoo import VOCAB

LAYERS = 3


def original() -> Any:
    return model("deepseek_v2", layers=LAYERS)


def everything_about_a_trace(rank: int, folder: Path) -> None:
    student = spread(original())
    inputs = own_batch(rank)
    before = step(student, inputs)
    timeline = fxskip.trace(student, inputs, folder / "trace", steps=2)
    assert under_way() == [] and all(p.grad is None for p in student.parameters())
    assert_same_bits(before, step(student, inputs))
    texts: list[Any] = [None, None]
    dist.all_gather_object(texts, timeline.to_json())
    assert texts[0] == texts[1]
    for runs in timeline.ranks:
        assert_as_it_is(runs["as it is"], set(deferring(student)))
        assert_blocking(runs["blocking"])
        assert all(record.flights == () for record in runs["nothing sent"].records)
    assert_figures(timeline)
    if rank == 0:
        assert_files(folder / "trace", timeline)
    dist.barrier()
    assert_costs_can_be_used(folder / "trace" / "costs.json", timeline, inputs)


def assert_as_it_is(runs: ModeRuns, deferred: set[int]) -> None:
    assert len(runs.times) == len(runs.records) == 2
    for record in runs.records:
        assert_flights(record, deferred)
    assert deferred == {1}


def assert_flights(record: StepRecord, deferred: set[int]) -> None:
    sent = {(f.layer, f.role, f.phase) for f in record.flights}
    assert sent == {
        (number, role, phase)
        for number in range(1, LAYERS)  # layer 0 is dense
        for role, phase in (
            ("counts", "forward"), ("dispatch", "forward"), ("combine", "forward"),
            ("combine.bwd", "backward"), ("dispatch.bwd", "backward"),
        )
    }  # fmt: skip
    assert len(sent) == len(record.flights)
    for flight in record.flights:
        assert flight.wait_us is not None and flight.landed_us is not None
        assert 0 <= flight.called_us <= flight.issued_us <= flight.done_us
        assert flight.issued_us <= flight.wait_us <= flight.landed_us
        assert flight.done_us <= flight.landed_us
        if flight.role == "combine" and flight.layer in deferred:
            later = [t.start_us for t in record.tasks if t.layer == flight.layer + 1]
            own = [t.end_us for t in record.tasks if t.layer == flight.layer and t.phase == "forward"]
            assert flight.landed_us > max(own) and later


def assert_blocking(runs: ModeRuns) -> None:
    """No task begins between the issue of a collective and the end of its wait."""
    for record in runs.records:
        for flight in record.flights:
            assert flight.landed_us is not None
            begun = [t for t in record.tasks if flight.called_us < t.start_us < flight.landed_us]
            assert begun == []


def assert_figures(timeline: fxskip.Timeline) -> None:
    assert [one.part for one in timeline.figures] == ["forward", "backward", "step"]
    for one in timeline.figures:
        assert one.source == "host"
        assert 0 <= one.coincidence <= 1
        assert one.blocking_us and one.none_us
        assert one.min_collective_us is not None and one.min_collective_us <= one.collective_us
    assert set(timeline.estimated) == {"forward", "backward"}
    for phase, estimate in timeline.estimated.items():
        names = {placed.name for placed in estimate.schedule.placed}
        ending = ".bwd" if phase == "backward" else ""
        assert {f"{number}.dispatch{ending}" for number in range(1, LAYERS)} <= names
        ran = {task.name for task in timeline.ranks[0]["as it is"].records[0].tasks if task.phase == phase}
        compute = {p.name for p in estimate.schedule.placed if p.lane == "compute"}
        assert ran - {f"{n}.routing" for n in range(LAYERS)} <= compute
        assert len(ran) > 0.6 * len(compute)


def assert_files(folder: Path, timeline: fxskip.Timeline) -> None:
    text = (folder / "timeline.txt").read_text()
    assert "estimated" in text and "measured" in text and "2 processes on cpu" in text
    for line in text.splitlines():
        assert not ("estimated" in line and "measured" in line)
    assert "runtime mode scheduled, all_to_all by gloo" in text
    file = json.loads((folder / "perfetto.json").read_text())
    assert_valid(file)
    processes = [e["args"]["name"] for e in file["traceEvents"] if e["name"] == "process_name"]
    assert processes == ["rank 0, measured", "rank 1, measured", "estimated"]
    arrows = [e for e in file["traceEvents"] if e["ph"] == "s" and e["pid"] == 0]
    assert len(arrows) == 5 * (LAYERS - 1)
    page = StrictHtml((folder / "timeline.html").read_text())
    captions = [words for tag, words in page.texts if tag == "figcaption"]
    assert all(words.startswith(("Estimated: ", "Measured, rank ")) for words in captions)
    assert len(captions) == 2 * 2 * 3  # layer and whole, forward and backward, estimate and two ranks
    data = json.loads((folder / "timeline.json").read_text())
    assert len(data["measured"]["ranks"]) == 2 and data["about"]["processes"] == 2


def assert_costs_can_be_used(path: Path, timeline: fxskip.Timeline, inputs: dict[str, Any]) -> None:
    """What was written is what a spec reads, and what a schedule is then made by."""
    table = load_costs(path)
    assert table == timeline.costs()
    assert table.tokens == inputs["input_ids"].numel()
    student = spread(original(), schedule={"costs": str(path)})
    assert torch.isfinite(student(**inputs).loss)
    again = fxskip.trace(student, inputs, steps=1)
    graphs = again.estimated["forward"].schedule
    roles = {one.name: one.name.partition(".")[2] for one in graphs.placed}
    for one in graphs.placed:
        assert one.end_us - one.start_us == pytest.approx(table.costs_us[roles[one.name]])
    known = {task.role for name in _regions() for found in schedules_of(name) for task in found.graph}
    assert known <= set(table.costs_us)


def explicit_backward(rank: int, folder: Path) -> None:
    """Its tasks are those of the layers' own schedules, estimated and measured alike, in one order."""
    student, inputs = spread(original(), schedule={"backward": "explicit"}), own_batch(rank)
    timeline = fxskip.trace(student, inputs, steps=1)
    assert under_way() == []
    estimate = timeline.estimated["backward"].schedule
    for runs in timeline.ranks:
        (record,) = runs["as it is"].records
        assert_flights(record, set(deferring(student)))
        computed = [t for t in record.tasks if t.phase == "backward"]
        ran = list(dict.fromkeys(task.name for task in computed))
        assert len(ran) == len(computed)  # none in two pieces
        known = {name: at for at, name in enumerate(n for n in estimate.order if n.endswith("grad"))}
        order = [known[name] for name in ran if name.endswith("grad")]
        assert order == sorted(known.values()) and len(order) > 8 * (LAYERS - 1)
        flight = next(f for f in record.flights if f.name == "1.combine.bwd")
        assert flight.landed_us is not None
        beside = [t for t in computed if flight.issued_us <= t.start_us and t.end_us <= flight.landed_us]
        assert any(task.name.startswith("2.") and task.name.endswith(".wgrad") for task in beside)
        assert_blocking(runs["blocking"])
    assert "schedule.backward: explicit" in str(timeline)


def explicit_sums(rank: int, folder: Path) -> None:
    """Sums of gradients are estimated and measured under one name, and their cost is used again."""
    sums = {"parallel": {"expert": {"size": 2, "exchange": "all_reduce"}}}
    sums["schedule"] = {"backward": "explicit"}
    inputs = own_batch(0)
    timeline = fxskip.trace(spread(original(), **sums), inputs, folder / "with_sums", steps=1)
    assert "all_reduce by gloo" in str(timeline) and "transport of rows" not in str(timeline)
    want = {f"{n}.{role}.bwd" for n in range(1, LAYERS) for role in ("enter", "enter.2")}
    for runs in timeline.ranks:
        assert {f.name for f in runs["as it is"].records[0].flights if f.phase == "backward"} == want
    assert {one.name for one in timeline.estimated["backward"].schedule.collectives} == want
    assert {one.name for one in timeline.estimated["forward"].schedule.collectives} == {
        f"{n}.reduce" for n in range(1, LAYERS)
    }
    dist.barrier()
    path = folder / "with_sums" / "costs.json"
    costs = load_costs(path).costs_us
    sums["schedule"]["costs"] = str(path)
    again = fxskip.trace(spread(original(), **sums), inputs, steps=1)
    for one in again.estimated["backward"].schedule.collectives:
        assert one.cost_us == pytest.approx(costs[one.name.partition(".")[2].removesuffix(".bwd")])


def cut_both_ways(rank: int, folder: Path) -> None:
    """With several sums in a layer, and one of them in flight across the border."""
    parallel = {"expert": {"size": 2, "exchange": "all_reduce"}, "tensor": {"size": 2}}
    inputs: dict[str, Any] = own_batch(0) | {"use_cache": False}
    for backward in ("mirrored", "explicit"):
        student = spread(model("qwen2_moe", layers=2), parallel=parallel, schedule={"backward": backward})
        assert deferring(student)
        timeline = fxskip.trace(student, inputs, steps=1)
        for phase, estimate in timeline.estimated.items():
            want = {one.name for one in estimate.schedule.collectives}
            for runs in timeline.ranks:
                sent = [f.name for f in runs["as it is"].records[0].flights if f.phase == phase]
                assert set(sent) == want and len(sent) == len(want)
        assert {"1.enter.bwd", "1.enter.4.bwd"} <= want


def scheduled_by(path: Path, kind: str = "deepseek_v2", **overrides: Any) -> Any:
    return spread(model(kind, **({"layers": LAYERS} | overrides)), schedule={"costs": str(path)})


def tables_that_do_not_fit(rank: int, folder: Path) -> None:
    """Of another model, of other ranks, on one rank alone: said on both, before a layer is spread or a row is sent."""
    path = folder / "trace" / "costs.json"
    with pytest.raises(fxskip.ScheduleError, match="measured for a student that differs in model, shapes"):
        scheduled_by(path, "mixtral")
    with pytest.raises(fxskip.ScheduleError, match=r"input_layernorm.weight \[64\], here \[32\]"):
        scheduled_by(path, hidden_size=32)
    own = folder / f"of{rank}" / "costs.json"
    own.parent.mkdir()
    table = load_costs(path)
    save_costs(table.model_copy(update={"costs_us": table.costs_us | {"dispatch": 5.0 + rank}}), own)
    os.chdir(own.parent)
    with pytest.raises(fxskip.PassError, match="read different tables") as caught:
        scheduled_by(Path("./costs.json"))
    assert "rank 0: costs_us.dispatch: 5.0\n" in str(caught.value)
    assert "rank 1: costs_us.dispatch: 6.0\n" in str(caught.value)
    own.rename(own.with_name(f"only-on-{rank}.json"))
    with pytest.raises(fxskip.PassError, match=r"rank 1: .*only-on-0\.json cannot be read: No such file"):
        scheduled_by(Path("./only-on-0.json"))
    with (
        patch("fxskip.api.rewire", side_effect=AssertionError("captured first")),
        pytest.raises(fxskip.SpecError, match=r"none\.json cannot be read: No such file"),
    ):
        scheduled_by(folder / "none.json")


def tables_of_other_circumstances(rank: int, folder: Path) -> None:
    """Used, and said. A model with more such layers is the same work."""
    table, path = load_costs(folder / "trace" / "costs.json"), folder / "elsewhere.json"
    key = table.key.model_copy(update={"device": "NVIDIA H200"})
    if rank == 0:
        save_costs(table.model_copy(update={"key": key, "tokens": 500}), path)
    dist.barrier()
    with pytest.warns(
        UserWarning, match=r"elsewhere\.json was measured elsewhere: 'NVIDIA H200', here 'cpu'"
    ):
        student = scheduled_by(path, layers=LAYERS + 1)
    evaluated = student.eval()
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("error")
        evaluated(**own_batch(rank))
    tokens = own_batch(rank)["input_ids"].numel()
    with pytest.warns(UserWarning, match=f"measured with 500 tokens a rank, and this pass has {tokens};"):
        student.train()(**own_batch(rank))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        student(**own_batch(rank))


def gradients_in_backward(rank: int, folder: Path) -> None:
    """Their all-reduces are shown, and costed by what was measured."""
    sums = {
        *(f"{layer}.gradients" for layer in range(LAYERS)),
        f"{LAYERS - 1}.head_gradients",
        "0.embedding_gradients",
    }
    schedule = {"gradients": "in_backward"}
    student, inputs = spread(original(), schedule=schedule), own_batch(rank)
    timeline = fxskip.trace(student, inputs, folder / "sums", steps=1)
    dist.barrier()
    for runs in timeline.ranks:
        (record,) = runs["as it is"].records
        sent = [flight for flight in record.flights if flight.lane == "data"]
        assert {flight.name for flight in sent} == sums and len(sent) == len(sums)
        assert {flight.phase for flight in sent} == {"backward"}
        at = {flight.name: flight for flight in sent}
        first_layer = [t.end_us for t in record.tasks if t.layer == 0 and t.phase == "backward"]
        assert at[f"{LAYERS - 1}.gradients"].issued_us < max(first_layer)
        assert at["0.embedding_gradients"].bytes == 4 * (VOCAB * 64 + 1)  # and who has a gradient
        assert all(record.flights == () for record in runs["nothing sent"].records)
    estimate = timeline.estimated["backward"].schedule
    assert {one.name for one in estimate.collectives if one.lane == "data"} == sums
    assert "exposed gradients, rank 0, us" in str(timeline)
    path = folder / "sums" / "costs.json"
    costs = load_costs(path).costs_us
    again = spread(original(), schedule=schedule | {"costs": str(path)})
    estimate = fxskip.trace(again, inputs, steps=1).estimated["backward"].schedule
    for one in estimate.collectives:
        if one.lane == "data":
            assert one.cost_us == pytest.approx(costs[one.name.partition(".")[2]])


def _regions() -> list[str]:
    from fxskip.schedule.order_region import _FOUND

    return list(_FOUND)


def other_students(rank: int, folder: Path) -> None:
    """Not scheduled; in eval mode; all-reduce in place of the exchange."""
    inputs = own_batch(rank)
    reference = fxskip.trace(spread(original(), mode="reference"), inputs, steps=1)
    assert "runtime mode reference: collectives wait where they start, and nothing was scheduled" in str(
        reference
    )
    assert reference.estimated == {} and "estimated" not in str(reference)
    assert len(reference.ranks[0]["as it is"].records[0].flights) == 5 * (LAYERS - 1)
    with pytest.raises(fxskip.ScheduleError, match="no layer runs by a schedule"):
        reference.costs()
    evaluated = fxskip.trace(spread(original()).eval(), inputs, steps=1)
    assert "forward only: the model is in eval mode" in str(evaluated)
    assert set(evaluated.estimated) == {"forward"}
    same = own_batch(0)
    sums = {"parallel": {"expert": {"size": 2, "exchange": "all_reduce"}}}
    replicated = fxskip.transform(original(), {"fxskip": 1, "preset": "farskip", **sums})
    timeline = fxskip.trace(replicated, same, steps=1)
    flights = timeline.ranks[0]["as it is"].records[0].flights
    want = {("reduce", "forward"), ("enter.bwd", "backward"), ("enter.2.bwd", "backward")}
    assert {(f.role, f.phase) for f in flights} == want


def switches(rank: int, folder: Path) -> None:
    """Blocking gives the same bits. With nothing sent and experts in turn, shapes and gradients are those of a step."""
    student = spread(original())
    inputs = own_batch(rank)
    expected = step(student, inputs)
    with waiting_at_once():
        assert_same_bits(expected, step(student, inputs))
    with sending_nothing():
        alone = step(student, inputs)
        assert alone.gradients.keys() == expected.gradients.keys()
        assert all(alone.gradients[n].shape == g.shape for n, g in expected.gradients.items())
    with routing_in_turn():
        turned = fxskip.trace(student, inputs, steps=1)
        assert not torch.equal(step(student, inputs).logits, expected.logits)
    rows = {f.bytes for f in turned.ranks[0]["as it is"].records[0].flights if f.role == "dispatch"}
    tokens, choices, width = inputs["input_ids"].numel(), 2, 64
    assert rows == {tokens * choices * width * 4}
    assert_same_bits(expected, step(student, inputs))


def a_tiny_bench(rank: int, folder: Path) -> None:
    setting = Setting(
        layers=3, micro_batch=1, tokens=16, rounds=1, traced_steps=1, link="default", measured_costs=True, is_tiny=True
    )  # fmt: skip
    found = dict(measure_pair(setting, rank))
    conditions = {place[0] for place in found} - {"environment", "peak_gib", MOVED_BY}
    assert conditions == {
        "real routing, real data",
        "routing in turn, real data",
        "routing in turn, zero data",
    }
    assert all(found[MOVED_BY, wiring]["chosen"] == "gloo" for wiring in WIRINGS)
    for condition in conditions:
        for wiring in WIRINGS:
            for mode in ("as it is", "blocking", "nothing sent"):
                row = found[condition, wiring, mode]
                samples = row["samples_ms"]
                assert [len(own) for own in samples] == [1, 1]
                assert row["step_ms"] == max(own[0]["step"] for own in samples) > 0
                assert "unavailable" in row["clocks"]
            trace = found[condition, wiring, "trace"]
            assert set(trace) == {"forward", "backward", "step"}
            assert trace["step"]["step_us"] / 1e3 == found[condition, wiring, "as it is"]["step_ms"]


@pytest.mark.distributed
def test_on_two_ranks(tmp_path: Path) -> None:
    checks = (
        everything_about_a_trace,
        tables_that_do_not_fit,
        tables_of_other_circumstances,
        switches,
        explicit_backward,
    )
    run_on_ranks(checks, tmp_path, limit_s=240)


@pytest.mark.distributed
@pytest.mark.slow
def test_more_on_two_ranks(tmp_path: Path) -> None:
    run_on_ranks(
        (other_students, explicit_sums, cut_both_ways, gradients_in_backward, a_tiny_bench),
        tmp_path,
        limit_s=560,
    )
