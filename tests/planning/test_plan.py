"""A plan: what each sub-block reads, what can run beside its communication, and what it costs."""

import json

import pytest
import torch
from transformers import AutoConfig

import fxskip
from fxskip.analysis import Analysis
from fxskip.planning.deployment import Wishes
from fxskip.schedule.costs import CONTEXT
from fxskip.schedule.hardware import load_hardware
from tests.ecosystem import architectures
from tests.zoo import COMMON, FAMILIES, tiny

LAYERS = 4  # of deepseek_v3: layer 0 is dense, layers 1-3 have experts


@pytest.fixture(scope="module")
def model():
    return tiny("deepseek_v3", layers=LAYERS)


@pytest.fixture(scope="module")
def plan_of(model):
    """Makes plans of `model` as `fxskip.plan` does, from one capture. A test below compares with that."""
    analysis = Analysis.of_original("plan", model, None)

    def plan(spec, **wishes):
        loaded = fxskip.load_spec(spec)
        return analysis.plan(loaded, analysis.connect(loaded), Wishes(load_hardware("h200"), **wishes))

    return plan


def attention(layer):
    return f"model.layers.{layer}.self_attn"


def mlp(layer):
    return f"model.layers.{layer}.mlp"


def custom(*rules):
    return {"fxskip": 1, "name": "custom", "connect": list(rules)}


ATTENTION_WITHOUT_ROUTED = {
    attention(2): ("routed@1",),
    attention(3): ("routed@1",),
}
MLP_WITHOUT_ATTENTION = {mlp(i): ("attention@1",) for i in range(LAYERS)}
MLP_OF_THE_LAYER_BEFORE = {
    attention(1): ("dense@1",),
    attention(2): ("routed@1", "shared@1"),
    attention(3): ("routed@1", "shared@1"),
}

WITHOUT = {
    "farskip": ATTENTION_WITHOUT_ROUTED | MLP_WITHOUT_ATTENTION,
    "farskip-attention": ATTENTION_WITHOUT_ROUTED,
    "farskip-moe": MLP_WITHOUT_ATTENTION,
    "ladder": MLP_OF_THE_LAYER_BEFORE | MLP_WITHOUT_ATTENTION,
    "identity": {},
    # 75% of 4 layers: layers 1-3.
    "farskip-last-75": ATTENTION_WITHOUT_ROUTED | {mlp(i): ("attention@1",) for i in (1, 2, 3)},
}


@pytest.mark.parametrize("spec", WITHOUT)
def test_each_sub_block_has_a_row_that_says_what_it_no_longer_sees(plan_of, spec):
    plan = plan_of(spec)
    assert [(b.layer, b.path) for b in plan.blocks] == [
        (layer, path(layer)) for layer in range(LAYERS) for path in (attention, mlp)
    ]
    assert [b.kind for b in plan.blocks] == ["attention", "dense", *["attention", "moe"] * 3]
    assert {b.path: b.without for b in plan.blocks if b.without} == WITHOUT[spec]
    assert plan.rewired == len(WITHOUT[spec])
    assert plan.streams == (1 if spec in ("identity", "farskip-moe") else 2)
    assert {b.path for b in plan.blocks if b.reads == "full stream"} == {
        b.path for b in plan.blocks if not b.without
    }


def test_reads_names_the_layer_whose_output_is_missing(plan_of):
    reads = {b.path: b.reads for b in plan_of("farskip").blocks}
    assert reads[attention(2)] == "stream without routed of layer 1"
    assert reads[mlp(2)] == "stream without attention of layer 2"


# Two that can run at the same time: neither sees what the other makes, or not the part that travels.
NEXT_ATTENTION = {mlp(i): (attention(i + 1),) for i in (1, 2)}
OWN_ATTENTION = {mlp(i): (attention(i),) for i in range(LAYERS)}
OWN_MLP = {attention(i): (mlp(i),) for i in range(LAYERS)}

