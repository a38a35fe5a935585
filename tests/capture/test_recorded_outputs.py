"""output_hidden_states, output_attentions and output_router_logits of a rewired model."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxskip
from fxskip.capture.recorded_outputs import _active_collector, traceable_recording
from tests.transform.wirings import FARSKIP
from tests.zoo import batch, tiny

ROUTED = ("mixtral", "qwen2_moe")  # types that can return the router's logits


def options(model_type: str) -> dict[str, bool]:
    wanted = {"output_hidden_states": True, "output_attentions": True}
    return wanted | ({"output_router_logits": True} if model_type in ROUTED else {})


def call(model: nn.Module, **wanted: bool) -> Any:
    with torch.no_grad():
        return model(**batch(padded=True), **wanted)


@pytest.mark.parametrize(
    "model_type",
    [
        "mixtral",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("deepseek_v3", "llama4_text", "qwen2_moe")),
    ],
)
def test_an_identity_student_records_what_the_original_does(model_type: str) -> None:
    model = tiny(model_type, layers=2)
    model.set_attn_implementation("eager")  # no other one returns attentions
    student = fxskip.transform(model, "identity")
    call(student)  # captured without recording first

    got, expected = call(student, **options(model_type)), call(model, **options(model_type))
    assert set(got.keys()) == set(expected.keys())
    layers = model.config.num_hidden_layers
    for name, count in (("hidden_states", layers + 1), ("attentions", layers), ("router_logits", layers)):
        if name == "router_logits" and model_type not in ROUTED:
            continue
        ours, theirs = got[name], expected[name]
        assert len(ours) == len(theirs) == count, name
        for number, (one, other) in enumerate(zip(ours, theirs, strict=True)):
            assert torch.equal(one, other), f"{name}[{number}]"

    plain = call(student)  # records nothing, and nothing piles up
    assert torch.equal(plain.logits, call(model).logits)
    assert all(plain.get(name) is None for name in ("hidden_states", "attentions", "router_logits"))
    assert len(call(student, **options(model_type)).attentions) == layers


def test_the_recorded_hidden_states_are_the_full_stream() -> None:
    model = tiny("mixtral")
    student, reference = fxskip.transform(model, FARSKIP.spec), FARSKIP.reference(model)
    seen: list[Tensor] = []
    for layer in reference.model.layers:
        layer.register_forward_hook(lambda module, args, out: seen.append(out))
    call(reference)

    embedding, *streams, last = call(student, output_hidden_states=True).hidden_states
    assert torch.equal(embedding, model.model.embed_tokens(batch(padded=True)["input_ids"]))
    assert len(streams) == 2
    assert all(torch.equal(one, other) for one, other in zip(streams, seen, strict=False))
    assert torch.equal(last, model.model.norm(seen[2]))  # transformers records the last one after the norm


def test_recorded_router_logits_give_the_auxiliary_loss() -> None:
    model = tiny("mixtral", layers=2).train()
    student = fxskip.transform(model, "identity")
    losses = []
    for one in (student, model):
        out = one(**batch(), output_router_logits=True)
        out.loss.backward()
        losses.append((out.loss.item(), out.aux_loss.item()))
    assert losses[0] == losses[1]
    for (name, ours), theirs in zip(student.named_parameters(), model.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad), name


@pytest.mark.skipif(_active_collector is None, reason="this transformers has no switch")
def test_the_switch_is_put_back_after_an_error() -> None:
    with pytest.raises(ZeroDivisionError), traceable_recording():
        assert _active_collector.compiling
        raise ZeroDivisionError
    assert not _active_collector.compiling
    assert _active_collector.global_var is None
