"""The backward pass of a region, in the order of a schedule of its own."""

from dataclasses import replace
from functools import cache

import pytest

from fxskip.parallel import GradientSum
from fxskip.schedule.hardware import load_hardware
from fxskip.schedule.order_backward import BackwardSchedule, complete_events, order_backward
from fxskip.schedule.order_region import _costs
from fxskip.schedule.region_tasks import RegionTasks, region_tasks
from fxskip.spec import Schedule
from tests.schedule.regions import Drawn, region


@cache
def drawn(spec: str, scale: int = 1) -> tuple[Drawn, RegionTasks]:
    one = region("deepseek_v2", spec, scale=scale)
    return one, region_tasks(one.units, _costs(one.units, one.parallel), repeats=one.arriving is not None)


@cache
def backward(spec: str, scale: int = 1) -> BackwardSchedule:
    one, tasks = drawn(spec, scale)
    return order_backward(tasks, one.parallel, split(tasks))


def split(tasks: RegionTasks) -> set[str]:
    return {task.role for task in tasks.graph if task.has_weights}


@pytest.mark.parametrize("spec", ["farskip", "identity"])
def test_every_task_with_a_gradient_runs_once(spec: str) -> None:
    tasks, events = drawn(spec)[1], backward(spec).events
    weights = split(tasks)
    computing = {t.role for t in tasks.graph if t.lane == "compute"}
    want = {f"{r}.dgrad" for r in weights} | {f"{r}.wgrad" for r in weights} | computing - weights
    exchanges = {"dispatch", "dispatch.wait", "combine", "arrival.wait"}
    assert sorted(events) == sorted(want | exchanges)


@pytest.mark.parametrize("spec", ["farskip", "identity"])
def test_a_reverse_exchange_is_issued_before_it_is_waited_for(spec: str) -> None:
    """The start of the combine waits for what the next layer issued; the wait of what arrived issues for the last."""
    events = backward(spec).events
    experts = next(t.role for t in drawn(spec)[1].graph if "dispatch" in _needs(drawn(spec)[1], t.role))
    at = events.index
    assert at("combine") < at(f"{experts}.dgrad") < at("dispatch.wait") < at("dispatch")
    assert at("arrival.wait") > at("stream.0")


def _needs(tasks: RegionTasks, role: str) -> set[str]:
    return {tasks.graph[name].role for name in tasks.graph.producers(f"1.{role}")}


def test_a_start_is_waited_for_right_before_its_reader() -> None:
    events = backward("farskip").events
    reader = events[events.index("dispatch") + 1]
    assert "dispatch" in {
        t.role
        for t in drawn("farskip")[1].graph
        if reader.removesuffix(".dgrad") in _needs(drawn("farskip")[1], t.role)
    }


def test_weight_gradients_hide_the_reverse_exchanges() -> None:
    """With exchanges worth hiding, of stock connectivity: nothing else could run under them."""
    events = backward("identity", 1000).events
    between = events[events.index("dispatch.wait") + 1 : events.index("dispatch")]
    assert any(event.endswith(".wgrad") for event in between)


def test_weight_gradients_hide_sums_of_gradients() -> None:
    """Sums are issued where the forward waits, in the opposite order; a sum of values has nothing to send back."""
    one = region("deepseek_v2", "identity", scale=1000, exchange="all_reduce")
    tasks = region_tasks(one.units, _costs(one.units, one.parallel), repeats=True)
    events = order_backward(tasks, one.parallel, split(tasks)).events
    at = events.index
    assert "reduce.wait" not in events and "arrival.wait" not in events
    for role in ("enter", "enter.2"):
        assert at(f"{role}.wait") < at(role)
    under = events[at("enter.wait") : at("enter")] + events[at("enter.2.wait") : at("enter.2")]
    assert any(event.endswith(".wgrad") for event in under)


def test_the_result_is_the_same_in_every_run() -> None:
    one, tasks = drawn("farskip")
    again = order_backward(tasks, one.parallel, split(tasks))
    assert again.events == backward("farskip").events
    assert again.schedule.steps == backward("farskip").schedule.steps


def test_what_cannot_be_split_stays_whole() -> None:
    one, tasks = drawn("farskip")
    events = order_backward(tasks, one.parallel, ()).events
    assert not [event for event in events if event.endswith(("grad",))]


def test_the_cap_on_bytes_in_flight_holds() -> None:
    one, tasks = drawn("farskip")
    free = order_backward(tasks, one.parallel, split(tasks)).schedule.peak_bytes
    assert 0 < free <= 1 << 20
    capped = replace(one.parallel, schedule=Schedule(max_in_flight_mib=1))
    assert order_backward(tasks, capped, split(tasks)).schedule.peak_bytes <= 1 << 20


# --- gradients that are added up over processes -------------------------------------------------------

SUMS = (
    GradientSum("expert_gradients", "expert_data", 1 << 18, 2),
    GradientSum("gradients", "data", 1 << 21, 2),
)


@cache
def with_sums(spec: str) -> BackwardSchedule:
    """Under a cap that the gradients exceed by themselves: they have one of their own while they run."""
    one, tasks = drawn(spec)
    parallel = replace(one.parallel, gradients=SUMS, schedule=Schedule(max_in_flight_mib=1))
    return order_backward(tasks, parallel, split(tasks))


@pytest.mark.parametrize("spec", ["farskip", "identity"])
def test_a_sum_starts_behind_its_gradients(spec: str) -> None:
    tasks, found = drawn(spec)[1], with_sums(spec)
    weights = {f"1.{role}.wgrad" for role in split(tasks)}
    experts = {f"1.{r}.wgrad" for r in split(tasks) if "dispatch" in _needs(tasks, r)}
    assert set(found.graph.producers("1.expert_gradients")) == experts and len(experts) == 1
    assert set(found.graph.producers("1.gradients")) > weights
    assert found.graph.consumers("1.gradients") == ()
    at = found.schedule.order.index
    assert all(at(name) < at("1.gradients") for name in found.graph.producers("1.gradients"))
    assert sorted(found.events) == sorted(backward(spec).events)  # hooks start sums, no step does


def test_a_sum_has_bytes_and_the_time_of_a_ring() -> None:
    records = {one.name: one for one in with_sums("farskip").schedule.collectives}
    h200 = load_hardware("h200")
    want_us = 1e6 * (2 * (1 << 21) / 2 / h200.domain.bytes_per_s(2) + h200.collective_start_s.value)
    found = records["2.gradients"]
    assert (found.lane, found.bytes, found.waited_by) == ("data", 1 << 21, None)
    assert found.cost_us == pytest.approx(want_us)


# --- events that the schedule does not know, and data that forbid its order ---------------------------


def test_steps_without_a_task_run_as_soon_as_they_may() -> None:
    readers = {"a": {"b"}, "b": {"c"}, "c": set(), "view": {"c"}}
    assert complete_events(("c", "b", "a"), readers, (), readers) == ("c", "view", "b", "a")


def test_data_come_before_the_schedule() -> None:
    readers = {"a": {"b"}, "b": set(), "c": set()}
    assert complete_events(("a", "c", "b"), readers, (), readers) == ("c", "b", "a")


def test_a_weight_gradient_keeps_its_place() -> None:
    readers = {"a": {"b"}, "b": {"c"}, "c": set()}
    order = ("c", "b.dgrad", "a", "b.wgrad")
    assert complete_events(order, readers, {"b"}, readers) == order
    early = ("c", "b.dgrad", "b.wgrad", "a")
    assert complete_events(early, readers, {"b"}, readers) == early
