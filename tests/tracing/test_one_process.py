"""A student in one process under watch: the same numbers, tasks that follow each other, and what is refused."""

import json
from typing import Any

import pytest
import torch

import fxskip
from fxskip.collectives.measuring import watched_by
from fxskip.runtime.observed import begin_stretch, end_stretch, with_probes
from fxskip.tracing.recorder import Recorder
from fxskip.tracing.runs import Stepper
from tests.schedule.regions import region
from tests.strict_html import StrictHtml
from tests.tracing.perfetto_format import assert_valid
from tests.zoo import batch, tiny

CPU = torch.device("cpu")


def student(**sections: Any):
    return fxskip.transform(tiny("deepseek_v2", layers=3), {"fxskip": 1, "preset": "farskip", **sections})


def gradients(model):
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return found


def test_watching_changes_no_bit():
    model, inputs = student().train(), batch()
    plain = model(**inputs)
    plain.loss.backward()
    expected = gradients(model)
    recorder = Recorder(CPU)
    with watched_by(recorder):
        watched = model(**inputs)
        recorder.end_phase()
        watched.loss.backward()
        recorder.end_phase()
    assert torch.equal(watched.logits, plain.logits)
    found = gradients(model)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_tasks_follow_each_other():
    stepper = Stepper(student().train(), batch(), CPU, True, False)
    record, schedules = stepper.recorded()
    assert schedules == {0: None, 1: None, 2: None}
    assert record.flights == ()
    for one, following in zip(record.tasks, record.tasks[1:], strict=False):
        assert 0 <= one.start_us <= one.end_us <= following.start_us
    border = record.phase_end_us["forward"]
    assert all(task.end_us <= border for task in record.tasks if task.phase == "forward")
    assert all(task.start_us >= border for task in record.tasks if task.phase == "backward")
    forward = {(t.layer, t.role) for t in record.tasks if t.phase == "forward"}
    assert forward >= {(0, "attention1"), (0, "dense2"), (1, "attention1"), (1, "moe2")}
    backward = [t for t in record.tasks if t.phase == "backward"]
    assert {(t.layer, t.role) for t in backward} >= {
        (1, "moe2.bwd"),
        (1, "attention1.bwd"),
        (0, "dense2.bwd"),
    }
    assert [t.layer for t in backward] == sorted((t.layer for t in backward), reverse=True)


def test_a_recomputation_has_tasks_of_its_own():
    stepper = Stepper(student(runtime={"recompute": "layer"}).train(), batch(), CPU, True, False)
    record, _ = stepper.recorded()
    again = [task for task in record.tasks if task.role == "moe2.again"]
    assert {(task.layer, task.phase) for task in again} == {(1, "backward"), (2, "backward")}
    gradient = [task for task in record.tasks if task.role == "moe2.bwd"]
    assert {task.layer for task in gradient} == {1, 2}


def test_probes_leave_a_graph_alone():
    graph = region("deepseek_v2", "farskip").graph
    before = str(graph)
    probed = with_probes(graph)
    assert str(graph) == before
    own = [n for n in probed.nodes if n.target not in (begin_stretch, end_stretch)]
    assert [n.name for n in own] == [n.name for n in graph.nodes]
    assert sum(n.target is begin_stretch for n in probed.nodes) > 2


def test_a_trace_in_all_its_forms(tmp_path):
    model = student().train()
    kept = torch.ones_like(model.lm_head.weight)
    model.lm_head.weight.grad = kept
    timeline = fxskip.trace(model, batch(), tmp_path / "out", steps=2)
    assert model.lm_head.weight.grad is kept
    assert sum(p.grad is not None for p in model.parameters()) == 1
    text = str(timeline)
    assert "one process: nothing is sent, and nothing is in flight" in text
    assert "forward and backward" in text and "estimated" not in text
    assert "hidden" not in text
    data = json.loads((tmp_path / "out" / "timeline.json").read_text())
    assert data["about"]["mode"] == "one process" and data["estimated"] == {}
    assert [f["hidden"] for f in data["measured"]["figures"]] == [None] * 3
    assert len(data["measured"]["ranks"][0]["as it is"]["times"]) == 2
    assert_valid(json.loads((tmp_path / "out" / "perfetto.json").read_text()))
    page = StrictHtml((tmp_path / "out" / "timeline.html").read_text())
    assert any("nothing is in flight" in words for _, words in page.texts)
    assert not (tmp_path / "out" / "costs.json").exists()
    with pytest.raises(fxskip.ScheduleError, match="no layer runs by a schedule"):
        timeline.costs()
    with pytest.raises(fxskip.ScheduleError, match="layer 7 ran no task") as caught:
        timeline.text(7)
    assert "layers are 0 to 2" in str(caught.value)


def test_without_gradients():
    model, inputs = student(), batch()
    timeline = fxskip.trace(model.eval(), inputs, steps=1)
    assert "forward only: the model is in eval mode" in str(timeline)
    assert [one.part for one in timeline.figures] == ["forward"]
    assert set(timeline.ranks[0]["as it is"].records[0].phase_end_us) == {"forward"}
    with torch.no_grad():
        timeline = fxskip.trace(model.train(), inputs, steps=1)
    assert "forward only: gradients are off" in str(timeline)


def test_what_is_refused():
    model = student()
    with pytest.raises(fxskip.PassError, match="was not rewired by fxskip"):
        fxskip.trace(tiny("mixtral", layers=1), batch())
    with pytest.raises(fxskip.PassError, match="the batch is a Tensor"):
        fxskip.trace(model, batch()["input_ids"])
    with pytest.raises(fxskip.PassError, match="steps is 0"):
        fxskip.trace(model, batch(), steps=0)


def test_costs_that_were_not_measured():
    spec = {
        "fxskip": 1,
        "preset": "farskip",
        "parallel": {"expert": {"size": 2}},
        "schedule": {"costs": "measured"},
    }
    with pytest.raises(fxskip.PassError, match="nothing has been measured yet") as caught:
        fxskip.transform(tiny("mixtral", layers=1), spec)
    assert "fxskip.trace(student, batch, out='trace')" in str(caught.value)
    assert "costs: trace/costs.json" in str(caught.value)
