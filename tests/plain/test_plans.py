"""What a plan counts of plain models and captured programs, however they run their experts, against formulas."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import fxskip
from fxskip.planning import Plan, PlannedBlock, page
from fxskip.schedule.costs import CONTEXT
from tests.plain import models
from tests.plain.models import EXPERTS, TOP, D, Model
from tests.strict_html import StrictHtml

LAYERS = 2
IDS = torch.zeros(2, 7, dtype=torch.long)


def numel(*modules: nn.Module) -> int:
    return sum(p.numel() for module in modules for p in module.parameters())


def plan(model: Any, **wishes: Any) -> Plan:
    return fxskip.plan(model, "farskip", example_inputs=(IDS,), **wishes)


def as_model(model: nn.Module) -> nn.Module:
    return model


def exported(model: nn.Module) -> Any:
    return torch.export.export(model, (IDS,))


def flops(block: PlannedBlock) -> dict[str, float | None]:
    return {part.name: part.flops_per_token for part in block.costs.parts}


ATTENTION = 2 * (4 * D * D + 2 * D * CONTEXT / 2)
EXPERT = 2 * 2 * D * D
MOE = {"gate": 2 * D * EXPERTS, "routed": TOP * EXPERT, "shared": EXPERT}

# Programs are captured with the model's own code; a leaf hides experts of the model, not of the program.
CASES: list[tuple[str, Callable[[nn.Module], Any]]] = [
    ("IndexAddMoE", as_model),
    ("IndexAddMoE", fx.symbolic_trace),
    ("IndexAddMoE", exported),
    ("EinsumMoE", as_model),
    ("EinsumMoE", exported),
    ("MaskedSumMoE", fx.symbolic_trace),
    ("IntoSharedMoE", fx.symbolic_trace),
]


@pytest.mark.parametrize(("name", "capture"), CASES, ids=lambda given: getattr(given, "__name__", given))
def test_experts_cost_what_their_tokens_cost_however_they_are_run(
    name: str, capture: Callable[[nn.Module], Any]
) -> None:
    model = Model(getattr(models, name), LAYERS)
    made = plan(capture(model))
    attention, moe = made.blocks[2:]

    assert flops(attention) == {"attention": ATTENTION}
    assert flops(moe) == MOE
    assert (moe.costs.experts, moe.costs.experts_per_token, moe.costs.hidden_size) == (EXPERTS, TOP, D)
    layer = model.layers[1]
    assert attention.costs.parameters == numel(layer.attn, layer.attn_norm)
    assert moe.costs.parameters == numel(layer.moe, layer.ffn_norm)
    assert made.parameters == numel(model)
    assert made.outside_parameters == numel(model.embed, model.norm, model.head)
    # Nobody says which matrix makes the logits.
    assert made.flops_per_token is None and made.active_parameters is None
    assert made.block_flops_per_token == LAYERS * (ATTENTION + sum(MOE.values()))
    assert made.forward.compute_us is not None and made.forward.exposed_after_us is not None


def test_what_a_leaf_hides_is_unknown_and_not_nothing() -> None:
    """The router is outside of the leaf: what travels is known, what the experts compute is not."""
    made = plan(Model(models.SkippingMoE, LAYERS))
    moe = made.blocks[1]
    assert flops(moe) == MOE | {"routed": None}
    assert {w.name for w in moe.work if w.est_us is None} == {"routed"}
    assert all(transfer.est_us is not None for transfer in moe.transfers)
    assert made.parameters == numel(Model(models.SkippingMoE, LAYERS))
    assert made.layers[0].exchange_us is not None and made.layers[0].room_us is None
    assert made.forward.compute_us is None
    # The exchange runs beside attention and shared experts, whose times are known.
    assert made.forward.exposed_after_us is not None


def test_a_leaf_that_routes_itself_leaves_the_exchange_unknown() -> None:
    model = Model(models.WholeMoE, LAYERS)
    made = fxskip.plan(model, "farskip-moe", example_inputs=(IDS,), tensor_size=2)
    moe = made.blocks[1]
    assert [(p.name, p.flops_per_token) for p in moe.costs.parts] == [("moe", None)]
    assert (moe.costs.experts, moe.costs.experts_per_token) == (None, None)
    assert moe.costs.parameters == numel(model.layers[0].moe, model.layers[0].ffn_norm)
    assert [(t.name, t.bytes) for t in moe.transfers] == [
        ("dispatch", None),
        ("combine", None),
        ("all-reduce", None),
    ]
    assert made.forward.communication_us is None and made.forward.exposed_before_us is None
    row = made.layers[0]
    assert (row.exchange_us, row.room_us, row.margin_us) == (None, None, None)

    text = str(made)
    assert "dispatch unknown" in text and "unknown of compute" in text
    assert '"compute_us": null' in made.to_json()
    cells = [words for tag, words in StrictHtml(page(made)).texts if tag == "td"]
    assert "unknown" in cells


class WrittenOut(models.Attention):
    """Attention as two products over [batch * heads, length, width], with a softmax between them."""

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        parts = self.qkv(x).view(batch, length, 3, models.HEADS, D // models.HEADS).permute(2, 0, 3, 1, 4)
        q, k, v = (part.flatten(0, 1) for part in parts)
        later = torch.ones(length, length, dtype=torch.bool).triu(1)
        scores = torch.bmm(q, k.transpose(1, 2)).masked_fill(later, float("-inf"))
        seen = torch.bmm(scores.softmax(dim=-1), v).view(batch, models.HEADS, length, -1)
        return self.out(seen.transpose(1, 2).reshape(batch, length, D))


class WithEinsum(models.Attention):
    """Attention as two einsums over [batch, length, heads, width]."""

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, models.HEADS, D // models.HEADS).unbind(2)
        later = torch.ones(length, length, dtype=torch.bool).triu(1)
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k).masked_fill(later, float("-inf"))
        seen = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(dim=-1), v)
        return self.out(seen.reshape(batch, length, D))


@pytest.mark.parametrize("attention", [WrittenOut, WithEinsum])
@pytest.mark.parametrize("capture", [as_model, exported])
def test_attention_that_is_written_out_costs_what_a_fused_one_does(
    attention: type[models.Attention], capture: Callable[[nn.Module], Any]
) -> None:
    model = Model(models.IndexAddMoE, LAYERS)
    for layer in model.layers:
        layer.attn = attention()
    (part,) = plan(capture(model)).blocks[0].costs.parts
    assert part.flops_per_token == ATTENTION
    # The product with qkv, the one with out, and attention: scores are not stored.
    assert part.activations_per_token == (D + 3 * D) + (D + D) + (3 * D + D)


class Parallel(nn.Module):
    """Attention and experts read one norm of the stream, and are added to it together."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(D)
        self.attn = models.Attention()
        self.moe = models.IndexAddMoE()

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        return x + self.attn(h) + self.moe(h)


