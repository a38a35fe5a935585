"""DeepSeek-V3, Qwen3-235B and Llama-4-Scout from their configs alone, against what their makers publish."""

import resource
import time
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig

import fxskip
from tests.zoo import tiny

CONFIGS = Path(__file__).parents[2] / "examples" / "configs"
KEYS = 4096 / 2

# (all parameters of the text model, active parameters as published, layers, attention FLOPs beside the products)
PUBLISHED = {
    "deepseek-v3": (671.0e9, 37e9, 61, 61 * 2 * 128 * KEYS * (192 + 128)),
    "qwen3-235b-a22b": (235.1e9, 22e9, 94, 94 * 2 * 64 * KEYS * (128 + 128)),
    "llama-4-scout": (107.8e9, 17e9, 48, 48 * 2 * 40 * KEYS * (128 + 128)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PUBLISHED)
def test_a_plan_of_a_model_that_fits_no_machine_here(name):
    parameters, active, layers, attention = PUBLISHED[name]
    config = AutoConfig.from_pretrained(CONFIGS / f"{name}.json")
    torch._dynamo.reset()
    started = time.process_time()
    plan = fxskip.plan(config, "farskip", expert_size=8)
    assert time.process_time() - started < 30
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < 24 * 2**20  # KiB

    assert plan.parameters == pytest.approx(parameters, rel=0.001)
    # Publishers count the embedding table as active and round to billions.
    assert plan.active_parameters + plan.head_parameters == pytest.approx(active, rel=0.02)
    # Norms are parameters and no products: some 0.01 %.
    assert plan.flops_per_token - attention == pytest.approx(2 * plan.active_parameters, rel=0.001)

    text = config.get_text_config()
    exchanging = [row.layer for row in plan.layers]
    assert exchanging == list(range(getattr(text, "first_k_dense_replace", 0), layers))
    sent = 4096 * text.num_experts_per_tok * text.hidden_size * 2 * 7 / 8
    for block in plan.blocks:
        if block.kind == "moe":
            assert [(t.name, t.domain_bytes) for t in block.transfers] == [
                ("dispatch", sent),
                ("combine", sent),
            ]
    for row in plan.layers:
        assert row.exposed_after_us <= row.exposed_before_us <= row.exchange_us
    assert len(str(plan).splitlines()) < 60  # layers that repeat are told once


@pytest.mark.slow
def test_a_transform_of_48_layers():
    model = tiny("qwen3_moe", layers=48)
    torch._dynamo.reset()
    started = time.process_time()
    fxskip.transform(model, "farskip")
    assert time.process_time() - started < 15


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_configs_that_users_can_try_are_read(name):
    text = AutoConfig.from_pretrained(CONFIGS / f"{name}.json").get_text_config()
    assert text.num_hidden_layers == PUBLISHED[name][2]
