"""schedule.backward: explicit gives the bits of reference mode, in the order that was planned."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import fxskip
from fxskip.backward.region_call import RegionCall
from fxskip.collectives.in_flight import Flight
from fxskip.collectives.landing import poisoned_buffers, under_way
from fxskip.collectives.measuring import Part, Place, Sent, watched_by
from fxskip.schedule import order_region
from tests.collectives.spreads import (
    Outcome,
    assert_same_bits,
    gradients,
    in_mode,
    model,
    own_batch,
    regions,
    spread,
    step,
)
from tests.training_loop.ranks import run_on_ranks

EXPLICIT = {"backward": "explicit"}
Log = list[tuple[str, str]]


@cache
def student(preset: str = "farskip", recompute: str = "none") -> nn.Module:
    """Two layers: the first leaves its combine to the second."""
    original = model("qwen2_moe", layers=2)
    return spread(original, preset, schedule=EXPLICIT, runtime={"recompute": recompute})


@contextmanager
def logged() -> Iterator[Log]:
    """What happens in backward passes: the events of steps, and reverse exchanges issued and waited for."""
    log: Log = []
    with pytest.MonkeyPatch.context() as patch:
        run_event, issue, wait = RegionCall.run_event, Flight.start_reverse, Flight.wait_reverse

        def event(self: RegionCall, one: Any) -> None:
            name = self.plan.program.steps[one.step].name
            log.append(("event", name if one.part == "both" else f"{name}.{one.part}"))
            run_event(self, one)

        def start_reverse(self: Flight, gradient: Tensor) -> Tensor:
            log.append(("issue", self.name))
            return issue(self, gradient)

        def wait_reverse(self: Flight, token: Tensor) -> Tensor:
            log.append(("wait", self.name))
            return wait(self, token)

        patch.setattr(RegionCall, "run_event", event)
        patch.setattr(Flight, "start_reverse", start_reverse)
        patch.setattr(Flight, "wait_reverse", wait_reverse)
        yield log


def plans() -> list[tuple[str, ...]]:
    """The backward orders of all regions so far."""
    noted = [schedule.backward for found in order_region._FOUND.values() for schedule in found]
    return [backward.events for backward in noted if backward is not None]


def the_planned_order(rank: int, folder: Path) -> None:
    order_region._FOUND.clear()
    twin, inputs = in_mode(student(), "scheduled"), own_batch(rank)
    with logged() as log:
        found = step(twin, inputs)
    assert_same_bits(found, step(in_mode(student(), "reference"), inputs))
    first, last = plans()
    events = tuple(name for kind, name in log if kind == "event")
    assert events == (*last, *first)  # the last layer runs backward first
    weights_under_exchanges = 0
    for name in {name for kind, name in log if kind == "issue"}:
        flight = log[log.index(("issue", name)) : log.index(("wait", name))]
        weights_under_exchanges += sum(event.endswith(".wgrad") for _, event in flight)
    assert {name for kind, name in log if kind == "wait"} == {name for kind, name in log if kind == "issue"}
    assert weights_under_exchanges > 0
    # Experts' weight gradients are computed in events of their own.
    assert any(event.endswith(".wgrad") for event in first)


def waiting_at_once(rank: int, folder: Path) -> None:
    found = [step(in_mode(student(), mode), own_batch(rank)) for mode in ("scheduled", "eager_wait")]
    assert_same_bits(*found)


def without_gradients(rank: int, folder: Path) -> None:
    """The graph itself runs, and no step is recorded."""
    twin = in_mode(student(), "scheduled")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fxskip.backward.scheduled_region.ScheduledRegion.__call__", None)
        for module in (twin.train(), twin.eval()):
            with torch.no_grad():
                got = module(**own_batch(rank)).logits
                assert torch.equal(
                    got, in_mode(student(), "reference").train(module.training)(**own_batch(rank)).logits
                )
    assert under_way() == []


def an_error_in_forward(rank: int, folder: Path) -> None:
    twin, inputs = in_mode(student(), "scheduled"), own_batch(rank)
    want = step(twin, inputs)
    experts = regions(twin)[1].get_submodule("mlp.experts")
    handle = experts.register_forward_pre_hook(_raise)
    with pytest.raises(ArithmeticError, match="broken") as caught:
        step(twin, inputs)
    handle.remove()
    assert under_way() == []
    assert any("forward of step 'moe2." in n and "of decoder layer 1" in n for n in caught.value.__notes__)
    assert_same_bits(step(twin, inputs), want)


def _raise(*arguments: Any) -> None:
    raise ArithmeticError("broken")


def an_error_in_backward(rank: int, folder: Path) -> None:
    twin, inputs = in_mode(student(), "scheduled"), own_batch(rank)
    want = step(twin, inputs)
    experts = regions(twin)[0].get_submodule("mlp.experts")
    handle = experts.register_forward_hook(lambda module, args, out: _Fails.apply(out))
    with pytest.raises(ArithmeticError, match="broken") as caught:
        step(twin, inputs)
    handle.remove()
    assert under_way() == []
    assert any("backward of step 'moe2." in n and "of decoder layer 0" in n for n in caught.value.__notes__)
    assert_same_bits(step(twin, inputs), want)


class _Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        _raise()


def other_parameters(rank: int, folder: Path) -> None:
    twin, inputs = in_mode(student(), "scheduled"), own_batch(rank)
    step(twin, inputs)
    experts = regions(twin)[1].get_submodule("mlp.experts")
    experts.register_parameter("added", nn.Parameter(torch.ones(1)))
    with pytest.raises(
        fxskip.PassError, match="gate_up_proj, down_proj, added, and the region was made"
    ) as caught:
        step(twin, inputs)
    assert "decoder layer 1" in str(caught.value)
    assert under_way() == []


class Told:
    """A watcher that writes down what it is told of tasks: the layer, and what a trace would call the task."""

    def __init__(self) -> None:
        self.entered: list[tuple[int, str] | None] = []

    def enter_region(self, layer: int, schedule: Any, inputs: Any) -> None:
        assert schedule.backward is not None

    def enter(self, place: Place | None, part: Part = "forward") -> None:
        self.entered.append(place and (place.layer, f"{place.role}.{part}"))

    def flight(self, sent: Sent) -> Mock:
        return Mock()


def watched(rank: int, folder: Path) -> None:
    """Whoever watches is told of each task, forward in the order of the steps and backward in that of the events, and
    gets the same bits; of steps that wait, that nothing measured runs."""
    order_region._FOUND.clear()
    twin, inputs, told = in_mode(student(), "scheduled"), own_batch(rank), Told()
    with watched_by(told):
        found = step(twin, inputs)
    assert_same_bits(found, step(in_mode(student(), "reference"), inputs))
    entered = [one for one in told.entered if one is not None]
    forward = [one for one in entered if one[1].endswith(".forward")]
    assert entered[: len(forward)] == forward and None in told.entered
    want = []
    for layer, events in reversed(list(enumerate(plans()))):
        tasks = [event for event in events if not event.endswith(".wait")]
        want += [(layer, e if e.endswith("grad") else f"{e}.bwd") for e in tasks]
    backward = entered[len(forward) :]
    assert backward == [one for one in want if one in backward]
    silent = {name.split(".")[0] for _, name in set(want) - set(backward)}
    assert silent <= {"counts", "routing", "stream"}  # indices, and sums that no gradient comes back to
    assert {name.removesuffix(".forward") for layer, name in forward if layer == 1} >= {
        name.rpartition(".")[0] for layer, name in backward if layer == 1
    }


def beside_ddp(rank: int, folder: Path) -> None:
    """Replicated gradients are averaged while the backward pass of a layer still runs."""
    found = []
    for mode in ("reference", "scheduled"):
        twin = DistributedDataParallel(in_mode(student(), mode))
        torch.manual_seed(5)
        with twin.no_sync():
            twin(**own_batch(rank, 1), use_cache=False).loss.backward()
        out = twin(**own_batch(rank), use_cache=False)
        out.loss.backward()
        found.append(Outcome(out.logits.detach(), gradients(twin)))
    assert_same_bits(found[1], found[0])


# --- training loops -----------------------------------------------------------------------------------


def two_live_forwards(module: nn.Module, rank: int) -> Tensor:
    first = module(**own_batch(rank), use_cache=False)
    second = module(**own_batch(rank, 1, 5), use_cache=False)
    first.loss.backward()
    second.loss.backward()
    return torch.cat((first.logits.flatten(), second.logits.flatten()))


def accumulation(module: nn.Module, rank: int) -> Tensor:
    out = [module(**own_batch(rank, rows), use_cache=False) for rows in (1, 2, 3)]
    torch.stack([one.loss for one in out]).sum().backward()
    return out[0].logits


def frozen(module: nn.Module, rank: int) -> Tensor:
    """Attention of one layer, and half of the experts' matrices."""
    regions(module)[0].get_submodule("self_attn").requires_grad_(False)
    for name, parameter in module.named_parameters():
        if name.endswith("experts.down_proj"):
            parameter.requires_grad_(False)
    return two_live_forwards(module, rank)


