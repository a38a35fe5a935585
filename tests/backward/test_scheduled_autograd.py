"""A scheduled region in training loops: modes of autograd, accumulation, freezing, autocast."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fxskip.backward.program import Program, Step
from fxskip.backward.scheduled_region import ScheduledRegion
from tests.backward.random_programs import plain
from tests.backward.test_scheduled_region import assert_same_gradients
from tests.backward.tied_program import (
    TIED,
    D,
    both,
    leaves,
    tied_region,
)


def compare(run: Callable[[dict[str, Tensor], Callable[..., tuple[Any, ...]]], None]) -> None:
    """`run` a training step plainly and scheduled; the gradients must be equal to the last bit."""
    (expected, reference), (inputs, region) = both()
    run(expected, reference)
    run(inputs, region)
    assert expected["tied"].grad is not None
    assert_same_gradients(inputs, expected)


# --- what training loops do ----------------------------------------------------------------------


def test_two_live_forwards_then_two_backwards() -> None:
    def run(inputs: dict[str, Tensor], call: Callable[..., tuple[Any, ...]]) -> None:
        (one,), (two,) = call(*inputs.values()), call(inputs["x"] * 2, *list(inputs.values())[1:])
        one.square().sum().backward()
        two.cos().sum().backward()

    compare(run)


def test_one_backward_through_two_calls() -> None:
    def run(inputs: dict[str, Tensor], call: Callable[..., tuple[Any, ...]]) -> None:
        (one,) = call(*inputs.values())
        (two,) = call(one, *[leaf.detach() for leaf in list(inputs.values())[1:]])
        two.square().sum().backward()

    compare(run)


def test_gradient_accumulation_over_three_micro_batches() -> None:
    def run(inputs: dict[str, Tensor], call: Callable[..., tuple[Any, ...]]) -> None:
        for seed in range(3):
            (out,) = call(leaves(seed)["x"].detach(), *list(inputs.values())[1:])
            out.square().mean().backward()

    compare(run)


@pytest.mark.parametrize("frozen", [("tied",), ("x",), ("x", "scale", "bias"), ("x", "tied", "scale")])
def test_frozen_parameters_and_inputs(frozen: tuple[str, ...]) -> None:
    (expected, reference), (inputs, region) = both()
    for leaf in (*(expected[n] for n in frozen), *(inputs[n] for n in frozen)):
        leaf.requires_grad_(False)
    reference(*expected.values())[0].square().sum().backward()
    region(*inputs.values())[0].square().sum().backward()
    assert_same_gradients(inputs, expected)


@pytest.mark.parametrize("cached", [True, False])
def test_autocast_casts_a_tied_weight_once(cached: bool) -> None:
    def run(inputs: dict[str, Tensor], call: Callable[..., tuple[Any, ...]]) -> None:
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=cached):
            for _ in range(2):
                (out,) = call(*inputs.values())
                out.float().square().sum().backward()

    compare(run)


def test_autocast_keeps_one_cast_a_parameter() -> None:
    seen: list[Tensor] = []

    def remember(x: Tensor, weight: Tensor) -> tuple[Tensor]:
        seen.append(weight)
        return (F.linear(x, weight),)

    steps = (Step("a", remember, ("x", "w"), ("a",)), Step("b", remember, ("a", "w"), ("y",)))
    region = ScheduledRegion(Program(steps, ("x", "w"), ("y",)))
    x, weight = torch.randn(2, D), torch.randn(D, D, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        for _ in range(3):
            region(x, weight)
    assert all(tensor is seen[0] for tensor in seen)  # autocast looks a cast up by its tensor
    assert seen[0] is not weight


def test_autograd_grad_is_right_and_leaves_parameters_alone() -> None:
    (expected, reference), (inputs, region) = both()
    for wanted in (["x"], ["tied"], ["x", "scale"], ["bias"]):
        want = torch.autograd.grad(
            reference(*expected.values())[0].sum(), [expected[name] for name in wanted]
        )
        got = torch.autograd.grad(region(*inputs.values())[0].sum(), [inputs[name] for name in wanted])
        assert all(map(torch.equal, got, want))
    assert all(leaf.grad is None for leaf in inputs.values())


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients_nothing_of_autograd_is_built(
    mode: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = leaves()
    want = plain(TIED, list(inputs.values()))[0]
    region = tied_region()
    monkeypatch.setattr("fxskip.backward.scheduled_region.RegionCall", None)
    monkeypatch.setattr("fxskip.backward.scheduled_region._Piece", None)
    with mode():
        (got,) = region(*inputs.values())
    assert torch.equal(got, want)
    assert not got.requires_grad


def test_nothing_is_built_where_nothing_wants_a_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    region = tied_region()
    monkeypatch.setattr("fxskip.backward.scheduled_region.RegionCall", None)
    assert not region(*leaves(gradient=False).values())[0].requires_grad


def test_a_copied_region_and_anomaly_detection() -> None:
    def run(inputs: dict[str, Tensor], call: Callable[..., tuple[Any, ...]]) -> None:
        with torch.autograd.set_detect_anomaly(True):
            copy.deepcopy(call)(*inputs.values())[0].square().sum().backward()

    compare(run)


def test_a_compiled_caller_leaves_the_region_as_it_is() -> None:
    def run(inputs: dict[str, Tensor], call: Callable[..., tuple[Any, ...]]) -> None:
        torch._dynamo.reset()
        loss = lambda *given: call(*given)[0].square().sum()  # noqa: E731
        compiled = torch.compile(loss, backend="eager") if isinstance(call, ScheduledRegion) else loss
        compiled(*inputs.values()).backward()

    compare(run)