WINDOWS = {
    # (sub-blocks under the dispatch, under the combine or all-reduce)
    "farskip": (OWN_ATTENTION, NEXT_ATTENTION | OWN_MLP),
    "farskip-attention": ({}, NEXT_ATTENTION),
    "farskip-moe": (OWN_ATTENTION, OWN_MLP),
    "ladder": (
        OWN_ATTENTION | {attention(i): (mlp(i - 1),) for i in (1, 2, 3)},
        OWN_MLP | {mlp(i): (attention(i + 1),) for i in (0, 1, 2)},
    ),
    "identity": ({}, {}),
}


@pytest.mark.parametrize("spec", WINDOWS)
def test_windows_are_the_blocks_that_need_not_wait(plan_of, spec):
    blocks = plan_of(spec).blocks
    dispatch = {b.path: b.window.dispatch_under for b in blocks if b.window.dispatch_under}
    combine = {b.path: b.window.combine_under for b in blocks if b.window.combine_under}
    assert (dispatch, combine) == WINDOWS[spec]
    flops = {b.path: b.costs.flops_per_token for b in blocks}
    for block in blocks:
        window = block.window
        assert window.dispatch_flops_per_token == sum(flops[p] for p in window.dispatch_under)
        assert window.combine_flops_per_token == sum(flops[p] for p in window.combine_under)


def test_a_block_that_sees_the_write_before_it_has_no_window_and_a_wider_gap_a_wider_one(plan_of):
    two_back = plan_of(custom({"blocks": "all", "without": ["all@2"]}))
    assert all(not (b.window.dispatch_under or b.window.combine_under) for b in two_back.blocks)

    shortcut = plan_of(custom({"blocks": "moe", "without": ["all@1", "all@2"]}))
    windows = {b.path: b.window.dispatch_under for b in shortcut.blocks if b.window.dispatch_under}
    assert windows == {mlp(i): (mlp(i - 1), attention(i)) for i in (1, 2, 3)}


def test_a_rule_that_changes_nothing_at_a_block_says_why(plan_of):
    refused = {b.path: b.refused for b in plan_of("farskip").blocks if b.refused}
    assert refused.keys() == {attention(0), attention(1)}
    assert "no write that early" in refused[attention(0)]
    assert "dense in layer 0" in refused[attention(1)]
    # A block that no rule selects was not refused anything.
    assert not any(b.refused for b in plan_of("identity").blocks)


def test_parameters_are_those_of_the_module_and_its_norm(model, plan_of):
    for block in plan_of("farskip").blocks:
        layer = model.model.layers[block.layer]
        norm = layer.input_layernorm if block.kind == "attention" else layer.post_attention_layernorm
        parameters = [*model.get_submodule(block.path).parameters(), *norm.parameters()]
        assert block.costs.parameters == sum(p.numel() for p in parameters), block.path


def test_flops_and_bytes_are_those_of_the_matrix_products(model, plan_of):
    attention_plan, dense_plan, _, moe_plan, *_ = plan_of("farskip").blocks
    c = model.config
    heads, d = c.num_attention_heads, c.hidden_size
    query_key, value = c.qk_nope_head_dim + c.qk_rope_head_dim, c.v_head_dim
    projections = (
        d * c.q_lora_rank
        + c.q_lora_rank * heads * query_key
        + d * (c.kv_lora_rank + c.qk_rope_head_dim)
        + c.kv_lora_rank * heads * (c.qk_nope_head_dim + value)
        + heads * value * d
    )
    # A query meets half of the context on average; a multiplication and an addition are 2 FLOPs.
    assert attention_plan.costs.flops_per_token == 2 * (
        projections + heads * (query_key + value) * CONTEXT / 2
    )
    assert dense_plan.costs.flops_per_token == 2 * 3 * d * c.intermediate_size
    experts = c.num_experts_per_tok + c.n_shared_experts
    router = d * c.n_routed_experts
    assert moe_plan.costs.flops_per_token == 2 * (3 * experts * d * c.moe_intermediate_size + router)
    assert moe_plan.costs.experts_per_token == c.num_experts_per_tok
    assert (moe_plan.costs.experts, moe_plan.costs.hidden_size) == (c.n_routed_experts, d)
    assert dense_plan.costs.experts_per_token == attention_plan.costs.experts_per_token == 0


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_flops_of_grouped_query_attention(attention):
    model = tiny("mixtral", layers=2, attn_implementation=attention)
    attention_plan, moe_plan, *_ = fxskip.plan(model, "farskip").blocks
    d, heads, groups, width, wide = 64, 4, 2, 16, 64
    products = 2 * d * heads * width + 2 * d * groups * width + heads * 2 * width * CONTEXT / 2
    assert attention_plan.costs.flops_per_token == 2 * products
    assert attention_plan.costs.heads == heads
    # Projections read and write; attention reads queries, keys and values and writes its result, but no scores.
    (part,) = attention_plan.costs.parts
    projections = (d + heads * width) + 2 * (d + groups * width) + (heads * width + d)
    assert part.activations_per_token == projections + heads * width + 2 * groups * width + heads * width
    assert moe_plan.costs.flops_per_token == 2 * (2 * 3 * d * wide + d * 4)


