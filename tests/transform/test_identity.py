"""A spec without rules: the model that comes out computes the same bits as the model that went in."""

import itertools

import pytest
import torch

import fxskip
from fxskip.runtime import capture_count
from tests.transform.compare import (
    assert_equal_tensors,
    assert_same_logits,
    assert_same_training,
    logits,
    step_logits,
)
from tests.transform.wirings import FARSKIP, spec
from tests.zoo import MODEL_TYPES, batch, tiny


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_logits_and_gradients_are_those_of_the_original(model_type: str) -> None:
    model = tiny(model_type)
    student = fxskip.transform(model, "identity")

    for shape in ((2, 9), (3, 17), (5, 31)):
        assert_same_logits(student, model, batch(*shape))
        assert_same_training(student, model, batch(*shape, padded=True))


@pytest.mark.parametrize("model_type", ["deepseek_v3", "qwen2_moe"])
def test_each_step_with_a_cache_is_that_of_the_original(model_type: str) -> None:
    model = tiny(model_type)
    student = fxskip.transform(model, spec())
    given = batch(2, 12, padded=True)

    lengths = [9, 1, 1, 1]  # a prompt, then one token at a time
    steps = zip(step_logits(student, given, lengths), step_logits(model, given, lengths), strict=True)
    for number, (got, want) in enumerate(steps):
        assert_equal_tensors(f"logits of step {number}", got, want)


def test_new_shapes_are_not_captured_again() -> None:
    """Sizes 0 and 1 are special to PyTorch: one capture more for a single row and one for a single token."""
    torch._dynamo.reset()  # captures are shared by all models of one wiring; forget those of other tests
    student = fxskip.transform(tiny("mixtral"), FARSKIP.spec)
    counts = [capture_count()]
    for shapes in (((2, 9),), ((3, 17), (5, 31), (2, 64)), ((1, 9), (2, 1)), ((1, 13), (7, 1))):
        for shape in shapes:
            logits(student, batch(*shape))
        counts.append(capture_count())

    first, others, special, more_special = (after - before for before, after in itertools.pairwise(counts))
    assert first > 0
    assert others == 0
    assert special <= 2 * first
    assert more_special == 0


def test_a_student_says_what_it_is() -> None:
    model = tiny("mixtral")
    student = fxskip.transform(model, FARSKIP.spec)

    assert fxskip.is_transformed(student)
    assert not fxskip.is_transformed(model)
    assert fxskip.spec_of(student) == fxskip.load_spec(FARSKIP.spec)
    assert isinstance(student, type(model))
    reads = {(block.layer, block.kind): block.without for block in fxskip.explain(student).blocks}
    assert sorted(reads) == [(layer, kind) for layer in range(3) for kind in ("attention", "moe")]
