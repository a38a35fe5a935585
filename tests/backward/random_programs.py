"""Seeded random programs for the scheduled backward, and plain autograd on them."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fxskip.backward.program import Program, Step

N = 4
"""All tensors are [N, N]: any step can read any value."""

Body = Callable[[Sequence[Tensor], Tensor, int], list[Any]]
"""From at least one [N, N] tensor, a permutation of N rows and a number to results; the first is an [N, N] tensor."""


def products(values: Sequence[Tensor], rows: Tensor, number: int) -> list[Any]:
    out = values[0]
    for value in values[1:]:
        out = torch.tanh(out @ value) + value  # each value is used twice
    return [out * out.sin()]


def several(values: Sequence[Tensor], rows: Tensor, number: int) -> list[Any]:
    total = values[0] * number
    for value in values:
        total = total + value.cos()
    return [total, total.relu(), [number, N], values[0].sum()]


def views(values: Sequence[Tensor], rows: Tensor, number: int) -> list[Any]:
    return [values[0].t(), values[-1].reshape(-1)[:number], torch.cat(list(values)).view(-1, N)[:N]]


def in_place(values: Sequence[Tensor], rows: Tensor, number: int) -> list[Any]:
    out = values[0] * 1.5
    out.add_(values[-1])
    out[0].mul_(2)
    buffer = torch.zeros_like(out)
    buffer[rows] = out
    return [buffer.add_(out)]


def indices(values: Sequence[Tensor], rows: Tensor, number: int) -> list[Any]:
    top = values[0].topk(2, dim=-1)
    return [values[-1].gather(0, top.indices.argsort(-1).repeat(1, 2)) + top.values.mean(), top.indices, None]


def no_gradient(values: Sequence[Tensor], rows: Tensor, number: int) -> list[Any]:
    return [values[0].detach() * number, values[-1][rows]]


def returned_as_they_are(values: Sequence[Tensor], rows: Tensor, number: int) -> list[Any]:
    both = values[0] + values[-1]
    return [both, values[0], both, values[-1].to(values[-1].dtype)]


class Scaled(torch.autograd.Function):
    """A custom function with two inputs and two results."""

    @staticmethod
    def forward(ctx: Any, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(left, right)
        return left * right, left + 0.5 * right

    @staticmethod
    def backward(ctx: Any, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
        left, right = ctx.saved_tensors
        return first * right + second, first * left + 0.5 * second


def custom(values: Sequence[Tensor], rows: Tensor, number: int) -> list[Any]:
    first, second = Scaled.apply(values[0], values[-1])  # perhaps the same tensor twice
    return [first, second]


BODIES: tuple[Body, ...] = (
    products,
    several,
    views,
    in_place,
    indices,
    no_gradient,
    returned_as_they_are,
    custom,
)


@dataclass(frozen=True)
class Case:
    """A program, makers of its inputs, and orders for it."""

    program: Program
    inputs: dict[str, Any]
    forward: tuple[str, ...]
    backward: tuple[str, ...]


def random_case(seed: int, steps: int = 9) -> Case:
    """Values and parameters that many steps read, frozen ones, inputs without gradient, unused results."""
    draw = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)

    def tensor(gradient: bool) -> Tensor:
        return torch.randn(N, N, generator=generator).requires_grad_(gradient)

    inputs: dict[str, Any] = {f"x{i}": tensor(draw.random() < 0.7) for i in range(2)}
    inputs |= {f"w{i}": torch.nn.Parameter(tensor(False), draw.random() < 0.85) for i in range(4)}
    inputs["tied"] = inputs["w0"]
    inputs["rows"], inputs["number"] = torch.randperm(N, generator=generator), draw.randint(1, 3)

    square = [name for name, value in inputs.items() if name not in ("rows", "number")]
    made: list[str] = []
    program = []
    for index in range(steps):
        body = draw.choice(BODIES)
        recent = made[-3:] if draw.random() < 0.6 else made
        read = [draw.choice(recent or square), *draw.choices(square + made, k=draw.randint(0, 3))]
        sample = body([torch.rand(N, N) for _ in read], inputs["rows"], inputs["number"])
        outputs = tuple(f"s{index}.{i}" for i in range(len(sample)))
        program.append(Step(f"step{index}", step_of(body), (*read, "rows", "number"), outputs))
        made += [
            name
            for name, value in zip(outputs, sample, strict=True)
            if isinstance(value, Tensor) and value.shape == (N, N) and value.is_floating_point()
        ]
    every = [name for step in program for name in step.outputs]
    returned = tuple(dict.fromkeys([*draw.sample(every, k=3), made[-1], "x0"]))
    whole = Program(tuple(program), tuple(inputs), returned)
    return Case(whole, inputs, random_forward(whole, draw), random_backward(whole, draw))


def step_of(body: Body) -> Callable[..., tuple[Any, ...]]:
    def function(*arguments: Any) -> tuple[Any, ...]:
        *values, rows, number = arguments
        return tuple(body(values, rows, number))

    return function


def random_forward(program: Program, draw: random.Random) -> tuple[str, ...]:
    return _random_order({name: set(needs) for name, needs in program.dependencies().items()}, draw)


def random_backward(program: Program, draw: random.Random, split: Collection[str] = ()) -> tuple[str, ...]:
    """`split` are steps whose weight gradients come at some time after the others."""
    event = {step.name: f"{step.name}.dgrad" if step.name in split else step.name for step in program.steps}
    before: dict[str, set[str]] = {event[name]: set() for name in event}
    maker = {value: step.name for step in program.steps for value in step.outputs}
    for step in program.steps:
        for value in step.inputs:
            if value in maker:
                before[event[maker[value]]].add(event[step.name])
    return _random_order(before | {f"{name}.wgrad": {f"{name}.dgrad"} for name in split}, draw)


def _random_order(before: Mapping[str, set[str]], draw: random.Random) -> tuple[str, ...]:
    order: list[str] = []
    while len(order) < len(before):
        ready = [name for name, needs in before.items() if name not in order and needs <= set(order)]
        order.append(draw.choice(ready))
    return tuple(order)


def plain(program: Program, inputs: Sequence[Any]) -> tuple[Any, ...]:
    """The program, one step after the other, under plain autograd."""
    values = dict(zip(program.inputs, inputs, strict=True))
    for step in program.steps:
        results = step.function(*(values[name] for name in step.inputs))
        values.update(zip(step.outputs, results, strict=True))
    return tuple(values[name] for name in program.outputs)


def copies(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Leaves with the same values and no gradients; what is one object stays one."""
    made: dict[int, Any] = {}
    for value in inputs.values():
        if isinstance(value, Tensor):
            made.setdefault(id(value), value.detach().clone().requires_grad_(value.requires_grad))
    return {name: made.get(id(value), value) for name, value in inputs.items()}


def loss_of(outputs: Sequence[Any]) -> Tensor | None:
    """A number that depends on each output with a gradient, with another weight for each entry."""
    parts = [
        (out * torch.linspace(0.3, 1.7, out.numel()).view(out.shape)).sum()
        for out in outputs
        if isinstance(out, Tensor) and out.requires_grad
    ]
    return sum(parts[1:], parts[0]) if parts else None
