"""Plain PyTorch models under every wiring against formulas written from their parts, bit for bit."""

import copy

import pytest
import torch
from torch import Tensor, nn

import fxskip
from tests.plain import models
from tests.plain.formulas import WIRINGS, rewired
from tests.plain.models import VOCAB, Args, Model, Transformer
from tests.transform.compare import assert_equal_tensors, assert_same_gradients

STYLES = (
    "IndexAddMoE", "SkippingMoE", "MaskedSumMoE", "MaskedRowsMoE", "IntoSharedMoE", "EinsumMoE", "titan", "titan loop"
)  # fmt: skip


def make(style: str, *, layers: int = 2, seed: int = 0) -> nn.Module:
    """`layers` MoE layers; in the style of torchtitan a dense one before them."""
    torch.manual_seed(seed)
    if style.startswith("titan"):
        return Transformer(Args(n_layers=layers + 1, use_grouped_mm=style == "titan"))
    return Model(getattr(models, style), layers)


def ids(rows: int = 2, columns: int = 8, *, seed: int = 0) -> Tensor:
    return torch.randint(0, VOCAB, (rows, columns), generator=torch.Generator().manual_seed(seed))


def gradients(model: nn.Module, logits: Tensor) -> dict[str, Tensor]:
    logits.square().mean().backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return found


def check(style: str, preset: str) -> None:
    model = make(style)
    student = fxskip.transform(model, preset, example_inputs=(ids(),))
    for given in (ids(), ids(5, 13)):
        got, wanted = student(given), rewired(model, given, WIRINGS[preset])
        assert_equal_tensors("logits", got, wanted)
        assert torch.equal(got, model(given)) == (preset == "identity")
    assert_same_gradients(gradients(student, got), gradients(model, wanted))
    for name, buffer in model.named_buffers():  # a counter of tokens counts once a forward
        if preset == "identity" and "tokens_per_expert" not in name:
            assert_equal_tensors(name, student.get_buffer(name), buffer)


@pytest.mark.parametrize("style", ["IndexAddMoE", "SkippingMoE", "IntoSharedMoE", "titan"])
def test_farskip(style: str) -> None:
    check(style, "farskip")


@pytest.mark.slow
@pytest.mark.parametrize("preset", list(WIRINGS))
@pytest.mark.parametrize("style", STYLES)
def test_every_style_under_every_wiring(style: str, preset: str) -> None:
    check(style, preset)


@pytest.mark.parametrize("style", ["SkippingMoE", "EinsumMoE"])
def test_identity_is_the_original(style: str) -> None:
    model = make(style)
    student = fxskip.transform(model, "identity", example_inputs=(ids(),))
    for given in (ids(), ids(1, 1), ids(3, 21)):
        got, wanted = student(given), model(given)
        assert_equal_tensors("logits", got, wanted)
    assert_same_gradients(gradients(student, got), gradients(model, wanted))


def test_a_counter_of_tokens_counts_once_a_forward() -> None:
    model = make("titan")
    student = fxskip.transform(model, "farskip", example_inputs=(ids(),))
    student(ids())

    for tokens in (student.layers["1"].moe.tokens_per_expert, model.layers["1"].moe.tokens_per_expert):
        assert tokens.device.type == "cpu"
    assert student.layers["1"].moe.tokens_per_expert.sum() == ids().numel() * models.TOP
    assert model.layers["1"].moe.tokens_per_expert.sum() == 0  # the analysis has not counted anything


def test_training_steps_are_those_of_the_formula() -> None:
    model = make("SkippingMoE")
    student = fxskip.transform(model, "farskip", example_inputs=(ids(),))
    reference = copy.deepcopy(model)
    computed = {student: student.__call__, reference: lambda x: rewired(reference, x, WIRINGS["farskip"])}
    for step in range(3):
        for one, forward in computed.items():
            if step == 0:
                one.optimizer = torch.optim.AdamW(one.parameters(), lr=1e-2)
            one.optimizer.zero_grad()
            forward(ids(seed=step)).square().mean().backward()
            one.optimizer.step()
    for (name, got), wanted in zip(student.named_parameters(), reference.parameters(), strict=True):
        assert_equal_tensors(name, got, wanted)
        assert not torch.equal(got, model.get_parameter(name)), name


def test_what_the_plan_says_of_a_leaf() -> None:
    plan = fxskip.plan(make("SkippingMoE"), "farskip", example_inputs=(ids(),))
    moe = next(block for block in plan.blocks if block.kind == "moe")

    assert moe.path == "layers.0.moe"
    assert moe.adds == ("routed", "shared")
    layer = make("SkippingMoE").layers[0]
    assert moe.costs.parameters == sum(p.numel() for m in (layer.moe, layer.ffn_norm) for p in m.parameters())
    assert moe.costs.flops_per_token is None
    assert moe.costs.experts_per_token == models.TOP
    assert "unknown" in str(plan)


def test_a_model_on_the_meta_device_can_be_planned() -> None:
    with torch.device("meta"):
        model = make("titan")
    given = torch.empty(2, 8, dtype=torch.long, device="meta")
    blocks = fxskip.plan(model, "farskip", example_inputs=(given,)).blocks

    assert [b.kind for b in blocks] == ["attention", "dense", "attention", "moe", "attention", "moe"]
