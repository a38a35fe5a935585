"""The reference of this folder, judged by the original models and by the layers that tests/reference.py spells out."""

import pytest
import torch

from fxskip.capture.hf import decoder_layers
from tests import reference as by_hand
from tests.ecosystem.architectures import tiny
from tests.ecosystem.reference import FARSKIP, LADDER, blocks_of, rewired
from tests.zoo import batch

NOTHING = {"attention": "", "moe": "", "dense": ""}
# An ordinary layer, parallel blocks, one block a layer, a shortcut, scaled residuals, hyper-connections, three reads.
SHAPES = ("qwen2_moe", "cohere2_moe", "nemotron_h", "longcat_flash", "zaya", "hy_v4", "gemma4_text", "dbrx")


def logits(model):
    with torch.no_grad():
        return model(input_ids=batch(2, 12)["input_ids"], use_cache=False).logits


def by_hooks(model, drops):
    return logits(rewired(model, decoder_layers(model)[0], drops))


@pytest.mark.parametrize("model_type", SHAPES)
def test_dropping_nothing_is_the_original(model_type):
    model = tiny(model_type)
    assert torch.equal(by_hooks(model, NOTHING), logits(model))


@pytest.mark.parametrize("model_type", SHAPES)
def test_each_kind_of_drop_shows(model_type):
    """Else a missing hook, a module that is not the one meant, would go unnoticed."""
    model = tiny(model_type)
    stock = logits(model)
    kinds = {block.kind for layer in decoder_layers(model)[1] for block in blocks_of(layer) if block.sees}
    for kind in kinds:
        moved = by_hooks(model, NOTHING | {kind: "all"}) - stock
        assert moved.abs().max() > 0.01 * stock.std(), kind


@pytest.mark.parametrize("model_type", ["qwen2_moe", "deepseek_v3", "llama4_text", "mixtral"])
@pytest.mark.parametrize(
    ("drops", "attention", "mlp"),
    [(FARSKIP, "routed", "all"), (LADDER, "all", "all")],
    ids=["farskip", "ladder"],
)
def test_it_agrees_with_the_layers_written_by_hand(model_type, drops, attention, mlp):
    model = tiny(model_type)
    rule = by_hand.Without(attention=((attention, 1),), mlp=((mlp, 1),))
    rules = dict.fromkeys(range(len(decoder_layers(model)[1])), rule)
    assert torch.equal(by_hooks(model, drops), logits(by_hand.rewired(model, rules)))


def test_the_model_is_left_alone():
    model = tiny("qwen2_moe")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    by_hooks(model, FARSKIP)
    assert all("forward" not in vars(layer) for layer in decoder_layers(model)[1])
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
