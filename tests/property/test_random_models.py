"""Random Mixture-of-Experts transformers under random specs: what `transform` makes of them is what the formula says.

One case again, with what is left of it when everything that does not matter is taken away:

    pytest "tests/property/test_random_models.py::test_a_random_model[17]"
"""

import random
import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxskip
from tests.property.designs import VOCAB, Design, build, logits, random_design, simpler
from tests.property.formula import evaluate
from tests.property.rules import Refusal, Rewired, architecture_refusal, predict, random_spec

QUICK, MANY = 40, 340
SHRINK_SECONDS = 120
GRADIENT_TOLERANCE = {"float32": 2e-5, "bfloat16": 5e-2}
"""Norm of the difference over the norm of the gradient. Where three readers or more share a value, autograd adds their
gradients in the order in which the reads were recorded, which is not the formula's."""

Spec = dict[str, Any]
IDS = torch.randint(0, VOCAB, (2, 5), generator=torch.Generator().manual_seed(0))
WEIGHTS = torch.randn(2, 5, VOCAB, generator=torch.Generator().manual_seed(1))


def case(seed: int) -> tuple[Design, Spec]:
    draw = random.Random(seed)
    design = random_design(draw, max_layers=2 if seed < QUICK else 5)
    if architecture_refusal(design) is not None:
        return design, {"fxskip": 1, "preset": "farskip"}
    return design, random_spec(design, draw, refused=draw.random() < 0.15)


@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=[pytest.mark.slow] if seed >= QUICK else []) for seed in range(MANY)]
)
def test_a_random_model(seed: int) -> None:
    design, spec = case(seed)
    fault = fault_of(design, spec, seed)
    if fault:
        smaller, left, fault = shrunk(design, spec, seed, fault)
        pytest.fail(
            f"seed {seed}\n  design  {smaller.describe()}\n  layers  {smaller.layers}\n  spec    {left}\n  {fault}"
        )


def fault_of(design: Design, spec: Spec, seed: int) -> str:
    """What is wrong with the rewired model of a design; "" where it does what the formula says."""
    expected = predict(design, spec)
    model = build(design, seed)
    inputs = (IDS,) if design.wrapper == "plain" else None
    try:
        student = fxskip.transform(model, spec, example_inputs=inputs)
    except fxskip.FxskipError as error:
        return refusal_fault(error, expected)
    except Exception as error:
        return f"transform raises {type(error).__name__}: {str(error)[:1000]}"
    if isinstance(expected, Refusal):
        return f"transform accepts it, and {expected} was expected"
    try:
        return difference(model, student, design, expected)
    except Exception as error:
        return f"the student raises {type(error).__name__}: {str(error)[:1500]}"


def refusal_fault(error: fxskip.FxskipError, expected: Refusal | Rewired) -> str:
    if (
        isinstance(expected, Refusal)
        and type(error).__name__ == expected.kind
        and expected.words in str(error)
    ):
        return "" if "\n  hint   " in str(error) else f"the refusal has no hint: {error}"
    return f"transform raises {type(error).__name__}: {error}, and {expected} was expected"


def difference(model: nn.Module, student: nn.Module, design: Design, expected: Rewired) -> str:
    """How the student differs from the formula, in outputs (to the last bit) and gradients; "" where it does not."""
    with torch.no_grad():
        original = logits(model, IDS)
    reference = evaluate(model, design, expected.reads, IDS, split=expected.split)
    found = logits(student, IDS)
    if not torch.equal(found, reference):
        return f"the outputs differ by {distance(found, reference):.1e}"
    if expected.reads and torch.equal(found, original):
        return "the student computes what the original computes"
    is_exact = not expected.reads and not expected.split and design.stream == "new"
    if is_exact:  # x += y leaves nothing to differentiate in the original
        reference = logits(model, IDS)
    ours, theirs = gradients(student, found), gradients(model, reference)
    if ours.keys() != theirs.keys():
        return f"gradients of {sorted(ours.keys() ^ theirs.keys())} are missing"
    allowed = 0.0 if is_exact else GRADIENT_TOLERANCE[design.dtype]
    far = {name: distance(ours[name], theirs[name]) for name in ours}
    worst = max(far, key=lambda name: far[name])
    return f"the gradient of {worst} is off by {far[worst]:.1e}" if far[worst] > allowed else ""


def gradients(model: nn.Module, out: Tensor) -> dict[str, Tensor]:
    names, parameters = zip(*model.named_parameters(), strict=True)
    loss = (out.float() * WEIGHTS).sum()
    found = torch.autograd.grad(loss, parameters, allow_unused=True)
    return {name: g for name, g in zip(names, found, strict=True) if g is not None}


def distance(one: Tensor, other: Tensor) -> float:
    """Norm of the difference over the norm of `other`; 0 only for equal values."""
    if torch.equal(one, other):
        return 0.0
    norm = other.double().norm().item()
    return (one.double() - other.double()).norm().item() / (norm or 1.0)


def shrunk(design: Design, spec: Spec, seed: int, fault: str) -> tuple[Design, Spec, str]:
    """A simpler design and spec that still fail: each simplification is tried until none helps, or the time is over."""
    end = time.monotonic() + SHRINK_SECONDS
    tried: set[str] = set()

    def next_trial() -> tuple[Design, Spec] | None:
        trials = [(design, less) for less in lesser(spec)] + [(smaller, spec) for smaller in simpler(design)]
        return next((trial for trial in trials if repr(trial) not in tried), None)

    while time.monotonic() < end and (trial := next_trial()):
        tried.add(repr(trial))
        torch._dynamo.reset()
        if found := fault_of(*trial, seed):
            (design, spec), fault = trial, found
    return design, spec, fault


def lesser(spec: Spec) -> list[Spec]:
    """The spec with a rule less, an addend less, or a key less."""
    rules = spec.get("connect", [])
    found = [{**spec, "connect": rules[:i] + rules[i + 1 :]} for i in range(len(rules))]
    for i, rule in enumerate(rules):
        addends = rule["without"]
        fewer = [addends[:k] + addends[k + 1 :] for k in range(len(addends))]
        smaller = [{**rule, "without": left} for left in fewer if left]
        if "layers" in rule:
            smaller.append({key: value for key, value in rule.items() if key != "layers"})
        found += [{**spec, "connect": [*rules[:i], less, *rules[i + 1 :]]} for less in smaller]
    return found + [{k: v for k, v in spec.items() if k != key} for key in ("sum", "name") if key in spec]
