"""`runtime.lower` of the spec: rewired layers run by a compiler give the same numbers, to rounding."""

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

import fxskip
from fxskip.runtime import capture_count
from tests.transform.compare import Batch, logits, outcome
from tests.transform.wirings import FARSKIP
from tests.zoo import batch, tiny

ROUNDING = 1e-5
"""Norm of the difference over the norm, for fp32: a hundred times its rounding unit."""


def student(model: PreTrainedModel, lower: str) -> PreTrainedModel:
    return fxskip.transform(model, {**FARSKIP.spec, "runtime": {"lower": lower}})


def assert_close(got: torch.Tensor, want: torch.Tensor, what: str) -> None:
    error = float((got - want).norm() / want.norm())
    assert error < ROUNDING, f"{what} differ by {error:.1e} of their norm"


def assert_trains_alike(one: nn.Module, reference: nn.Module, given: Batch) -> None:
    results = []
    for model in (one, reference):
        torch.manual_seed(3)  # dropout draws the same numbers
        results.append(outcome(model, given))
    got, want = results
    assert_close(got.logits, want.logits, "logits")
    assert sorted(got.gradients) == sorted(want.gradients)
    for name, gradient in want.gradients.items():
        assert_close(got.gradients[name], gradient, f"gradients of {name}")


@pytest.mark.parametrize("lower", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_numbers_are_those_of_the_reference(lower: str) -> None:
    model = tiny("qwen2_moe", layers=2, attention_dropout=0.3).train()
    one, reference = student(model, lower), FARSKIP.reference(model)
    assert_trains_alike(one, reference, batch(padded=True))

    before = capture_count()
    assert_trains_alike(one, reference, batch(3, 14, padded=True))
    assert capture_count() == before, "another batch size was captured and compiled again"


@pytest.mark.slow
@pytest.mark.parametrize("lower", ["aot_eager", "inductor"])
def test_bfloat16_evaluation_and_recomputation(lower: str) -> None:
    """bfloat16 takes the native grouped matrix product, which the compiler has to know."""
    model = tiny("mixtral", layers=2).to(torch.bfloat16)
    reference = FARSKIP.reference(model).float()
    one = fxskip.transform(model, {**FARSKIP.spec, "runtime": {"lower": lower, "recompute": "layer"}})
    want = logits(reference, batch())
    plain = float((logits(FARSKIP.reference(model), batch()) - want).norm())
    # Hardly further from fp32 than eager bfloat16 is.
    assert float((logits(one, batch()) - want).norm()) < 1.5 * plain

    given = {**batch(), "use_cache": False}
    got, expected = (outcome(m.train(), given) for m in (one, FARSKIP.reference(model)))
    assert abs(got.loss - expected.loss) < 0.02 * expected.loss
    assert sorted(got.gradients) == sorted(expected.gradients)


def test_what_a_compiler_refuses_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(module: object, inputs: object) -> None:
        raise NotImplementedError("no kernel for this operation")

    monkeypatch.setattr(torch._dynamo, "lookup_backend", lambda name: refuses)
    one = student(tiny("mixtral", layers=2), "aot_eager")
    with pytest.raises(fxskip.PassError, match=r"aot_eager cannot compile[\s\S]*no kernel[\s\S]*lower: none"):
        one(**batch())


def test_selective_recomputation_of_compiled_layers_is_refused() -> None:
    runtime = {"lower": "inductor", "recompute": "selective"}
    with pytest.raises(fxskip.SpecError, match="write recompute: layer, or lower: none"):
        fxskip.load_spec({**FARSKIP.spec, "runtime": runtime})