def test_json_holds_everything(plan_of):
    plan = plan_of("farskip")
    read = json.loads(plan.to_json())
    assert read["rewired"] == plan.rewired
    assert read["wiring_hash"] == plan.wiring_hash
    assert [b["path"] for b in read["blocks"]] == [b.path for b in plan.blocks]
    assert [tuple(b["without"]) for b in read["blocks"]] == [b.without for b in plan.blocks]
    assert [b["refused"] for b in read["blocks"]] == [b.refused for b in plan.blocks]
    assert [b["costs"]["parameters"] for b in read["blocks"]] == [b.costs.parameters for b in plan.blocks]
    under = [tuple(b["window"]["combine_under"]) for b in read["blocks"]]
    assert under == [b.window.combine_under for b in plan.blocks]


def test_gradients_averaged_in_the_backward_pass(model, plan_of):
    """What every rank holds: a ring a layer and one for what is outside; nothing where nobody else has tokens."""
    spec = {"fxskip": 1, "preset": "farskip", "schedule": {"gradients": "in_backward"}}
    plan = plan_of(spec, expert_size=4)
    held = {name: p.numel() * 4 for name, p in model.named_parameters() if ".experts." not in name}
    h200 = load_hardware("h200")
    us = [
        1e6 * (2 * size * 3 / 4 / h200.domain.bytes_per_s(4) + h200.collective_start_s.value)
        for size in (
            sum(n for name, n in held.items() if name.startswith(f"model.layers.{layer}."))
            for layer in range(LAYERS)
        )
    ]
    outside = sum(n for name, n in held.items() if ".layers." not in name)
    us.append(1e6 * (2 * outside * 3 / 4 / h200.domain.bytes_per_s(4) + h200.collective_start_s.value))
    found = plan.gradients
    assert (found.ranks, found.bytes) == (4, sum(held.values()))
    assert found.est_us == pytest.approx(sum(us))
    assert found.compute_us == 2 * plan.forward.compute_us
    assert "of gradients averaged over 4 ranks" in str(plan)
    assert json.loads(plan.to_json())["gradients"]["bytes"] == found.bytes
    many = plan_of(spec | {"schedule": {"gradients": "in_backward", "bucket_mib": 1}}, expert_size=4)
    assert many.gradients == found  # the layers of this model are smaller than a bucket
    assert plan_of("farskip", expert_size=4).gradients is None
    assert plan_of(spec, expert_size=1).gradients is None


def test_one_process_has_no_communication_to_hide(plan_of):
    alone = plan_of("farskip", expert_size=1)
    assert alone.layers == () and not any(block.transfers for block in alone.blocks)
    assert (alone.forward.communication_us, alone.forward.exposed_before_us) == (0, 0)
    assert "window" not in str(alone)