def autocast(module: nn.Module, rank: int) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        out = module(**own_batch(rank), use_cache=False)
    out.loss.backward()
    return out.logits


def part_of_the_gradients(module: nn.Module, rank: int) -> Tensor:
    out = module(**own_batch(rank), use_cache=False)
    wanted = regions(module)[1].get_submodule("self_attn.q_proj").weight
    (found,) = torch.autograd.grad(out.loss, [wanted])
    return found


def checkpointed(module: nn.Module, rank: int) -> Tensor:
    module.gradient_checkpointing_enable({"use_reentrant": False})
    found = two_live_forwards(module, rank)
    module.gradient_checkpointing_disable()
    return found


def assert_as_reference(
    loop: Callable[[nn.Module, int], Tensor], rank: int, of: nn.Module | None = None, **options: str
) -> None:
    found = []
    for mode in ("reference", "scheduled"):
        twin = in_mode(student(**options) if of is None else of, mode)
        torch.manual_seed(5)
        with poisoned_buffers():
            result = loop(twin, rank)
        assert under_way() == []
        found.append(Outcome(result.detach(), gradients(twin)))
    assert not found[0].logits.isnan().any()
    assert_same_bits(found[1], found[0])


def loops(rank: int, folder: Path) -> None:
    for loop in (two_live_forwards, accumulation):
        assert_as_reference(loop, rank)


