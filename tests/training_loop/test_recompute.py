"""`runtime.recompute` of the spec: fewer kept values, and the same numbers, dropout included."""

import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache, PreTrainedModel

import fxskip
from tests.transform.compare import assert_equal_tensors, assert_same_gradients, outcome
from tests.transform.test_training import saved_bytes
from tests.transform.wirings import FARSKIP
from tests.zoo import batch, tiny

pytestmark = [
    # The loops below leave use_cache at its default, as most do.
    pytest.mark.filterwarnings("ignore:fxskip. runtime.recompute keeps no key-value cache:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.* is deprecated:FutureWarning"),
]


def student(model: PreTrainedModel, **runtime: str) -> PreTrainedModel:
    return fxskip.transform(model, {**FARSKIP.spec, "runtime": runtime})


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny("qwen2_moe", layers=2, attention_dropout=0.3).train()


def seeded(model: nn.Module, **arguments: Any) -> Any:
    torch.manual_seed(5)
    return outcome(model, {**batch(3, 17), **arguments})


@pytest.mark.parametrize("recompute", ["layer", "selective"])
def test_numbers_are_those_of_the_reference(model: PreTrainedModel, recompute: str) -> None:
    got, want = seeded(student(model, recompute=recompute)), seeded(FARSKIP.reference(model))
    assert_equal_tensors("logits", got.logits, want.logits)
    assert_same_gradients(got.gradients, want.gradients)


def test_a_layer_keeps_its_inputs_alone(model: PreTrainedModel) -> None:
    assert saved_bytes(student(model, recompute="layer")) < saved_bytes(student(model)) / 4


class MatrixProducts(TorchDispatchMode):
    """Counts the matrix products that are computed, below what a selective checkpoint takes from its store."""

    NAMES = ("mm", "bmm", "addmm", "_grouped_mm")

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func._opname in self.NAMES
        return func(*args, **(kwargs or {}))


def matrix_products(model: nn.Module) -> int:
    outcome(model, batch())  # captured now, or the capture's would count
    with MatrixProducts() as seen:
        outcome(model, batch())
    return seen.count


@pytest.mark.slow
def test_selective_computes_no_matrix_product_again(model: PreTrainedModel) -> None:
    counts = {how: matrix_products(student(model, recompute=how)) for how in ("none", "layer", "selective")}
    assert 0 < counts["none"] == counts["selective"] < counts["layer"]


@pytest.mark.slow
def test_the_auxiliary_loss_of_the_router() -> None:
    model = tiny("mixtral", layers=2, output_router_logits=True, router_aux_loss_coef=0.1).train()
    got, want = seeded(student(model, recompute="layer")), seeded(FARSKIP.reference(model))
    assert got.loss == want.loss
    assert_same_gradients(got.gradients, want.gradients)


def test_both_switches_are_refused(model: PreTrainedModel) -> None:
    twice = student(model, recompute="layer")
    twice.gradient_checkpointing_enable({"use_reentrant": False})
    with pytest.raises(fxskip.PassError, match=r"recompute: layer[\s\S]*gradient_checkpointing_disable"):
        twice(**batch())
    twice.gradient_checkpointing_disable()
    twice(**batch())


def test_a_cache_in_training(model: PreTrainedModel) -> None:
    one = student(model, recompute="layer")
    ids = batch()["input_ids"]
    with pytest.warns(UserWarning, match="keeps no key-value cache"):
        one(ids)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        one(ids, use_cache=False)

    with torch.no_grad():
        cache = one(ids, past_key_values=DynamicCache()).past_key_values
    assert cache.get_seq_length() == ids.shape[1]
    with pytest.raises(fxskip.PassError, match="continues a key-value cache"):
        one(ids, past_key_values=cache)


@pytest.mark.slow
def test_a_saved_student_recomputes_too(model: PreTrainedModel, tmp_path: Any) -> None:
    student(model, recompute="layer").save_pretrained(tmp_path)
    loaded = type(student(model)).from_pretrained(tmp_path).train()
    assert fxskip.spec_of(loaded).runtime.recompute == "layer"
    assert saved_bytes(loaded) < saved_bytes(student(model)) / 4
