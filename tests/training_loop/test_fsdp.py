"""FSDP2 on two processes: `fully_shard` for each layer and the root, before and after the transform."""

import copy
import pickle
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, PreTrainedModel

import fxskip
from fxskip.runtime.regions import Region
from tests.checkpoint.reload import realign
from tests.training_loop.loops import assert_same_weights, sgd_steps, weights
from tests.training_loop.ranks import RANKS, run_on_ranks
from tests.training_loop.test_ddp import gradients_are_the_mean_over_ranks
from tests.transform.compare import assert_equal_tensors, assert_same_logits, logits
from tests.transform.wirings import FARSKIP
from tests.zoo import batch, tiny

STEPS = 3


def model(**fields: float) -> PreTrainedModel:
    return tiny("qwen2_moe", layers=2, **fields).train()


def shard(model: PreTrainedModel, policy: MixedPrecisionPolicy | None = None) -> PreTrainedModel:
    for module in (*model.model.layers, model):
        fully_shard(module, mp_policy=policy or MixedPrecisionPolicy())
    return model


def sharded_student() -> PreTrainedModel:
    return shard(fxskip.transform(model(), FARSKIP.spec))


def assert_trains_like_one_process(student: nn.Module, reference: nn.Module, rank: int) -> None:
    """A rank's batch against both ranks' batches; then the weights are the same to the last bit."""
    sgd_steps(student, [[batch(seed=10 * step + rank)] for step in range(STEPS)])
    sgd_steps(reference, [[batch(seed=10 * step + r) for r in range(RANKS)] for step in range(STEPS)])
    assert_same_weights(student, reference)
    assert all(isinstance(parameter, DTensor) for parameter in student.parameters())


# --- the order of transform and fully_shard ------------------------------------------------------


def sharded_after_the_transform(rank: int, folder: Path) -> None:
    original = model()
    before = weights(original)
    student = shard(fxskip.transform(original, FARSKIP.spec))
    reference = FARSKIP.reference(original)

    assert_trains_like_one_process(student, reference, rank)
    assert not torch.equal(weights(student)["lm_head.weight"], before["lm_head.weight"])
    assert_classes(student)


def sharded_before_the_transform(rank: int, folder: Path) -> None:
    original = model()
    reference = FARSKIP.reference(original)
    student = fxskip.transform(shard(original), FARSKIP.spec, inplace=True)

    assert student is original
    assert_trains_like_one_process(student, reference, rank)
    assert_classes(student)


def assert_classes(student: PreTrainedModel) -> None:
    """Both class changes hold, and both find the original's class."""
    assert fxskip.is_transformed(student)
    assert isinstance(student, FSDPModule)
    assert type(student).__name__ == "FSDPFxSkipQwen2MoeForCausalLM"
    for layer in student.model.layers:
        assert isinstance(layer, FSDPModule) and isinstance(layer, Region)
        assert type(layer).__name__ == "FSDPFxSkipQwen2MoeDecoderLayer"
    assert str(fxskip.explain(student)) == str(fxskip.plan(model(), FARSKIP.spec))


def the_identity_is_the_original(rank: int, folder: Path) -> None:
    original = shard(model())
    student = fxskip.transform(shard(model()), "identity", inplace=True)
    for one in (original, student):
        sgd_steps(one, [[batch(seed=10 * step + rank)] for step in range(STEPS)])
    assert_same_weights(student, original)


def a_sharded_model_can_be_planned(rank: int, folder: Path) -> None:
    original = shard(model())
    assert str(fxskip.plan(original, FARSKIP.spec)) == str(fxskip.plan(model(), FARSKIP.spec))
    assert not fxskip.is_transformed(original)


# --- with other means ----------------------------------------------------------------------------


def mixed_precision(rank: int, folder: Path) -> None:
    """Parameters gathered in bfloat16, gradients reduced in fp32; the reference, as one unit, likewise."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    original = model()
    student = shard(fxskip.transform(original, FARSKIP.spec), policy)
    reference = fully_shard(FARSKIP.reference(original), mp_policy=policy)
    for one in (student, reference):
        sgd_steps(one, [[batch(seed=10 * step + rank)] for step in range(STEPS)])
    assert_same_weights(student, reference)


def gradient_checkpointing(rank: int, folder: Path) -> None:
    original = model(attention_dropout=0.0)
    reference = FARSKIP.reference(original)
    original.gradient_checkpointing_enable({"use_reentrant": False})
    assert_trains_like_one_process(shard(fxskip.transform(original, FARSKIP.spec)), reference, rank)


def changes_after_the_first_call_are_seen(rank: int, folder: Path) -> None:
    """Dynamo's own setting skips such guards in modules that FSDP2 manages."""
    original = tiny("mixtral", layers=2, attention_dropout=0.5)
    reference = FARSKIP.reference(original)
    student = shard(fxskip.transform(original, FARSKIP.spec))
    assert_same_logits(student, reference, batch())

    seen: list[int] = []
    for one in (student, reference):
        one.train()
        handle = one.model.layers[1].mlp.experts.register_forward_hook(
            lambda module, args, out: seen.append(1) or out * 2
        )
        torch.manual_seed(7)
        one.outcome = logits(one, batch())
        handle.remove()
        one.eval()
    assert len(seen) == 2
    assert_equal_tensors("logits with dropout and a hook", student.outcome, reference.outcome)
    assert_same_logits(student, reference, batch())


