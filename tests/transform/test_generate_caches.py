"""Every kind of cache of transformers: the tokens and logits of each step are those of the model that is compared.

The identity spec is compared with the original to the last bit, farskip with the hand-written model.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel, QuantizedCache, StaticCache

import fxskip
from fxskip.runtime import capture_count
from fxskip.runtime.layer_cache import uses_one_part
from tests.ecosystem import architectures
from tests.transform.compare import assert_equal_tensors, cache_name
from tests.transform.wirings import FARSKIP
from tests.zoo import batch, tiny

Make = Callable[[PreTrainedModel], Any]
CACHES: dict[str, Make] = {
    "dynamic": lambda model: DynamicCache(config=model.config),
    "without_config": lambda model: DynamicCache(),
    "static": lambda model: StaticCache(config=model.config, max_cache_len=32),
    "quantised": lambda model: QuantizedCache("fp8", model.config),
}
WINDOW = 4


def generated(model: PreTrainedModel, cache: Any, *, new: int = 6, padded: bool = True) -> Any:
    given = batch(2, 9, padded=padded)
    return model.generate(
        input_ids=given["input_ids"],
        attention_mask=given["attention_mask"],
        **{cache_name(model): cache},
        max_new_tokens=new,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )


def assert_same_steps(got: Any, want: Any) -> None:
    assert torch.equal(got.sequences, want.sequences)
    for number, (one, other) in enumerate(zip(got.logits, want.logits, strict=True)):
        assert_equal_tensors(f"logits of step {number}", one, other)


# transformers has no quantised cache with a window.
KINDS = [
    (kind, window) for kind in CACHES for window in (None, WINDOW) if (kind, window) != ("quantised", WINDOW)
]
IN_MAKE_TEST = (("static", WINDOW), ("quantised", None))


@pytest.mark.parametrize(
    ("kind", "window"), [pytest.param(*k, marks=[] if k in IN_MAKE_TEST else pytest.mark.slow) for k in KINDS]
)
def test_each_kind_of_cache(kind: str, window: int | None) -> None:
    model = tiny("mixtral", sliding_window=window)
    student, reference = fxskip.transform(model, FARSKIP.spec), FARSKIP.reference(model)
    before = capture_count()
    for _ in range(2):  # a second call, with a cache of its own, has nothing new
        got = generated(student, CACHES[kind](student))
        assert_same_steps(got, generated(reference, CACHES[kind](model)))
        captured, before = capture_count() - before, capture_count()
    assert captured == 0
    assert not torch.equal(got.sequences, generated(model, CACHES[kind](model)).sequences)


@pytest.mark.slow
def test_sliding_and_full_layers_in_one_cache() -> None:
    """gpt_oss alternates; the static cache has two kinds of layers too."""
    model = architectures.tiny("gpt_oss", sliding_window=WINDOW)
    student = fxskip.transform(model, "identity")
    for make in (CACHES["dynamic"], CACHES["static"]):
        assert_same_steps(generated(student, make(student)), generated(model, make(model)))


HYBRID = ("qwen3_next", "lfm2_moe", "granitemoehybrid", "nemotron_h")
"""Recurrent and convolution states beside keys and values."""
INDEXED = ("deepseek_v32", "glm_moe_dsa")
"""An indexer with keys of its own."""


@pytest.mark.parametrize("kind", ["dynamic", pytest.param("static", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "model_type",
    [pytest.param(t, marks=[] if t == "lfm2_moe" else pytest.mark.slow) for t in HYBRID + INDEXED],
)
def test_recurrent_states_and_indexers(model_type: str, kind: str) -> None:
    model = architectures.tiny(model_type)
    student = fxskip.transform(model, "identity")
    make = CACHES[kind]
    assert_same_steps(generated(student, make(student)), generated(model, make(model)))


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["qwen3_next", "deepseek_v32", "gpt_oss", "mixtral"])
@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_captures_do_not_grow_with_depth(model_type: str, kind: str) -> None:
    counts = []
    for layers in (4, 16):
        model = architectures.tiny(model_type, **deep(model_type, layers))
        student = fxskip.transform(model, "identity")
        torch._dynamo.reset()
        before = capture_count()
        got, want = (generated(one, CACHES[kind](one)) for one in (student, model))
        assert_same_steps(got, want)
        counts.append(capture_count() - before)
    assert counts[1] == counts[0]


def deep(model_type: str, layers: int) -> dict[str, Any]:
    fields: dict[str, Any] = {"num_hidden_layers": layers}
    if model_type == "qwen3_next":
        fields["layer_types"] = ["linear_attention", "full_attention"] * (layers // 2)
    return fields


def test_a_layer_with_two_attentions_keeps_the_whole_cache() -> None:
    """Its attentions are numbered 2 l and 2 l + 1: handed one part, they would write over each other."""
    two = architectures.tiny("longcat_flash").model.layers
    assert not any(uses_one_part(layer, index) for index, layer in enumerate(two))
    one = tiny("mixtral").model.layers
    assert all(uses_one_part(layer, index) for index, layer in enumerate(one))
    assert not uses_one_part(one[1], 2)


# --- a cache that lives on the CPU ---------------------------------------------------------------


class Stream:
    """Stands for a CUDA stream on a machine without one, and notes who waits for whom."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log

    def wait_stream(self, other: "Stream") -> None:
        self.log.append(f"{self.name} waits for {other.name}")

    def __enter__(self) -> None:
        self.log.append(f"on {self.name}")

    def __exit__(self, *_: Any) -> None: ...


def test_an_offloaded_cache_moves_as_in_the_original(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same waits, copies and prefetches in the same order; layer 1's leave once layer 1 is through."""
    log: list[str] = []
    monkeypatch.setattr(torch.cuda, "default_stream", lambda device: Stream("default", log))

    def offloaded(model: PreTrainedModel) -> DynamicCache:
        with monkeypatch.context() as patch:
            patch.setattr(torch, "Stream", lambda: Stream("prefetch", log))
            cache = DynamicCache(config=model.config, offloading=True)
        for index, layer in enumerate(cache.layers):
            for move in ("prefetch", "offload"):
                monkeypatch.setattr(layer, move, lambda move=move, index=index: log.append(f"{move} {index}"))
        return cache

    model = tiny("mixtral")
    student = fxskip.transform(model, "identity")
    got = generated(student, offloaded(student))
    ours, log[:] = list(log), []
    assert_same_steps(got, generated(model, offloaded(model)))
    assert ours == log
    assert {"offload 1", "prefetch 2", "prefetch waits for default"} <= set(ours)


@pytest.mark.gpu(1)
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_an_offloaded_cache_on_a_gpu() -> None:
    model = tiny("mixtral", layers=6).to("cuda")
    student = fxskip.transform(model, "identity")
    given = {name: t.to("cuda") for name, t in batch(2, 9, padded=True).items() if name != "labels"}
    options = {"max_new_tokens": 8, "do_sample": False, "cache_implementation": "offloaded"}
    before = capture_count()
    assert torch.equal(student.generate(**given, **options), model.generate(**given, **options))
    assert capture_count() - before == 2
