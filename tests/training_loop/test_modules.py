"""What users do to a module between steps: hooks, freezing, loading, moving; and how they step."""

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

import fxskip
from tests.training_loop.loops import assert_same_weights, sgd_steps
from tests.transform.compare import assert_equal_tensors, assert_same_logits, assert_same_training, logits
from tests.transform.wirings import FARSKIP
from tests.zoo import batch, tiny


class Pair(NamedTuple):
    student: PreTrainedModel
    reference: PreTrainedModel

    def each(self, change: Callable[[PreTrainedModel], Any]) -> None:
        for model in self:
            change(model)


def pair(model_type: str = "qwen2_moe", **fields: Any) -> Pair:
    model = tiny(model_type, layers=2, **fields)
    return Pair(fxskip.transform(model, FARSKIP.spec), FARSKIP.reference(model))


# --- hooks ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("called_before", [False, True])
@pytest.mark.slow
def test_hooks_on_submodules(called_before: bool) -> None:
    both = pair("mixtral")
    if called_before:
        assert_same_training(*both, batch())
    handles = []

    def change(model: PreTrainedModel) -> None:
        attention, mlp = model.model.layers[0].self_attn, model.model.layers[1].mlp
        handles.append(attention.register_forward_hook(lambda module, args, out: (out[0] * 2, *out[1:])))
        handles.append(mlp.gate.register_forward_pre_hook(lambda module, args: (args[0] + 1,)))

    stock = logits(both.student, batch())
    both.each(change)
    assert not torch.equal(logits(both.student, batch()), stock)
    assert_same_training(*both, batch())
    for handle in handles:
        handle.remove()
    assert torch.equal(logits(both.student, batch()), stock)
    assert_same_training(*both, batch())


@pytest.mark.parametrize("called_before", [pytest.param(False, marks=pytest.mark.slow), True])
def test_hooks_on_layers_see_a_tuple_of_streams(called_before: bool) -> None:
    student, reference = pair("mixtral")
    streams: list[Tensor] = []
    reference.model.layers[1].register_forward_pre_hook(lambda module, args: streams.append(args[0]))
    logits(reference, batch())
    if called_before:
        logits(student, batch())
    seen: list[Any] = []
    first, second = student.model.layers
    first.register_forward_hook(lambda module, args, out: seen.append(out))
    second.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    second.register_forward_hook(lambda module, args, out: seen.append(out))
    logits(student, batch())

    left, entered, last = seen
    assert isinstance(left, tuple) and len(left) == 2 and left is entered
    assert_equal_tensors("the full stream", left[0], streams[0])
    assert not torch.equal(left[0], left[1])
    assert isinstance(last, Tensor)


@pytest.mark.slow
def test_hooks_on_layers_may_change_the_streams() -> None:
    """A change of one stream alone is the user's to make: x and y are then no longer of one kind."""
    student, _ = pair("mixtral")
    before = logits(student, batch())
    handle = student.model.layers[0].register_forward_hook(
        lambda module, args, out: tuple(s * 1.5 for s in out)
    )
    changed = logits(student, batch())
    handle.remove()
    assert not torch.equal(changed, before)
    assert torch.equal(logits(student, batch()), before)


def test_backward_hooks() -> None:
    """On parameters they run; on modules inside a layer they are refused."""
    both = pair("mixtral")
    seen: list[list[Tensor]] = [[], []]
    for model, found in zip(both, seen, strict=True):
        model.model.layers[1].mlp.gate.weight.register_hook(found.append)
        model(**batch()).loss.backward()
    assert len(seen[0]) == len(seen[1]) == 1
    assert_equal_tensors("gradient of the router", seen[0][0], seen[1][0])

    both.student.model.layers[1].mlp.gate.register_full_backward_hook(lambda module, into, out_of: None)
    with pytest.raises(fxskip.CaptureError, match=r"full backward hook[\s\S]*parameter.register_hook"):
        both.student(**batch())


# --- parameters ----------------------------------------------------------------------------------


