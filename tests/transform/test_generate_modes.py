"""Ways of generating: the student does what the hand-written model does in the same call."""

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import CompileConfig, DynamicCache, PreTrainedModel

import fxskip
from fxskip.runtime import capture_count
from tests.transform.compare import assert_equal_tensors, cache_name
from tests.transform.wirings import FARSKIP
from tests.zoo import MODEL_TYPES, batch, tiny


class Models:
    """The original, the student and the hand-written model, with the same weights."""

    def __init__(self, model_type: str) -> None:
        self.original = tiny(model_type)
        self.student: PreTrainedModel = fxskip.transform(self.original, FARSKIP.spec)
        self.reference = FARSKIP.reference(self.original)


@pytest.fixture(scope="module")
def models() -> Models:
    return Models("mixtral")


def generate(model: PreTrainedModel, *, rows: int = 2, columns: int = 9, **options: Any) -> Any:
    given = batch(rows, columns, padded=options.pop("padded", True))
    torch.manual_seed(0)
    return model.generate(
        input_ids=given["input_ids"],
        attention_mask=given["attention_mask"],
        **{"max_new_tokens": 8, "do_sample": False} | options,
    )


MODES: dict[str, dict[str, Any]] = {
    "beams": {"num_beams": 3},
    "beams, several a row": {"num_beams": 4, "num_return_sequences": 2, "length_penalty": 0.5},
    "sampling": {"do_sample": True, "temperature": 0.8, "top_k": 20, "top_p": 0.9},
    "sampling beams": {"do_sample": True, "num_beams": 2},
    "several samples": {"do_sample": True, "num_return_sequences": 3},
    "without padding": {"padded": False},
    "one row": {"rows": 1, "padded": False},
    "prompt of one token": {"columns": 1, "padded": False},
    "prompt lookup": {"rows": 1, "padded": False, "prompt_lookup_num_tokens": 3},
    "processors": {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2, "min_new_tokens": 4},
}


OTHER_CAPTURES = ("one row", "prompt of one token")


@pytest.mark.parametrize(
    "mode", [pytest.param(m, marks=pytest.mark.slow if m in OTHER_CAPTURES else []) for m in MODES]
)
def test_the_same_tokens(models: Models, mode: str) -> None:
    got, want, original = (
        generate(one, **MODES[mode]) for one in (models.student, models.reference, models.original)
    )
    assert torch.equal(got, want)
    assert not torch.equal(got, original)


def test_the_same_scores(models: Models) -> None:
    options = {"output_scores": True, "output_logits": True, "return_dict_in_generate": True}
    for more in ({}, {"num_beams": 2}):
        got, want = (generate(one, **options, **more) for one in (models.student, models.reference))
        for what in ("scores", "logits"):
            for number, (one, other) in enumerate(zip(got[what], want[what], strict=True)):
                assert_equal_tensors(f"{what} of step {number}", one, other)


@pytest.mark.slow
def test_assisted_by_the_original(models: Models) -> None:
    """The original proposes several tokens, the student judges them at once and takes back what it rejects."""
    options: dict[str, Any] = {"rows": 1, "padded": False, "assistant_model": models.original}
    got, want = (generate(one, **options) for one in (models.student, models.reference))
    assert torch.equal(got, want)
    assert not torch.equal(got, generate(models.original, rows=1, padded=False))


@pytest.mark.slow
def test_a_student_assists_the_original(models: Models) -> None:
    got = generate(models.original, rows=1, padded=False, assistant_model=models.student)
    assert torch.equal(got, generate(models.original, rows=1, padded=False))


def test_continuing_and_cropping(models: Models) -> None:
    """A turn, another with the same cache, then the last tokens taken back and another ending."""

    def conversation(model: PreTrainedModel) -> list[Tensor]:
        cache = DynamicCache(config=model.config)
        state = {cache_name(model): cache, "max_new_tokens": 4, "do_sample": False}
        first = model.generate(batch(1, 7)["input_ids"], **state)
        second = model.generate(torch.cat([first, batch(1, 5, seed=1)["input_ids"]], dim=1), **state)
        cache.crop(-6)
        kept = second[:, : cache.get_seq_length()]
        third = model.generate(torch.cat([kept, batch(1, 3, seed=2)["input_ids"]], dim=1), **state)
        return [first, second, third]

    for got, want in zip(conversation(models.student), conversation(models.reference), strict=True):
        assert torch.equal(got, want)


def test_another_batch_another_length_and_inference_mode(models: Models) -> None:
    """Batch and length change between calls without a new capture; gradients off in either way give the same."""
    for _ in range(2):
        captured = capture_count()
        for rows, columns in ((2, 9), (4, 12), (3, 7)):
            with torch.inference_mode():
                got = generate(models.student, rows=rows, columns=columns)
            assert torch.equal(got, generate(models.reference, rows=rows, columns=columns))
    assert capture_count() == captured


def test_transformers_does_not_compile_a_student(models: Models) -> None:
    """With a static cache on a GPU, generate compiles a model by itself; a student it must leave as it is."""
    compile_config = CompileConfig(backend="must not be asked for", mode=None)
    compile_config._compile_all_devices = True
    options = {"cache_implementation": "static"}
    with pytest.warns(UserWarning, match=r"compile_config has no effect"):
        got = generate(models.student, **options, compile_config=compile_config)
    assert torch.equal(got, generate(models.reference, **options))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        generate(models.student, **options)


@pytest.mark.slow
@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_against_a_loop_without_a_cache(model_type: str) -> None:
    """Greedy by hand: the hand-written model computes everything again for each new token.

    Other shapes are other orders of additions, so the logits are equal up to rounding only.
    """
    models = Models(model_type)
    got = generate(
        models.student, padded=False, output_logits=True, return_dict_in_generate=True, max_new_tokens=6
    )
    ids = batch(2, 9)["input_ids"]
    for step in got.logits:
        with torch.no_grad():
            logits = models.reference(ids, use_cache=False).logits[:, -1]
        torch.testing.assert_close(step, logits, rtol=1e-4, atol=1e-4)
        ids = torch.cat([ids, logits.argmax(dim=-1, keepdim=True)], dim=1)
    assert torch.equal(got.sequences, ids)