# --- weights -------------------------------------------------------------------------------------


def weights_made_on_the_meta_device(rank: int, folder: Path) -> None:
    """The way of large models: structure without weights, rewired, sharded, then filled."""
    original = model()
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(original.config).train()
    student = shard(fxskip.transform(empty, FARSKIP.spec, inplace=True))
    student.to_empty(device="cpu")
    whole = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, strict=True)
    set_model_state_dict(student, original.state_dict() if rank == 0 else {}, options=whole)
    for name, buffer in original.named_buffers():  # rotary frequencies are not in a state_dict
        student.get_buffer(name).copy_(buffer)

    assert_trains_like_one_process(student, FARSKIP.reference(original), rank)


def state_dicts(rank: int, folder: Path) -> None:
    student = sharded_student()
    original = model()
    assert list(student.state_dict()) == list(original.state_dict())
    whole = get_model_state_dict(student, options=StateDictOptions(full_state_dict=True))
    for name, tensor in original.state_dict().items():
        assert_equal_tensors(name, whole[name], tensor)


def a_run_is_resumed(rank: int, folder: Path) -> None:
    """Distributed checkpoint of weights and AdamW's state: three steps are two, a checkpoint, and one."""

    def steps(student: nn.Module, optimizer: torch.optim.Optimizer, numbers: range) -> None:
        for step in numbers:
            student(**batch(seed=10 * step + rank)).loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    def state(student: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, object]:
        of_model, of_optimizer = get_state_dict(student, optimizer)
        return {"model": of_model, "optimizer": of_optimizer}

    def begin() -> tuple[nn.Module, torch.optim.Optimizer]:
        student = sharded_student()
        return student, torch.optim.AdamW(student.parameters(), lr=1e-2)

    student, optimizer = begin()
    steps(student, optimizer, range(2))
    dcp.save(state(student, optimizer), checkpoint_id=str(folder / "dcp"))
    steps(student, optimizer, range(2, 3))

    resumed, its_optimizer = begin()
    found = state(resumed, its_optimizer)
    dcp.load(found, checkpoint_id=str(folder / "dcp"))
    set_state_dict(
        resumed, its_optimizer, model_state_dict=found["model"], optim_state_dict=found["optimizer"]
    )
    steps(resumed, its_optimizer, range(2, 3))
    assert_same_weights(resumed, student)


def save_pretrained(rank: int, folder: Path) -> None:
    student = sharded_student()
    whole = get_model_state_dict(student, options=StateDictOptions(full_state_dict=True))
    if rank == 0:
        student.save_pretrained(folder / "saved", state_dict=whole)
        loaded = AutoModelForCausalLM.from_pretrained(folder / "saved")
        assert fxskip.is_transformed(loaded)
        realign(loaded)
        assert_same_logits(loaded, FARSKIP.reference(model()).eval(), batch(padded=True))


# --- what is refused -----------------------------------------------------------------------------


def refusals(rank: int, folder: Path) -> None:
    student = sharded_student()
    with pytest.raises(fxskip.PassError, match="inplace=True, or transform the model before it is sharded"):
        fxskip.transform(shard(model()), FARSKIP.spec)
    for module in (student, student.model.layers[0]):
        with pytest.raises(AssertionError, match="FSDP does not support deepcopy"):
            copy.deepcopy(module)
        with pytest.raises(fxskip.PassError, match="sharded by fully_shard and cannot be pickled"):
            pickle.dumps(module)

    inside = fxskip.transform(model(), FARSKIP.spec)
    fully_shard(inside.model.layers[0].mlp.experts)
    with pytest.raises(fxskip.CaptureError, match="fully_shard"):
        inside(**batch())


@pytest.mark.distributed
def test_two_processes(tmp_path: Path) -> None:
    """The ones that every change is checked with: two processes take half a minute to start."""
    run_on_ranks(
        (gradients_are_the_mean_over_ranks, sharded_after_the_transform, save_pretrained),
        tmp_path,
        limit_s=180,
    )


@pytest.mark.distributed
@pytest.mark.slow
def test_fully_shard(tmp_path: Path) -> None:
    checks = (
        sharded_before_the_transform,
        the_identity_is_the_original,
        a_sharded_model_can_be_planned,
        mixed_precision,
        gradient_checkpointing,
        changes_after_the_first_call_are_seen,
        weights_made_on_the_meta_device,
        state_dicts,
        a_run_is_resumed,
        refusals,
    )
    run_on_ranks(checks, tmp_path, limit_s=400)
