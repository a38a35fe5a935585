"""Students whose experts are spread over two processes, each with a batch of its own, and what one step gives."""

import copy
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import fxskip
from fxskip.collectives.landing import poisoned_buffers, under_way
from fxskip.runtime.regions import Region
from tests.collectives.device import DEVICE, on_device
from tests.collectives.replicated import (
    MODES,
    ROUNDING,
    Outcome,
    assert_same_bits,
    difference,
    own,
    unequal,
    whole,
)
from tests.zoo import batch, tiny

__all__ = ["MODES", "ROUNDING", "Outcome", "assert_same_bits", "difference", "own", "unequal", "whole"]

Batch = dict[str, Tensor]


def model(kind: str = "qwen2_moe", *, layers: int = 3, double: bool = False, **overrides: Any) -> nn.Module:
    """A tiny model. In float64 its experts run without the grouped kernel, which has none."""
    found = tiny(kind, layers=layers, **overrides)
    if double:
        found.double().set_experts_implementation("batched_mm")
    return found.to(DEVICE).train()


def spread(
    original: nn.Module, preset: str = "farskip", mode: str = "scheduled", **sections: Any
) -> nn.Module:
    """A student that is spread over both processes."""
    runtime = {"mode": mode} | sections.pop("runtime", {})
    spec = {
        "fxskip": 1,
        "preset": preset,
        "parallel": {"expert": {"size": 2}},
        "runtime": runtime,
        **sections,
    }
    return fxskip.transform(original, spec)


def in_mode(student: nn.Module, mode: str) -> nn.Module:
    """A copy of a spread student that waits for its collectives in another way."""
    twin = copy.deepcopy(student)
    for layer in regions(twin):
        parallel = layer.fxskip_parallel
        assert parallel is not None
        layer.fxskip_parallel = replace(parallel, mode=mode, defers=parallel.defers and mode != "reference")
    return twin


def regions(student: nn.Module) -> list[Region]:
    return [module for module in student.modules() if isinstance(module, Region)]


def deferring(student: nn.Module) -> list[int]:
    """The layers whose last exchange arrives in the next."""
    return [r.fxskip_layer for r in regions(student) if r.fxskip_parallel and r.fxskip_parallel.defers]


def gradients(module: nn.Module) -> dict[str, Tensor]:
    """Copies, by the names that the bare model has."""
    return {
        name.removeprefix("module."): p.grad.detach().clone()
        for name, p in module.named_parameters()
        if p.grad is not None
    }


def step(student: nn.Module, inputs: Batch, **arguments: Any) -> Outcome:
    """Forward and backward, in which unfinished buffers hold NaN; nothing stays in flight."""
    student.zero_grad(set_to_none=True)
    torch.manual_seed(11)
    with poisoned_buffers():
        out = student(**inputs, **arguments)
        out.loss.backward()
    assert under_way() == []
    found = Outcome(out.logits.detach().clone(), gradients(student))
    student.zero_grad(set_to_none=True)
    return found


def assert_all_modes_agree(student: nn.Module, inputs: Batch, **arguments: Any) -> Outcome:
    """To the last bit; returns what they give."""
    found = step(in_mode(student, "reference"), inputs, **arguments)
    assert not any(bool(own(g).isnan().any()) for g in found.gradients.values())
    for mode in MODES[1:]:
        assert_same_bits(step(in_mode(student, mode), inputs, **arguments), found)
    return found


def assert_one_process_gives_the_same(
    found: Outcome, alone: nn.Module, inputs: Batch, **arguments: Any
) -> None:
    """The logits of this rank's batch, and the sum of both ranks' gradients, to the rounding of float64."""
    want = step(alone, inputs, **arguments)
    assert difference(found.logits, want.logits) < ROUNDING
    assert found.gradients.keys() == want.gradients.keys()
    for name, gradient in found.gradients.items():
        total, expected = whole(gradient), want.gradients[name]
        if total is gradient:  # each rank has its own batch's
            dist.all_reduce(total)
        dist.all_reduce(expected)
        assert difference(total, expected) < ROUNDING, name


def own_batch(rank: int, rows: int = 2, columns: int = 9, **options: Any) -> Batch:
    """A batch that no other rank has."""
    return on_device(batch(rows, columns, seed=100 * columns + 10 * rows + rank, **options))