@pytest.mark.slow
def test_freezing_and_thawing() -> None:
    both = pair()
    parts = {"experts": ".mlp.experts.", "router": ".mlp.gate.", "all but the head": "model."}
    for part in (*parts, None, "experts"):

        def freeze(model: PreTrainedModel, part: str | None = part) -> None:
            for name, parameter in model.named_parameters():
                parameter.requires_grad_(part is None or parts[part] not in name)

        both.each(freeze)
        assert_same_training(*both, batch())


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.slow
def test_load_state_dict(assign: bool) -> None:
    both = pair()
    assert_same_logits(*both, batch())
    others = tiny("qwen2_moe", layers=2, seed=9).state_dict()
    before = logits(both.student, batch())
    both.each(lambda model: model.load_state_dict(copy.deepcopy(others), strict=True, assign=assign))

    assert not torch.equal(logits(both.student, batch()), before)
    assert_same_training(*both, batch())
    for damaged in (
        others | {"extra": torch.ones(1)},
        {k: v for k, v in others.items() if "lm_head" not in k},
    ):
        with pytest.raises(RuntimeError, match="Error"):
            both.student.load_state_dict(damaged, strict=True)
    found = both.student.load_state_dict({"extra": torch.ones(1)}, strict=False)
    assert found.unexpected_keys == ["extra"] and len(found.missing_keys) == len(others)


def test_a_deepcopy_trains_on_its_own() -> None:
    both = pair()
    twins = Pair(*(copy.deepcopy(model) for model in both))
    before = logits(both.student, batch())
    twins.each(lambda model: sgd_steps(model, [[batch(seed=1)], [batch(seed=2)]]))
    assert_same_weights(*twins)
    assert torch.equal(logits(both.student, batch()), before)


@pytest.mark.slow
def test_moves() -> None:
    """To another dtype and back; to the meta device and, with new weights, back from it."""
    both = pair("mixtral")
    assert_same_logits(*both, batch())
    both.each(lambda model: model.to(torch.bfloat16))
    assert_same_training(*both, batch())
    both.each(lambda model: model.float().cpu())
    assert_same_training(*both, batch())

    weights = both.reference.state_dict()
    buffers = {name: buffer.clone() for name, buffer in both.student.named_buffers()}
    away = both.student.to("meta")
    away.to_empty(device="cpu").load_state_dict(weights)
    for name, buffer in buffers.items():
        away.get_buffer(name).copy_(buffer)
    assert_same_training(away, both.reference, batch())


# --- steps ---------------------------------------------------------------------------------------


@pytest.mark.slow
def test_gradient_accumulation() -> None:
    both = pair()
    steps = [[batch(seed=10 * step + k, rows=1 + k) for k in range(3)] for step in range(2)]
    both.each(lambda model: sgd_steps(model.train(), steps))
    assert_same_weights(*both)


@pytest.mark.parametrize(
    "fields",
    [pytest.param({"foreach": True}, marks=pytest.mark.slow), {"fused": True}],
    ids=str,
)
def test_adamw_with_clipping(fields: dict[str, bool]) -> None:
    both = pair("mixtral")
    norms = []

    def train(model: PreTrainedModel) -> None:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, **fields)
        for step in range(3):
            model(**batch(seed=step)).loss.backward()
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.5))
            optimizer.step()
            optimizer.zero_grad()

    both.each(train)
    assert norms[:3] == norms[3:] and norms[0] > 0.5
    assert_same_weights(*both)


@pytest.mark.slow
def test_autocast_steps() -> None:
    """Weights in fp32, matrix products in bfloat16; leaving the context is seen."""
    both = pair()
    with torch.autocast("cpu", torch.bfloat16):
        low = logits(both.student, batch())
        both.each(lambda model: sgd_steps(model, [[batch(seed=1)], [batch(seed=2)]]))
    assert_same_weights(*both)
    assert_same_training(*both, batch())
    assert low.dtype == torch.bfloat16
    assert logits(both.student, batch()).dtype == torch.float32


@pytest.mark.slow
def test_the_identity_steps_like_the_original() -> None:
    model = tiny("deepseek_v3", layers=2).train()
    student = fxskip.transform(model, "identity")
    for one in (student, model):
        optimizer = torch.optim.AdamW(one.parameters(), lr=1e-2)
        for step in range(3):
            one(**batch(seed=step, padded=True)).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    assert_same_weights(student, model)