def more_loops(rank: int, folder: Path) -> None:
    for loop in (frozen, autocast, part_of_the_gradients, checkpointed):
        assert_as_reference(loop, rank)


def recomputation(recompute: str, rank: int, folder: Path) -> None:
    assert_as_reference(two_live_forwards, rank, recompute=recompute)


def every_preset(kind: str, rank: int, folder: Path) -> None:
    """Stock connectivity with split weight gradients is what FarSkip is compared with."""
    original, inputs = model(kind), own_batch(rank, padded=True)
    for preset in ("farskip", "identity", "ladder"):
        twin = spread(original, preset, schedule=EXPLICIT)
        with logged() as log:
            found = step(twin, inputs)
        assert any(event.endswith(".wgrad") for _, event in log)
        assert_same_bits(found, step(in_mode(twin, "reference"), inputs))
        mirrored = spread(original, preset)
        assert_same_bits(found, step(mirrored, inputs))


def sums_over_ranks(rank: int, folder: Path) -> None:
    """Sums of gradients are issued where all readers have given theirs, and weight gradients run under them."""
    original, inputs = model("qwen2_moe", layers=2), own_batch(0)
    tensor, expert = {"tensor": {"size": 2}}, {"expert": {"size": 2, "exchange": "all_reduce"}}
    for parallel in (tensor, expert, tensor | expert):
        order_region._FOUND.clear()
        twin = spread(original, "identity", parallel=parallel, schedule=EXPLICIT)
        with logged() as log:
            found = step(twin, inputs, use_cache=False)
        orders = plans()
        first, last = orders[0], orders[-1]  # one order, where nothing crosses the border
        assert [name for kind, name in log if kind == "event"] == [*last, *first]
        for mode in ("reference", "eager_wait"):
            assert_same_bits(found, step(in_mode(twin, mode), inputs, use_cache=False))
        sums = {name for kind, name in log if kind == "issue" and name.startswith("enter")}
        assert sums
        under = [log[log.index(("issue", name)) : log.index(("wait", name))] for name in sums]
        assert any(event.endswith(".wgrad") for flight in under for _, event in flight)


def loops_with_sums(rank: int, folder: Path) -> None:
    expert = {"expert": {"size": 2, "exchange": "all_reduce"}, "tensor": {"size": 2}}
    twin = spread(model("qwen2_moe", layers=2), parallel=expert, schedule=EXPLICIT)
    for loop in (two_live_forwards, accumulation, autocast, checkpointed):
        assert_as_reference(loop, 0, of=twin)
    recomputing = spread(
        model("qwen2_moe", layers=2), parallel=expert, schedule=EXPLICIT, runtime={"recompute": "selective"}
    )
    assert_as_reference(two_live_forwards, 0, of=recomputing)


@pytest.mark.distributed
def test_two_processes(tmp_path: Path) -> None:
    run_on_ranks((the_planned_order, watched), tmp_path, limit_s=240)


@pytest.mark.distributed
@pytest.mark.slow
def test_errors(tmp_path: Path) -> None:
    checks = (an_error_in_forward, an_error_in_backward, other_parameters)
    run_on_ranks(checks, tmp_path, limit_s=560)


@pytest.mark.distributed
@pytest.mark.slow
def test_sums_over_ranks(tmp_path: Path) -> None:
    run_on_ranks((sums_over_ranks, loops_with_sums), tmp_path, limit_s=580)


@pytest.mark.distributed
@pytest.mark.slow
def test_loops(tmp_path: Path) -> None:
    checks = (waiting_at_once, without_gradients, loops, more_loops, beside_ddp)
    run_on_ranks(checks, tmp_path, limit_s=560)


@pytest.mark.distributed
@pytest.mark.slow
def test_recomputation(tmp_path: Path) -> None:
    checks = [partial(recomputation, how) for how in ("layer", "selective")]
    run_on_ranks(checks, tmp_path, limit_s=560)


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["deepseek_v2", "qwen3_moe", "mixtral"])
def test_presets(kind: str, tmp_path: Path) -> None:
    run_on_ranks([partial(every_preset, kind)], tmp_path, limit_s=560)
