"""What transformers records on the way: hidden states, router logits, attentions, the auxiliary loss."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

import fxskip
from tests.transform.compare import assert_equal_tensors, assert_same_gradients
from tests.transform.wirings import FARSKIP
from tests.zoo import batch, tiny

RECORDED = {"output_hidden_states": True, "output_router_logits": True, "output_attentions": True}


def recorded(model: nn.Module, **options: bool) -> Any:
    model.zero_grad(set_to_none=True)
    out = model(**batch(padded=True), **options)
    # The last recorded states are compared by their gradients too: they must be the ones that were used.
    sum((state.sum() for state in out.hidden_states or ()), start=out.loss).backward()
    return out


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(
    ("model_type", "first_call"),
    [
        ("qwen2_moe", "plain"),
        pytest.param("qwen2_moe", "recording", marks=pytest.mark.slow),
        pytest.param("deepseek_v3", "plain", marks=pytest.mark.slow),
    ],
)
def test_the_identity_records_what_the_original_records(model_type: str, first_call: str) -> None:
    model = tiny(model_type, layers=2, attn_implementation="eager")
    student = fxskip.transform(model, "identity")
    if first_call == "plain":
        student(**batch())
    got, want = recorded(student, **RECORDED), recorded(model, **RECORDED)

    fields = [name for name in ("hidden_states", "router_logits", "attentions") if want.get(name)]
    assert {"hidden_states", "attentions"} <= set(fields)
    for name in fields:
        assert len(got[name]) == len(want[name]) > 0
        for number, (ours, theirs) in enumerate(zip(got[name], want[name], strict=True)):
            assert_equal_tensors(f"{name}[{number}]", ours, theirs)
    assert torch.equal(got.loss, want.loss)
    assert_same_gradients(gradients(student), gradients(model))


def entering(reference: PreTrainedModel) -> list[Tensor]:
    """What enters each layer of the hand-written model, which is its full stream, and what the norm makes of it."""
    seen: list[Tensor] = []
    for layer in reference.model.layers:
        layer.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    reference.model.norm.register_forward_hook(lambda module, args, out: seen.append(out))
    reference(**batch(padded=True))
    return seen


@pytest.mark.parametrize("recompute", ["none", pytest.param("layer", marks=pytest.mark.slow)])
def test_hidden_states_of_several_streams_are_the_full_stream(recompute: str) -> None:
    model = tiny("deepseek_v3", layers=3).train()
    student = fxskip.transform(model, {**FARSKIP.spec, "runtime": {"recompute": recompute}})
    got = student(**batch(padded=True), output_hidden_states=True, use_cache=False).hidden_states
    want = entering(FARSKIP.reference(model))

    assert len(got) == len(want) == 4
    for number, (ours, theirs) in enumerate(zip(got, want, strict=True)):
        assert_equal_tensors(f"hidden_states[{number}]", ours, theirs)


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["qwen2_moe", "mixtral", "olmoe", "qwen3_moe"])
def test_the_load_balancing_loss(model_type: str) -> None:
    model = tiny(model_type, layers=2, output_router_logits=True, router_aux_loss_coef=0.3).train()
    student = fxskip.transform(model, "identity")
    got, want = recorded(student), recorded(model)
    assert want.aux_loss > 0
    assert torch.equal(got.aux_loss, want.aux_loss) and torch.equal(got.loss, want.loss)
    assert_same_gradients(gradients(student), gradients(model))


def test_attentions_that_the_implementation_does_not_give() -> None:
    student = fxskip.transform(tiny("mixtral", layers=1, attn_implementation="sdpa"), "identity")
    with pytest.raises(fxskip.CaptureError, match=r"no attention weights[\s\S]*set_attn_implementation"):
        student(**batch(), output_attentions=True)
