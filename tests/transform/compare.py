"""What a test of a rewired model compares: logits, loss and gradients of one batch.

Logits are always compared to the last bit. Gradients are too where both models add in the same order; where
they need not, the caller gives `gradient_tolerance`: the norm of a difference over the gradient's norm.
"""

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Outcome:
    logits: Tensor
    loss: float
    gradients: dict[str, Tensor]


def outcome(model: nn.Module, batch: Batch) -> Outcome:
    """Forward with labels and backward. A parameter that gets no gradient is absent from `gradients`."""
    model.zero_grad(set_to_none=True)
    out = model(**batch)
    out.loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return Outcome(out.logits.detach(), out.loss.item(), gradients)


def logits(model: nn.Module, batch: Batch) -> Tensor:
    with torch.no_grad():
        out: Tensor = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    return out


def cache_name(model: nn.Module) -> str:
    """transformers renamed the argument, and the field of the output, after 5.17."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def step_logits(model: nn.Module, batch: Batch, lengths: list[int]) -> list[Tensor]:
    """The logits of consecutive calls with one cache: `lengths` tokens at a time."""
    name = cache_name(model)
    state: dict[str, Any] = {}
    steps, end = [], 0
    for length in lengths:
        start, end = end, end + length
        ids, mask = batch["input_ids"][:, start:end], batch["attention_mask"][:, :end]
        with torch.no_grad():
            out = model(ids, attention_mask=mask, use_cache=True, **state)
        state = {name: out[name]}
        steps.append(out.logits)
    return steps


def assert_same_logits(student: nn.Module, reference: nn.Module, batch: Batch) -> None:
    assert_equal_tensors("logits", logits(student, batch), logits(reference, batch))


def assert_same_training(
    student: nn.Module, reference: nn.Module, batch: Batch, *, gradient_tolerance: float = 0.0
) -> None:
    got, want = outcome(student, batch), outcome(reference, batch)
    assert_equal_tensors("logits", got.logits, want.logits)
    assert got.loss == want.loss, f"loss differs: {got.loss!r} is not {want.loss!r}"
    assert_same_gradients(got.gradients, want.gradients, tolerance=gradient_tolerance)


def assert_same_gradients(got: dict[str, Tensor], want: dict[str, Tensor], *, tolerance: float = 0.0) -> None:
    assert sorted(got) == sorted(want), f"gradients differ in names: {sorted(set(got) ^ set(want))}"
    for name, gradient in want.items():
        if tolerance == 0.0:
            assert_equal_tensors(f"gradients of {name}", got[name], gradient)
            continue
        error = float((got[name] - gradient).norm() / gradient.norm())
        assert error <= tolerance, f"gradients of {name} differ by {error:.2e}, allowed is {tolerance:.0e}"


def assert_equal_tensors(what: str, got: Tensor, want: Tensor) -> None:
    assert got.shape == want.shape, f"{what} differ in shape: {tuple(got.shape)} is not {tuple(want.shape)}"
    if not torch.equal(got, want):
        gap = (got - want).abs()
        at = tuple(int(i) for i in torch.unravel_index(gap.argmax(), gap.shape))
        raise AssertionError(f"{what} differ: by up to {float(gap.max()):.3e}, at {at} of {tuple(gap.shape)}")