def test_what_parallel_blocks_share_counts_once() -> None:
    model = Model(models.IndexAddMoE, LAYERS)
    model.layers = nn.ModuleList([Parallel() for _ in range(LAYERS)])
    made = fxskip.plan(model, "identity", example_inputs=(IDS,))
    attention, moe = made.blocks[:2]
    layer = model.layers[0]
    assert attention.costs.parameters == numel(layer.norm, layer.attn)
    assert moe.costs.parameters == numel(layer.moe)
    assert made.outside_parameters == numel(model.embed, model.norm, model.head)


def test_layers_that_share_their_weights() -> None:
    model = Model(models.IndexAddMoE, LAYERS)
    for layer in model.layers:
        layer.moe.shared = model.layers[0].moe.shared  # type: ignore[union-attr]
    made = plan(model)
    assert made.parameters == numel(model)
    assert made.outside_parameters is None and "unknown outside of sub-blocks" in str(made)


def test_sizes_are_checked_against_what_the_graph_shows() -> None:
    with pytest.raises(fxskip.SpecError, match="3 ranks cannot share 4 attention heads"):
        plan(Model(models.IndexAddMoE, LAYERS), tensor_size=3)


def test_explain_tells_of_a_program_what_plan_told() -> None:
    program = fx.symbolic_trace(Model(models.IndexAddMoE, LAYERS))
    student = fxskip.transform(program, "farskip", example_inputs=(IDS,))
    assert fxskip.explain(student) == plan(program)


def test_a_model_in_double_precision_is_estimated_in_a_type_that_gpus_have() -> None:
    made = plan(Model(models.IndexAddMoE, LAYERS).double())
    assert (made.deployment.dtype, made.deployment.instead_of) == ("bfloat16", "float64")
