"""A student trains, copies and saves as any module does, and stays rewired."""

import copy
import io
from typing import NamedTuple

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

import fxskip
from tests.transform.compare import assert_same_logits, assert_same_training, outcome
from tests.transform.wirings import FARSKIP
from tests.zoo import batch, tiny


class Trio(NamedTuple):
    model: PreTrainedModel
    student: PreTrainedModel
    reference: PreTrainedModel


def trio(model: PreTrainedModel) -> Trio:
    return Trio(model, fxskip.transform(model, FARSKIP.spec), FARSKIP.reference(model))


@pytest.fixture(scope="module")
def qwen() -> Trio:
    """Shared by the tests that change nothing in it."""
    return trio(tiny("qwen2_moe"))


def test_state_dict_parameters_and_buffers_are_those_of_the_original(qwen: Trio) -> None:
    ours, theirs = qwen.student.state_dict(), qwen.model.state_dict()
    assert list(ours) == list(theirs)
    for name, tensor in theirs.items():
        assert torch.equal(ours[name], tensor), name
        assert ours[name].data_ptr() != tensor.data_ptr(), f"{name} is shared with the original"
    assert list(dict(qwen.student.named_buffers())) == list(dict(qwen.model.named_buffers()))
    qwen.student.load_state_dict(theirs)


def test_a_deepcopy_is_rewired_and_has_weights_of_its_own(qwen: Trio) -> None:
    twin = copy.deepcopy(qwen.student)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.mul_(1.1)
    reference = copy.deepcopy(qwen.reference)
    reference.load_state_dict(twin.state_dict())

    assert fxskip.is_transformed(twin)
    assert_same_training(twin, reference, batch(padded=True))
    assert_same_logits(qwen.student, qwen.reference, batch())  # the first one has kept its weights


def test_torch_save_and_load_give_the_rewired_model(qwen: Trio) -> None:
    file = io.BytesIO()
    torch.save(qwen.student, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)

    assert fxskip.spec_of(loaded) == fxskip.spec_of(qwen.student)
    assert_same_training(loaded, qwen.reference, batch(padded=True))


def test_train_and_eval_switch_dropout() -> None:
    _, student, reference = trio(tiny("mixtral", layers=2, attention_dropout=0.3))
    for training in (True, False, True):
        for model in (student, reference):
            model.train(training)
        seeded = []
        for model in (student, reference):
            torch.manual_seed(7)
            seeded.append(outcome(model, batch()).logits)
        assert torch.equal(*seeded), f"training={training}"
    assert not torch.equal(seeded[0], outcome(student.eval(), batch()).logits)


def test_optimizer_steps_follow_the_reference() -> None:
    _, student, reference = trio(tiny("deepseek_v3", layers=2, first_k_dense_replace=0))
    losses: list[list[float]] = []
    for model in (student, reference):
        model.train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        losses.append([])
        for step in range(4):
            loss = model(**batch(seed=step, padded=True)).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[-1].append(loss.item())
    assert losses[0] == losses[1]
    assert losses[0][0] != losses[0][-1]


def test_frozen_parameters_get_no_gradient() -> None:
    _, student, reference = trio(tiny("qwen3_moe", layers=2))
    outcome(student, batch())  # captured while everything was trainable
    for model in (student, reference):
        for layer in model.model.layers:
            layer.mlp.requires_grad_(False)

    assert_same_training(student, reference, batch())
    assert not any("mlp" in name for name in outcome(student, batch()).gradients)


def test_autocast() -> None:
    """In qwen2_moe the routed and the shared addend then differ in dtype, and the stream stays in fp32."""
    _, student, reference = trio(tiny("qwen2_moe", layers=2))
    with torch.autocast("cpu", torch.bfloat16):
        assert_same_training(student, reference, batch(padded=True))


def test_the_auxiliary_loss_of_the_router() -> None:
    """Transformers records router logits with hooks inside the layers, here from the first call on."""
    model = tiny("mixtral", layers=2, output_router_logits=True, router_aux_loss_coef=0.1)
    student, reference = fxskip.transform(model, FARSKIP.spec), FARSKIP.reference(model)

    assert_same_training(student, reference, batch(padded=True))
    assert student(**batch()).aux_loss.item() == reference(**batch()).aux_loss.item() > 0


def test_tied_embeddings_stay_tied() -> None:
    _, student, reference = trio(tiny("qwen2_moe", layers=2, tie_word_embeddings=True))
    assert student.lm_head.weight is student.model.embed_tokens.weight
    assert_same_training(student, reference, batch())

    twin = copy.deepcopy(student)
    assert twin.lm_head.weight is twin.model.embed_tokens.weight
    assert twin.lm_head.weight is not student.lm_head.weight


def test_inplace_keeps_the_model_and_its_parameters() -> None:
    model = tiny("mixtral")
    reference = FARSKIP.reference(model)
    parameters = dict(model.named_parameters())
    student = fxskip.transform(model, FARSKIP.spec, inplace=True)

    assert student is model
    for name, parameter in student.named_parameters():
        assert parameter is parameters[name], name
    assert_same_logits(student, reference, batch())


def test_hooks_added_after_the_first_call_run() -> None:
    student = fxskip.transform(tiny("mixtral", layers=2), FARSKIP.spec)
    outcome(student, batch())
    seen: list[torch.Size] = []
    for layer in student.model.layers:
        layer.self_attn.register_forward_hook(lambda module, args, out: seen.append(out[0].shape))
    outcome(student, batch())

    assert seen == [torch.Size([2, 9, 64])] * 2


# --- gradient checkpointing ----------------------------------------------------------------------


def saved_bytes(model: nn.Module) -> int:
    """Bytes that autograd keeps between forward and backward, the parameters aside."""
    parameters = {p.data_ptr() for p in model.parameters()}
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(**batch(4, 32)).loss
        total = sum(kept.values())
        loss.backward()
    return total


# Newer transformers say activation checkpointing; the old name works in all versions that we support.
@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.* is deprecated:FutureWarning")
@pytest.mark.parametrize("when", ["before", "after"])
def test_gradient_checkpointing(when: str) -> None:
    model = tiny("qwen2_moe").train()
    reference = FARSKIP.reference(model)
    if when == "before":
        model.gradient_checkpointing_enable()
    student = fxskip.transform(model, FARSKIP.spec)
    if when == "after":
        kept_without = saved_bytes(student)
        student.gradient_checkpointing_enable()
        # Each layer keeps its inputs and recomputes the rest; what is left is mostly the head and the loss.
        assert saved_bytes(student) < kept_without / 4

    assert student.is_gradient_checkpointing
    assert_same_training(student, reference, batch(3, 17))
