"""What training loops do with a model, with exchanges in flight: to the last bit what reference mode gives."""

import copy
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxskip
from fxskip.collectives.landing import poisoned_buffers, under_way
from tests.collectives.spreads import (
    Outcome,
    assert_all_modes_agree,
    assert_same_bits,
    gradients,
    in_mode,
    model,
    own_batch,
    spread,
)
from tests.training_loop.ranks import run_on_ranks

Loop = Callable[[nn.Module, int], Any]


@cache
def original() -> nn.Module:
    return model("qwen2_moe", attention_dropout=0.2)


@cache
def student() -> nn.Module:
    return spread(original())


def assert_as_reference(
    loop: Loop, rank: int, prepare: Callable[[nn.Module], Any] = lambda module: None
) -> None:
    """`loop` returns tensors, which are compared beside the gradients that it leaves."""
    found = []
    for mode in ("reference", "scheduled"):
        twin = in_mode(student(), mode)
        prepare(twin)
        torch.manual_seed(5)
        with poisoned_buffers():
            result = loop(twin, rank)
        assert under_way() == []
        found.append(Outcome(result.detach(), gradients(twin)))
    assert_same_bits(found[0], found[1])
    assert not found[0].logits.isnan().any()


def forward(module: nn.Module, rank: int, *size: int, **arguments: Any) -> Any:
    return module(**own_batch(rank, *size), use_cache=False, **arguments)


def one_step(module: nn.Module, rank: int) -> Tensor:
    out = forward(module, rank)
    out.loss.backward()
    return out.logits  # type: ignore[no-any-return]


# --- precision, frozen parameters, modes ----------------------------------------------------------


def autocast(rank: int, folder: Path) -> None:
    def loop(module: nn.Module, rank: int) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            out = forward(module, rank)
        out.loss.backward()
        return out.logits  # type: ignore[no-any-return]

    assert_as_reference(loop, rank)


def frozen_parameters(rank: int, folder: Path) -> None:
    def beginning(module: Any) -> None:
        module.model.embed_tokens.requires_grad_(False)
        module.model.layers[0].requires_grad_(False)

    def experts(module: Any) -> None:
        for layer in module.model.layers:
            layer.mlp.experts.requires_grad_(False)

    def routers(module: Any) -> None:
        for layer in module.model.layers:
            layer.mlp.gate.requires_grad_(False)

    def all_but_the_last(module: Any) -> None:
        module.requires_grad_(False)
        module.model.layers[-1].mlp.experts.requires_grad_(True)

    for prepare in (beginning, experts, routers, all_but_the_last):
        assert_as_reference(one_step, rank, prepare)


def without_gradients(rank: int, folder: Path) -> None:
    def loop(module: nn.Module, rank: int) -> Tensor:
        module.eval()
        with torch.no_grad():
            first = forward(module, rank).logits
        with torch.inference_mode():
            second = forward(module, rank, 1, 9).logits
        return torch.cat((first.flatten(), second.flatten()))

    assert_as_reference(loop, rank)


def generation(rank: int, folder: Path) -> None:
    """Each rank its own prompts; the same tokens as in one process."""
    alone = fxskip.transform(original(), "farskip").eval()
    twin = in_mode(student(), "scheduled").eval()
    for padded, options in (
        (False, {}),
        (True, {"cache_implementation": "static"}),
        (True, {"num_beams": 2}),
        (False, {"use_cache": False}),
    ):
        inputs = own_batch(rank, 2, 6, padded=padded)
        del inputs["labels"]
        how = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0, **options}
        with poisoned_buffers():
            got = twin.generate(**inputs, **how)  # type: ignore[operator]
        assert torch.equal(got, alone.generate(**inputs, **how)), (padded, options)  # type: ignore[operator]


# --- several passes -------------------------------------------------------------------------------


def accumulation(rank: int, folder: Path) -> None:
    def loop(module: nn.Module, rank: int) -> Tensor:
        for number in range(3):
            out = forward(module, rank, 2, 6 + number)
            (out.loss / 3).backward()
        return out.logits  # type: ignore[no-any-return]

    assert_as_reference(loop, rank)


def two_forwards_then_two_backwards(rank: int, folder: Path) -> None:
    def loop(module: nn.Module, rank: int) -> Tensor:
        first, second = forward(module, rank), forward(module, rank, 3, 5)
        first.loss.backward()
        second.loss.backward()
        return torch.cat((first.logits.flatten(), second.logits.flatten()))

    assert_as_reference(loop, rank)


def backward_twice(rank: int, folder: Path) -> None:
    def loop(module: nn.Module, rank: int) -> Tensor:
        out = forward(module, rank)
        out.loss.backward(retain_graph=True)
        out.loss.backward()
        return out.logits  # type: ignore[no-any-return]

    assert_as_reference(loop, rank)


def gradients_of_inputs_alone(rank: int, folder: Path) -> None:
    """torch.autograd.grad leaves parameters alone."""

    def loop(module: Any, rank: int) -> Tensor:
        inputs = own_batch(rank)
        hidden = module.get_input_embeddings()(inputs.pop("input_ids")).detach().requires_grad_()
        loss = module(inputs_embeds=hidden, use_cache=False, **inputs).loss
        (found,) = torch.autograd.grad(loss, hidden)
        assert gradients(module) == {}
        return found

    assert_as_reference(loop, rank)


