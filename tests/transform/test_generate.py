"""generate(): the tokens are those of the hand-written model."""

from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import fxskip
from fxskip.runtime import capture_count
from tests.transform.compare import assert_equal_tensors, step_logits
from tests.transform.wirings import FARSKIP, WIRINGS
from tests.zoo import batch, tiny


def tokens(
    model: PreTrainedModel, rows: int, columns: int, *, padded: bool = False, **options: Any
) -> torch.Tensor:
    given = batch(rows, columns, padded=padded)
    out = model.generate(
        input_ids=given["input_ids"],
        attention_mask=given["attention_mask"],
        max_new_tokens=8,
        do_sample=False,
        **options,
    )
    assert isinstance(out, torch.Tensor)
    assert out.shape == (rows, columns + 8)
    return out


@pytest.mark.parametrize("model_type", ["deepseek_v3", "qwen2_moe", "llama4_text"])
def test_with_a_dynamic_cache(model_type: str) -> None:
    model = tiny(model_type)
    student, reference = fxskip.transform(model, FARSKIP.spec), FARSKIP.reference(model)

    got = tokens(student, 3, 11, padded=True)
    assert torch.equal(got, tokens(reference, 3, 11, padded=True))
    # The original goes elsewhere, so equal tokens are no accident of a model that repeats itself.
    assert not torch.equal(got, tokens(model, 3, 11, padded=True))


def test_logits_of_each_step_are_equal_too() -> None:
    model = tiny("deepseek_v3")
    student, reference = fxskip.transform(model, FARSKIP.spec), FARSKIP.reference(model)
    given = batch(2, 12, padded=True)
    lengths = [8, 1, 1, 2]  # the last call continues with two tokens at once

    steps = zip(step_logits(student, given, lengths), step_logits(reference, given, lengths), strict=True)
    for number, (got, want) in enumerate(steps):
        assert_equal_tensors(f"logits of step {number}", got, want)


@pytest.mark.parametrize("model_type", ["qwen3_moe", pytest.param("deepseek_v3", marks=pytest.mark.slow)])
def test_with_a_static_cache(model_type: str) -> None:
    model = tiny(model_type)
    student, reference = fxskip.transform(model, FARSKIP.spec), FARSKIP.reference(model)

    for padded in (False, True):
        got = tokens(student, 2, 9, padded=padded, cache_implementation="static")
        assert torch.equal(got, tokens(reference, 2, 9, padded=padded, cache_implementation="static"))


def test_without_a_cache() -> None:
    model = tiny("mixtral")
    student, reference = fxskip.transform(model, FARSKIP.spec), FARSKIP.reference(model)

    assert torch.equal(tokens(student, 2, 9, use_cache=False), tokens(reference, 2, 9))


def test_streams_that_cross_several_layers() -> None:
    model, wiring = tiny("mixtral", layers=4), WIRINGS["far_back"]
    student, reference = fxskip.transform(model, wiring.spec), wiring.reference(model)

    assert torch.equal(tokens(student, 2, 9), tokens(reference, 2, 9))


def test_another_batch_is_not_captured_again() -> None:
    model = tiny("mixtral", layers=2)
    student, reference = fxskip.transform(model, FARSKIP.spec), FARSKIP.reference(model)
    assert torch.equal(tokens(student, 2, 9, padded=True), tokens(reference, 2, 9, padded=True))
    captured = capture_count()

    for rows, columns in ((4, 12), (3, 7)):
        got = tokens(student, rows, columns, padded=True)
        assert torch.equal(got, tokens(reference, rows, columns, padded=True))
    assert capture_count() == captured


def test_captures_do_not_grow_with_the_number_of_layers() -> None:
    """A cache is indexed by layer; a capture with the index baked in would be made again for each layer."""
    counts = []
    for layers in (4, 10):
        model = tiny("mixtral", layers=layers)
        student, reference = fxskip.transform(model, FARSKIP.spec), FARSKIP.reference(model)
        before = capture_count()
        assert torch.equal(tokens(student, 2, 9), tokens(reference, 2, 9))
        counts.append(capture_count() - before)
    # The first, the inner and the last layer are wired differently; all inner ones are alike.
    assert counts[1] <= counts[0], f"{counts[0]} captures for 4 layers, {counts[1]} for 10"
