"""The cases of the error table: options, and students that are far from, near to and equal to their teacher, peaked and
flat."""

# N tokens, D width, V vocabulary, K entries of a teacher row

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fxskip.bench.loss_formulas import Outcome, online_outcome, sparse_outcome
from fxskip.bench.loss_inputs import Setting
from fxskip.loss import hidden_kl, sparse_kl
from fxskip.loss.implementation import Implementation
from fxskip.loss.tails import TAILS

CHUNK_TOKENS = 384
BETAS = (0.0, 0.5, 1.0)


@dataclass(frozen=True)
class Case:
    """A call of `loss(*leaves, *teacher, **options)`, by kernels or plain PyTorch, and its float64 formula.

    `leaves` are hidden, weight and perhaps bias, which is the option `bias_name`. The kernels round their logits to
    `rounded_to`; None: float32, as in plain PyTorch.
    """

    name: str
    loss: Callable[..., Tensor]
    formula: Callable[..., Outcome]
    leaves: list[Tensor]
    teacher: tuple[Tensor, Tensor]
    options: dict[str, Any]
    bias_name: str
    rounded_to: torch.dtype | None

    def results(self, implementation: Implementation) -> list[Tensor]:
        """The loss, then its gradients by the leaves."""
        hidden, weight, *bias = self.leaves
        options = self.options | ({self.bias_name: bias[0]} if bias else {})
        if implementation == "triton" and self.rounded_to is None:
            options["logits_dtype"] = torch.float32
        loss = self.loss(
            hidden,
            weight,
            *self.teacher,
            chunk_tokens=CHUNK_TOKENS,
            implementation=implementation,
            **options,
        )
        return [loss.detach(), *torch.autograd.grad(loss, self.leaves)]

    def right(self, rounded_to: torch.dtype | None) -> Outcome:
        if self.loss is sparse_kl:
            return self.formula(self.leaves, *self.teacher, rounded_to=rounded_to, **self.options)
        return self.formula(self.leaves, self.teacher, rounded_to=rounded_to, **self.options)


@dataclass(frozen=True)
class Student:
    """States and head in bfloat16, float32 numbers to draw teachers and options from."""

    hidden: Tensor
    weight: Tensor

    def leaves(self, factor: float = 1.0, dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
        """`factor` makes its distributions peaked or flat."""
        return [x.to(dtype).requires_grad_() for x in (factor * self.hidden, self.weight)]


# Factors of a student whose logits have a standard deviation of 2 at a width of 256.
PEAKED, FLAT = 8.0, 0.01


def cases(setting: Setting) -> Iterator[Case]:
    torch.manual_seed(0)
    width = min(setting.width, 256)
    hidden = torch.randn(setting.of(1000), width, device=setting.device)
    student = Student(hidden, torch.randn(setting.of(5003), width, device=setting.device) / 8)
    yield from sparse_cases(setting, student)
    yield from online_cases(student)


def sparse_cases(setting: Setting, student: Student) -> Iterator[Case]:
    tokens, vocabulary, entries = len(student.hidden), len(student.weight), setting.entries
    device = setting.device
    ids = torch.rand(tokens, vocabulary, device=device).topk(entries).indices
    far = ids, (2 * torch.randn(tokens, entries, device=device)).log_softmax(dim=-1) - 0.1
    doubled = ids.clone()
    doubled[:, 1::2] = doubled[:, ::2][:, : doubled[:, 1::2].shape[1]]
    bias = torch.randn(vocabulary, device=device).requires_grad_()
    every = options_of(tokens, device) | {"counts": torch.randint(0, entries + 1, (tokens,), device=device)}
    low = student.leaves()
    own = own_distribution(low)
    equal = own.topk(entries)
    near = (own + 0.01 * torch.randn_like(own)).log_softmax(dim=-1).topk(entries)

    def case(
        name: str,
        leaves: list[Tensor],
        teacher: tuple[Tensor, Tensor],
        rounded_to: torch.dtype | None = torch.bfloat16,
        **options: Any,
    ) -> Case:
        return Case(name, sparse_kl, sparse_outcome, leaves, teacher, options, "bias", rounded_to)

    for tail in TAILS:
        yield case(f"{tail}, far", low, far, tail=tail)
        yield case(f"{tail}, all options", [*low, bias], far, tail=tail, **every)
        yield case(f"{tail}, equal ids", low, (doubled, far[1]), tail=tail)
        yield case(f"{tail}, peaked", student.leaves(PEAKED), far, tail=tail)
        yield case(f"{tail}, flat", student.leaves(FLAT), far, tail=tail)
        for name, top in (("near", near), ("equal", equal)):
            teacher = top.indices, top.values.float()
            yield case(f"{tail}, {name}", low, teacher, tail=tail)
            yield case(f"{tail}, {name}, float32 logits", low, teacher, None, tail=tail)
    yield case("truncated, float32", student.leaves(dtype=torch.float32), far, None)


def online_cases(student: Student) -> Iterator[Case]:
    low = student.leaves()
    device = str(student.hidden.device)
    other = torch.randn_like(student.hidden).bfloat16()
    head = low[1].detach()
    close = (student.hidden + 0.01 * torch.randn_like(student.hidden)).bfloat16()
    biases = [torch.randn(len(head), device=device) for _ in range(2)]
    every = options_of(len(other), device) | {"teacher_bias": biases[1]}

    def case(
        name: str,
        leaves: list[Tensor],
        teacher: Tensor,
        rounded_to: torch.dtype | None = torch.bfloat16,
        **options: Any,
    ) -> Case:
        called = f"hidden_kl, beta {options['beta']:g}, {name}"
        return Case(
            called, hidden_kl, online_outcome, leaves, (teacher, head), options, "student_bias", rounded_to
        )

    for beta in BETAS:
        yield case("far", low, other, beta=beta)
        yield case("all options", [*low, biases[0].requires_grad_()], other, beta=beta, **every)
        yield case("peaked", student.leaves(PEAKED), other, beta=beta)
        yield case("flat", student.leaves(FLAT), other, beta=beta)
        for name, teacher in (("near", close), ("equal", low[0].detach())):
            yield case(name, low, teacher, beta=beta)
            yield case(f"{name}, float32 logits", low, teacher, None, beta=beta)


def options_of(tokens: int, device: str) -> dict[str, Any]:
    """What both losses have, half of the tokens masked."""
    weights = torch.rand(tokens, device=device)
    weights = weights.where(torch.rand(tokens, device=device) > 0.5, 0.0)
    weights[0] = 1.0  # of few tokens all could be masked
    return {"scale": 0.7, "softcap": 20.0, "temperature": 1.5, "token_weight": weights}


def own_distribution(leaves: list[Tensor]) -> Tensor:
    """[N, V] log-probabilities of the student, in float64."""
    hidden, weight = (leaf.detach().double() for leaf in leaves)
    return (hidden @ weight.T).log_softmax(dim=-1)