def second_derivatives_are_refused(rank: int, folder: Path) -> None:
    twin = in_mode(student(), "scheduled")
    twin.set_attn_implementation("eager")  # type: ignore[operator]
    found = torch.autograd.grad(
        forward(twin, rank).loss,
        [twin.lm_head.weight, twin.model.embed_tokens.weight],
        create_graph=True,  # type: ignore[union-attr,list-item]
    )
    with pytest.raises(RuntimeError, match="once_differentiable"):
        found[1].sum().backward()
    assert under_way() == []


def a_copy(rank: int, folder: Path) -> None:
    assert_as_reference(lambda module, rank: one_step(copy.deepcopy(module), rank), rank)


# --- who looks on ---------------------------------------------------------------------------------


def anomaly_detection(rank: int, folder: Path) -> None:
    """torch cannot look for NaN in DTensors, so it does with frozen experts, and without otherwise."""

    def freeze_experts(module: Any) -> None:
        for layer in module.model.layers:
            layer.mlp.experts.requires_grad_(False)

    for check_nan, prepare in ((True, freeze_experts), (False, lambda module: None)):

        def loop(module: nn.Module, rank: int, check_nan: bool = check_nan) -> Tensor:
            with torch.autograd.detect_anomaly(check_nan=check_nan):
                return one_step(module, rank)

        assert_as_reference(loop, rank, prepare)


def saved_tensors_on_the_cpu(rank: int, folder: Path) -> None:
    seen: list[bool] = []

    def pack(tensor: Tensor) -> Tensor:
        seen.append(tensor.is_floating_point() and bool(tensor.isnan().any()))
        return tensor.clone()

    def loop(module: nn.Module, rank: int) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            out = forward(module, rank)
        out.loss.backward()
        return out.logits  # type: ignore[no-any-return]

    assert_as_reference(loop, rank)
    assert seen and not any(seen)
    assert_as_reference(lambda m, r: _with(torch.autograd.graph.save_on_cpu(), one_step, m, r), rank)


def _with(context: Any, loop: Loop, module: nn.Module, rank: int) -> Any:
    with context:
        return loop(module, rank)


def hooks_of_the_user(rank: int, folder: Path) -> None:
    """They see finished values, in the layers that they are on and before the next; and may change them."""
    seen: list[Tensor] = []

    def keep(values: Any) -> None:
        tensors = values if isinstance(values, tuple) else (values,)
        assert all(isinstance(t, Tensor) for t in tensors)
        seen.extend(t.detach().clone() for t in tensors)

    def pre_hook(module: Any) -> None:
        module.model.layers[1].register_forward_pre_hook(lambda layer, args: keep(args[0]))

    def post_hook(module: Any) -> None:
        module.model.layers[0].register_forward_hook(lambda layer, args, out: keep(out))

    def changing(module: Any) -> None:
        module.model.layers[1].register_forward_pre_hook(
            lambda layer, args: ((args[0][0] * 2, args[0][1] * 3), *args[1:])
        )

    def backward(module: Any) -> None:
        module.model.layers[0].register_full_backward_hook(lambda layer, given, out: keep(out))

    for prepare in (pre_hook, post_hook, changing, backward):
        seen.clear()
        assert_as_reference(one_step, rank, prepare)
        assert not any(bool(t.isnan().any()) for t in seen)
        half = len(seen) // 2
        assert all(map(torch.equal, seen[:half], seen[half:]))
        assert seen or prepare is changing


def recorded_outputs(rank: int, folder: Path) -> None:
    def loop(module: nn.Module, rank: int) -> Tensor:
        out = forward(module, rank, output_hidden_states=True, output_router_logits=True)
        out.loss.backward()
        return torch.cat([t.flatten() for t in (*out.hidden_states, *out.router_logits)])

    assert_as_reference(loop, rank)


def dropout_in_all_modes(rank: int, folder: Path) -> None:
    """Attention drops 0.2; the numbers are drawn in the order of the program."""
    found = assert_all_modes_agree(student(), own_batch(rank), use_cache=False)
    torch.manual_seed(12)
    other = in_mode(student(), "scheduled")(**own_batch(rank), use_cache=False).logits
    assert not torch.equal(found.logits, other)


@pytest.mark.distributed
@pytest.mark.slow
def test_ways_to_run(tmp_path: Path) -> None:
    checks = (dropout_in_all_modes, autocast, frozen_parameters, without_gradients, generation)
    run_on_ranks(checks, tmp_path, limit_s=560)


@pytest.mark.distributed
@pytest.mark.slow
def test_several_passes(tmp_path: Path) -> None:
    checks = (
        accumulation,
        two_forwards_then_two_backwards,
        backward_twice,
        gradients_of_inputs_alone,
        second_derivatives_are_refused,
        a_copy,
    )
    run_on_ranks(checks, tmp_path, limit_s=560)


@pytest.mark.distributed
@pytest.mark.slow
def test_onlookers(tmp_path: Path) -> None:
    checks = (anomaly_detection, saved_tensors_on_the_cpu, hooks_of_the_user, recorded_outputs)
    run_on_ranks(checks, tmp_path, limit_s=560)
