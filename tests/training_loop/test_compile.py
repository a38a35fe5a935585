"""torch.compile around a student: what lies between the layers is compiled, the layers run rewired."""

from collections.abc import Iterator

import pytest
import torch
from transformers import PreTrainedModel

import fxskip
from fxskip.runtime import capture_count
from tests.transform.compare import assert_same_logits, assert_same_training, logits
from tests.transform.wirings import FARSKIP
from tests.zoo import batch, tiny


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """Dynamo reuses, for fullgraph=True, what it compiled without."""
    torch._dynamo.reset()
    yield


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny("mixtral", layers=2)


@pytest.mark.slow
def test_a_compiled_student_trains(model: PreTrainedModel) -> None:
    """The backend `eager` compiles without changing a bit, so a difference would be a region that ran another way."""
    student, reference = fxskip.transform(model, FARSKIP.spec), FARSKIP.reference(model)
    compiled = torch.compile(student, backend="eager")
    before = capture_count()

    torch.manual_seed(0)
    compiled(**batch()).loss.backward()
    reference(**batch()).loss.backward()
    for (name, got), want in zip(student.named_parameters(), reference.parameters(), strict=True):
        assert torch.equal(got.grad, want.grad), name

    assert capture_count() - before == 2, "two kinds of layer, each captured by fxskip"
    assert fxskip.is_transformed(compiled)
    assert str(fxskip.explain(compiled)) == str(fxskip.plan(model, FARSKIP.spec))
    assert_same_training(student, reference, batch(padded=True))


@pytest.mark.slow
def test_a_student_compiled_by_inductor(model: PreTrainedModel) -> None:
    got = logits(torch.compile(fxskip.transform(model, FARSKIP.spec)), batch())
    want = logits(FARSKIP.reference(model), batch())
    assert float((got - want).norm() / want.norm()) < 1e-5


def test_one_graph_is_refused(model: PreTrainedModel) -> None:
    whole = torch.compile(fxskip.transform(model, FARSKIP.spec), backend="eager", fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="fxskip runs the decoder eagerly"):
        logits(whole, batch())


def test_a_compiled_model_is_not_transformed(model: PreTrainedModel) -> None:
    compiled = torch.compile(model, backend="eager")
    with pytest.raises(fxskip.CaptureError, match="transform the model first, then wrap the result"):
        fxskip.transform(compiled, FARSKIP.spec)
    assert_same_logits(model, compiled, batch())