def test_more_tokens_and_longer_sequences_cost_more(model, plan_of):
    few = fxskip.plan(model, "identity", tokens_per_rank=512, context_tokens=512)
    many = plan_of("identity")
    assert (many.deployment.tokens, many.deployment.context) == (4096, 4096)
    c = model.config
    keys = c.num_attention_heads * (c.qk_nope_head_dim + c.qk_rope_head_dim + c.v_head_dim)
    a_token = [p.blocks[2].work[0].flops / p.deployment.tokens for p in (few, many)]
    assert a_token[1] - a_token[0] == pytest.approx(2 * keys * (4096 - 512) / 2)
    sent = [p.blocks[3].transfers[0].domain_bytes for p in (few, many)]
    assert sent == [
        t * c.num_experts_per_tok * c.hidden_size * 4 * 3 / 4 for t in (512, 4096)
    ]  # fp32, 4 ranks


def test_parts_of_a_moe(model, plan_of):
    c, layer = model.config, model.model.layers[2]
    costs = plan_of("farskip").blocks[5].costs
    parts = {part.name: part for part in costs.parts}
    assert set(parts) == {"gate", "routed", "shared"}

    def numel(module):
        return sum(p.numel() for p in module.parameters())

    moe = layer.mlp
    assert parts["gate"].parameters == numel(moe.gate) + numel(layer.post_attention_layernorm)
    assert parts["routed"].parameters == numel(moe.experts)
    assert parts["shared"].parameters == numel(moe.shared_experts)
    d, wide, k = c.hidden_size, c.moe_intermediate_size, c.num_experts_per_tok
    assert parts["routed"].activations_per_token == k * (d + 2 * wide + wide + d)
    assert parts["shared"].activations_per_token == 2 * (d + wide) + wide + d
    assert parts["gate"].activations_per_token == d + c.n_routed_experts
    assert costs.active_parameters == costs.parameters - parts["routed"].parameters * (
        1 - k / c.n_routed_experts
    )


def test_experts_that_all_see_every_token_count_for_those_that_are_sent_to_them():
    """transformers runs all experts of Llama 4 on all tokens, scaled by zero where they were not chosen."""
    moe = fxskip.plan(tiny("llama4_text", layers=2), "farskip").blocks[1]
    (routed,) = [part for part in moe.costs.parts if part.name == "routed"]
    assert (moe.costs.experts, moe.costs.experts_per_token) == (4, 1)
    assert routed.flops_per_token == 2 * 3 * 64 * 64


def test_totals_count_every_parameter_once(model, plan_of):
    plan, c = plan_of("farskip"), model.config
    assert plan.parameters == sum(p.numel() for p in model.parameters())
    assert plan.head_parameters == c.vocab_size * c.hidden_size
    tied = tiny("qwen2_moe", layers=2, tie_word_embeddings=True)
    assert fxskip.plan(tied, "farskip").parameters == sum(p.numel() for p in tied.parameters())


def test_layers_with_another_mask_cost_less_and_are_told_apart():
    """Llama 4: three layers in four see no further back than their chunk."""
    plan = fxskip.plan(
        tiny("llama4_text", layers=4, attention_chunk_size=64, no_rope_layer_interval=4), "identity"
    )
    chunked, full = (plan.blocks[2 * layer].costs.flops_per_token for layer in (0, 3))
    assert full - chunked == 2 * 4 * (16 + 16) * (CONTEXT / 2 - 64 / 2)
    assert "layers 1–2: as layer 0" in str(plan)


def test_text_has_a_line_for_each_sub_block(plan_of):
    plan = plan_of("farskip")
    text = str(plan)
    assert "6 of 8 sub-blocks rewired" in text
    for block in plan.blocks:
        (line,) = [line for line in text.splitlines() if f" {block.path} " in line]
        assert line.split()[:2] == [str(block.layer), block.kind]


