"""The scheduled backward against plain autograd: the same bits, hooks once, whatever the orders."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fxskip.backward.scheduled_region import ScheduledRegion
from tests.backward.random_programs import copies, loss_of, plain, random_case


def assert_same(got: Any, want: Any, what: str) -> None:
    if isinstance(want, Tensor):
        assert torch.equal(got, want), f"{what}: differs by {(got - want).abs().max()}"
        assert got.requires_grad == want.requires_grad, what
    else:
        assert got == want, what


def assert_same_gradients(got: dict[str, Any], want: dict[str, Any]) -> None:
    for name, leaf in want.items():
        if isinstance(leaf, Tensor) and leaf.grad is not None:
            assert got[name].grad is not None, name
            assert torch.equal(got[name].grad, leaf.grad), (
                f"{name}: {(got[name].grad - leaf.grad).abs().max()}"
            )
        elif isinstance(leaf, Tensor):
            assert got[name].grad is None, name


def count_hooks(inputs: dict[str, Any]) -> dict[int, list[int]]:
    """How often the two kinds of hooks of each leaf have run, from now on."""
    counts: dict[int, list[int]] = {}
    for leaf in {id(v): v for v in inputs.values() if isinstance(v, Tensor) and v.requires_grad}.values():
        count = counts[id(leaf)] = [0, 0]

        def before(gradient: Tensor, count: list[int] = count) -> None:
            assert gradient is not None
            count[0] += 1

        def after(leaf: Tensor, count: list[int] = count) -> None:
            count[1] += 1

        leaf.register_hook(before)
        leaf.register_post_accumulate_grad_hook(after)
    return counts


@pytest.mark.parametrize("block", range(8))
def test_random_programs_in_random_orders_are_bitwise_plain_autograd(block: int) -> None:
    differentiated = 0
    for seed in range(25 * block, 25 * (block + 1)):
        case = random_case(seed)
        expected, inputs = copies(case.inputs), copies(case.inputs)
        counts = count_hooks(inputs)

        want = plain(case.program, list(expected.values()))
        region = ScheduledRegion(case.program, forward=case.forward, backward=case.backward)
        got = region(*inputs.values())

        for name, ours, theirs in zip(case.program.outputs, got, want, strict=True):
            assert_same(ours, theirs, f"seed {seed}, output {name}")
        loss = loss_of(want)
        if loss is None:
            continue
        loss.backward()
        ours = loss_of(got)
        assert ours is not None
        ours.backward()
        assert_same_gradients(inputs, expected)
        for leaf in inputs.values():
            if id(leaf) in counts:
                assert counts[id(leaf)] == ([0, 0] if leaf.grad is None else [1, 1])
        differentiated += 1
    assert differentiated >= 20
