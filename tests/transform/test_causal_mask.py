"""Attention stays causal by flag, without a mask that is written out, wherever the original does without one.

A mask [B, 1, S, S] keeps SDPA from its flash kernels. transformers writes one whenever it is compiled.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx, nn
from transformers import PreTrainedModel

import fxskip
from fxskip.runtime import regions
from tests.transform.attention import AttentionCall, attention_calls
from tests.transform.wirings import FARSKIP
from tests.zoo import FAMILIES, MODEL_TYPES, batch, tiny

ROWS, LENGTH = 2, 9
CAUSAL = AttentionCall(LENGTH, True, None)
MASKED = AttentionCall(LENGTH, False, (ROWS, 1, LENGTH, LENGTH))
ONE_TOKEN = AttentionCall(1, False, None)
SPECS = {"identity": "identity", "farskip": FARSKIP.spec}

IDS = batch(ROWS, LENGTH)["input_ids"]
PACKED = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4], [0, 1, 0, 1, 2, 3, 4, 5, 6]])
INPUTS: dict[str, tuple[dict[str, torch.Tensor], AttentionCall]] = {
    "nothing": ({}, CAUSAL),
    "mask_of_ones": ({"attention_mask": torch.ones_like(IDS)}, CAUSAL),
    "padding": ({"attention_mask": batch(ROWS, LENGTH, padded=True)["attention_mask"]}, MASKED),
    "positions": ({"position_ids": torch.arange(LENGTH).expand(ROWS, -1)}, CAUSAL),
    "packed_positions": ({"position_ids": PACKED}, MASKED),
}
TYPES = [pytest.param(t, marks=[] if t == "mixtral" else pytest.mark.slow) for t in MODEL_TYPES]


def layers_of(model_type: str) -> int:
    """As few as the spec can rewire: a dense layer has no routed output for the next attention to drop."""
    return 3 if "first_k_dense_replace" in FAMILIES[model_type] else 2


def run(model: nn.Module, **inputs: Any) -> Callable[[], Any]:
    return lambda: model(input_ids=IDS, use_cache=False, **inputs)


@pytest.mark.parametrize("model_type", TYPES)
@pytest.mark.parametrize("spec", ["farskip", pytest.param("identity", marks=pytest.mark.slow)])
def test_a_mask_only_where_there_must_be_one(model_type: str, spec: str) -> None:
    layers = layers_of(model_type)
    model = tiny(model_type, layers=layers)
    student = fxskip.transform(model, SPECS[spec])
    for name, (inputs, expected) in INPUTS.items():
        assert attention_calls(run(model, **inputs)) == [expected] * layers, f"the original with {name}"
        assert attention_calls(run(student, **inputs)) == [expected] * layers, name
    student.train()
    assert attention_calls(run(student)) == [CAUSAL] * layers


@pytest.mark.parametrize("model_type", TYPES)
def test_with_a_cache(model_type: str) -> None:
    """The prompt is causal; a single new token looks at everything, so it has neither mask nor flag."""
    layers = layers_of(model_type)
    model = tiny(model_type, layers=layers)
    for one in (model, fxskip.transform(model, FARSKIP.spec)):

        def generate(one: PreTrainedModel = one) -> None:
            one.generate(IDS, max_new_tokens=2, do_sample=False)

        assert attention_calls(generate) == [CAUSAL] * layers + [ONE_TOKEN] * layers


@pytest.mark.parametrize("kind", ["sliding_window", pytest.param("chunked", marks=pytest.mark.slow)])
def test_a_window_keeps_its_mask(kind: str) -> None:
    """Where the sequence is longer than the window, and not before."""
    if kind == "sliding_window":
        model = tiny("mixtral", layers=2, sliding_window=4)
        windowed = [True, True]
    else:
        model = tiny("llama4_text", layers=2, attention_chunk_size=4)
        windowed = [t == "chunked_attention" for t in model.config.layer_types]
    assert any(windowed)
    student = fxskip.transform(model, "identity")
    for one in (model, student, torch.compile(student, backend="eager")):
        assert attention_calls(run(one)) == [MASKED if w else CAUSAL for w in windowed]

        def short(one: Any = one) -> None:
            one(input_ids=IDS[:, :3], use_cache=False)

        assert attention_calls(short) == [AttentionCall(3, True, None)] * 2
    assert torch.equal(run(student)().logits, run(model)().logits)


# --- a compiler around the student ---------------------------------------------------------------


def whole(student: PreTrainedModel) -> Callable[..., Any]:
    return torch.compile(student, backend="aot_eager")


def decoder_alone(student: PreTrainedModel) -> Callable[..., Any]:
    return torch.compile(student.get_decoder(), backend="aot_eager")


def in_place(student: PreTrainedModel) -> Callable[..., Any]:
    student.compile(backend="aot_eager")
    return student


@pytest.mark.parametrize("model_type", TYPES)
@pytest.mark.parametrize(
    "compiled",
    [
        whole,
        pytest.param(decoder_alone, marks=pytest.mark.slow),
        pytest.param(in_place, marks=pytest.mark.slow),
    ],
)
def test_inside_torch_compile(model_type: str, compiled: Callable[[PreTrainedModel], Any]) -> None:
    torch._dynamo.reset()
    layers = layers_of(model_type)
    around = compiled(fxskip.transform(tiny(model_type, layers=layers), FARSKIP.spec))
    for name in ("nothing", "padding"):
        inputs, expected = INPUTS[name]
        assert attention_calls(run(around, **inputs)) == [expected] * layers, name


def test_a_compiled_student_computes_the_same_and_learns() -> None:
    model = tiny("mixtral")
    student = fxskip.transform(model, FARSKIP.spec)
    graphs: list[fx.GraphModule] = []

    def backend(module: fx.GraphModule, _: Any) -> Callable[..., Any]:
        graphs.append(module)
        return module.forward

    given = batch(padded=True)
    plain = student(**given)
    plain.loss.backward()
    gradients = {name: p.grad.clone() for name, p in student.named_parameters() if p.grad is not None}
    student.zero_grad()
    out = torch.compile(student, backend=backend)(**given)
    out.loss.backward()

    assert torch.equal(out.logits, plain.logits) and torch.equal(out.loss, plain.loss)
    assert all(torch.equal(p.grad, gradients[n]) for n, p in student.named_parameters() if p.grad is not None)
    # Head and loss are still the compiler's.
    used = {node.target for module in graphs for node in module.graph.nodes if node.op == "call_function"}
    assert {torch._C._nn.linear, torch.nn.functional.cross_entropy} & used


# --- what is lowered further ---------------------------------------------------------------------


def test_the_finished_graph_says_causal(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph that a compiler lowers must have the flag in it: what the compiler sees is this graph."""
    finished: list[fx.Graph] = []
    rewire = regions.rewire

    def recorded(*arguments: Any, **options: Any) -> fx.Graph:
        finished.append(rewire(*arguments, **options))
        return finished[-1]

    monkeypatch.setattr(regions, "rewire", recorded)
    student = fxskip.transform(tiny("qwen3_moe", layers=2), FARSKIP.spec)
    torch._dynamo.reset()
    regions._compiled.cache_clear()
    run(student)()

    attention = torch.nn.functional.scaled_dot_product_attention
    calls = [node for graph in finished for node in graph.nodes if node.target is attention]
    assert len(calls) == len(finished) > 0
    for node in calls:
        assert node.kwargs["is_causal"] is True
        assert node.kwargs["attn_mask"] is None