def test_planning_changes_nothing_in_the_model():
    model = tiny("deepseek_v3", layers=3)

    def everything():
        return [(name, type(m), sorted(vars(m)), m.training) for name, m in model.named_modules()]

    before, weights = everything(), {k: v.clone() for k, v in model.state_dict().items()}
    fxskip.plan(model, "farskip")
    assert everything() == before
    assert not fxskip.is_transformed(model)
    assert all(torch.equal(v, weights[k]) for k, v in model.state_dict().items())


def test_a_config_is_enough(model, plan_of):
    config = AutoConfig.for_model(
        "deepseek_v3", **(COMMON | FAMILIES["deepseek_v3"] | {"num_hidden_layers": LAYERS})
    )
    from_config, from_model = fxskip.plan(config, "farskip"), plan_of("farskip")
    assert from_config.wiring_hash == from_model.wiring_hash
    for one, other in zip(from_config.blocks, from_model.blocks, strict=True):
        assert (one.path, one.without, one.window) == (other.path, other.without, other.window)
        assert one.costs.parameters == other.costs.parameters
        assert [m.domain_bytes * 2 for m in one.transfers] == [m.domain_bytes for m in other.transfers]
    assert (from_config.deployment.dtype, from_model.deployment.dtype) == ("bfloat16", "float32")


def test_a_config_of_a_model_too_large_for_memory():
    """Six layers of DeepSeek-V3 at its real width: 36 billion parameters, 73 GB in bf16."""
    config = AutoConfig.for_model("deepseek_v3", num_hidden_layers=6)
    blocks = fxskip.plan(config, "farskip").blocks
    moe = next(b for b in blocks if b.kind == "moe")
    d, wide = config.hidden_size, config.moe_intermediate_size
    experts = config.n_routed_experts + config.n_shared_experts
    assert moe.costs.parameters == 3 * experts * d * wide + config.n_routed_experts * d + d
    assert sum(b.costs.parameters for b in blocks) > 34e9


def test_explain_says_what_plan_promised(model, plan_of):
    assert fxskip.explain(fxskip.transform(model, "ladder")) == plan_of("ladder")


def test_the_scan_of_a_mixer_is_unknown_and_a_gated_convolution_has_none():
    """Qwen3-Next: two layers of gated delta rule and one of attention. LFM2: a short convolution between gates."""
    model = architectures.tiny("qwen3_next")
    plan = fxskip.plan(model, "farskip")
    mixer, attention_plan = plan.blocks[0].costs, plan.blocks[2].costs
    c = model.config
    keys, values = (
        c.linear_num_key_heads * c.linear_key_head_dim,
        c.linear_num_value_heads * c.linear_value_head_dim,
    )
    projections = c.hidden_size * (2 * keys + 3 * values + 2 * c.linear_num_value_heads)
    convolution = (2 * keys + values) * c.linear_conv_kernel_dim
    assert [(part.name, part.flops_per_token) for part in mixer.parts] == [
        ("mixer", 2 * (projections + convolution)),
        ("scan", None),
    ]
    assert attention_plan.flops_per_token is not None
    assert plan.parameters == sum(p.numel() for p in model.parameters())
    assert plan.flops_per_token is None and plan.forward.compute_us is None
    text = str(plan)
    assert f"{2 * (projections + convolution) / 1e6:.2f} + unknown" in text
    assert all(f" {block.path} " in text for block in plan.blocks)

    short = architectures.tiny("lfm2_moe")
    mixer = fxskip.plan(short, "identity").blocks[0].costs
    d = short.config.hidden_size
    assert [part.name for part in mixer.parts] == ["mixer"]
    assert mixer.flops_per_token == 2 * (3 * d * d + d * short.config.conv_L_cache + d * d)


def test_attention_that_selects_its_keys_is_unknown():
    """DeepSeek-V3.2: an indexer chooses the keys of a query."""
    plan = fxskip.plan(architectures.tiny("deepseek_v32"), "farskip")
    attention_plan = plan.blocks[0]
    assert attention_plan.costs.flops_per_token is None and attention_plan.est_us is None
    assert plan.blocks[3].est_us is not None
