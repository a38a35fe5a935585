"""The hand-written models, checked without fxskip: against transformers and against written formulas."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.reference import Drop, Rules, Stream, Without, Write, rewired
from tests.transform.compare import assert_same_logits, assert_same_training, logits
from tests.zoo import MODEL_TYPES, batch, tiny

FARSKIP = Without(attention=(("routed", 1),), mlp=(("all", 1),))


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_without_rules_the_reference_is_the_original(model_type: str) -> None:
    model = tiny(model_type)
    reference = rewired(model, {})

    assert_same_training(reference, model, batch())
    assert_same_training(reference, model, batch(3, 17, padded=True))
    assert list(reference.state_dict()) == list(model.state_dict())


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_each_rule_changes_the_outputs(model_type: str) -> None:
    model = tiny(model_type)
    original = logits(model, batch())
    for rule in (Without(attention=FARSKIP.attention), Without(mlp=FARSKIP.mlp)):
        assert (logits(rewired(model, {2: rule}), batch()) - original).abs().mean() > 1e-2


# A stream of numbers: 1 is the embedding and every addend is another power of two, so that a value spells out
# what was added to it. Writes 1 to 4: attention 2; routed 4 and shared 8; attention 16; dense 32.
@pytest.mark.parametrize(
    ("drops", "unseen"),
    [
        ((), 0),
        ((("all", 1),), 32),
        ((("routed", 1),), 0),  # a dense write has no such addend
        ((("all", 2),), 16),
        ((("routed", 3),), 4),
        ((("shared", 3),), 8),
        ((("routed", 3), ("shared", 3)), 4 + 8),
        ((("all", 4), ("routed", 3), ("all", 1)), 2 + 4 + 32),
        ((("all", 5), ("routed", 9)), 0),  # before the first write
    ],
)
def test_a_read_sees_every_addend_that_it_does_not_drop(drops: tuple[Drop, ...], unseen: int) -> None:
    stream = Stream(torch.tensor(1))
    for addends in ({"attention": 2}, {"routed": 4, "shared": 8}, {"attention": 16}, {"dense": 32}):
        values = {name: torch.tensor(value) for name, value in addends.items()}
        stream.write(Write(values, (torch.tensor(sum(addends.values())),)))

    assert stream.read(drops).item() == 63 - unseen
    assert stream.values[-1].item() == 63


class TwoLayers:
    """deepseek_v3 with two MoE layers, as plain functions of what each block reads."""

    def __init__(self) -> None:
        self.model = tiny("deepseek_v3", layers=2, first_k_dense_replace=0)
        self.batch = batch()

    def embedding(self) -> Tensor:
        return self.model.model.embed_tokens(self.batch["input_ids"])

    def attention(self, index: int, x: Tensor) -> Tensor:
        layer, positions = self.model.model.layers[index], torch.arange(x.shape[1])[None, :]
        rotary = self.model.model.rotary_emb(x, positions)
        out: Tensor
        out, _ = layer.self_attn(layer.input_layernorm(x), attention_mask=None, position_embeddings=rotary)
        return out

    def moe(self, index: int, x: Tensor) -> tuple[Tensor, Tensor]:
        layer = self.model.model.layers[index]
        x = layer.post_attention_layernorm(x)
        _, weights, chosen = layer.mlp.gate(x)
        routed = layer.mlp.experts(x.flatten(0, 1), chosen, weights).view(x.shape)
        return routed, layer.mlp.shared_experts(x)

    def head(self, x: Tensor) -> Tensor:
        out: Tensor = self.model.lm_head(self.model.model.norm(x))
        return out


def farskip(m: TwoLayers) -> Tensor:
    x = m.embedding()
    r = x + m.attention(0, x)
    routed, shared = m.moe(0, x)
    x, y = r + (routed + shared), r + shared
    r = x + m.attention(1, y)
    routed, shared = m.moe(1, x)
    return m.head(r + (routed + shared))


def attention_only(m: TwoLayers) -> Tensor:
    x = m.embedding()
    r = x + m.attention(0, x)
    routed, shared = m.moe(0, r)
    x, y = r + (routed + shared), r + shared
    r = x + m.attention(1, y)
    routed, shared = m.moe(1, r)
    return m.head(r + (routed + shared))


def moe_only(m: TwoLayers) -> Tensor:
    x = m.embedding()
    r = x + m.attention(0, x)
    routed, shared = m.moe(0, x)
    x = r + (routed + shared)
    r = x + m.attention(1, x)
    routed, shared = m.moe(1, x)
    return m.head(r + (routed + shared))


def ladder(m: TwoLayers) -> Tensor:
    x = m.embedding()
    r = x + m.attention(0, x)
    routed, shared = m.moe(0, x)
    x, y = r + (routed + shared), r
    r = x + m.attention(1, y)
    routed, shared = m.moe(1, x)
    return m.head(r + (routed + shared))


def all_two_back(m: TwoLayers) -> Tensor:
    e = m.embedding()
    r = e + m.attention(0, e)
    routed, shared = m.moe(0, r)  # two writes back would be before the first
    x, y = r + (routed + shared), e + (routed + shared)  # y misses the attention of layer 0
    a = m.attention(1, y)
    z = r + a  # misses the MoE of layer 0
    routed, shared = m.moe(1, z)
    return m.head((x + a) + (routed + shared))


@pytest.mark.parametrize(
    ("formula", "rule"),
    [
        (farskip, FARSKIP),
        (attention_only, Without(attention=FARSKIP.attention)),
        (moe_only, Without(mlp=FARSKIP.mlp)),
        (ladder, Without(attention=(("all", 1),), mlp=(("all", 1),))),
        (all_two_back, Without(attention=(("all", 2),), mlp=(("all", 2),))),
    ],
)
def test_the_reference_is_the_formula(formula: Callable[[TwoLayers], Tensor], rule: Without) -> None:
    two = TwoLayers()
    rules: Rules = {0: rule, 1: rule}
    with torch.no_grad():
        expected = formula(two)

    assert torch.equal(logits(rewired(two.model, rules), two.batch), expected)


def test_a_split_sum_adds_shared_before_routed() -> None:
    m = TwoLayers()
    with torch.no_grad():
        x = m.embedding()
        for layer in (0, 1):
            r = x + m.attention(layer, x)
            routed, shared = m.moe(layer, r)
            x = (r + shared) + routed
        expected = m.head(x)

    assert torch.equal(logits(rewired(m.model, {}, split_sum=True), m.batch), expected)
    assert not torch.equal(logits(m.model, m.batch), expected)  # the order is visible in the last bits


@pytest.mark.parametrize("rule", [Without(), FARSKIP])
def test_generation_with_a_cache_equals_recomputing_every_step(rule: Without) -> None:
    reference = rewired(tiny("qwen2_moe"), dict.fromkeys(range(3), rule))
    given = {name: batch(padded=True)[name] for name in ("input_ids", "attention_mask")}

    cached = reference.generate(**given, max_new_tokens=6, do_sample=False, use_cache=True)
    recomputed = reference.generate(**given, max_new_tokens=6, do_sample=False, use_cache=False)

    assert cached.shape == (2, 15)
    assert torch.equal(cached, recomputed)


def test_a_rule_for_a_layer_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ValueError, match=r"layers \[3\], the model has layers 0 to 2"):
        rewired(tiny("mixtral"), {3: FARSKIP})


def test_the_model_given_is_left_alone() -> None:
    model = tiny("mixtral")
    before = logits(model, batch())
    reference = rewired(model, dict.fromkeys(range(3), FARSKIP))
    with torch.no_grad():
        reference.model.layers[0].mlp.experts.down_proj.zero_()

    assert torch.equal(logits(model, batch()), before)
    with pytest.raises(AssertionError, match="logits differ"):
        assert_same_logits(reference, model, batch())
