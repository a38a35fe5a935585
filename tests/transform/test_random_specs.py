"""Random rules for every block of small models, against the hand-written model."""

import random

import pytest

import fxskip
from tests.reference import Drop, Rules, Without, rewired
from tests.transform.compare import assert_same_training
from tests.transform.wirings import REORDERED, Spec, spec
from tests.zoo import batch, tiny

LAYERS = 4


def random_drops(draw: random.Random) -> tuple[Drop, ...]:
    """Of up to two writes, at most five back: further than a layer, less far than the model."""
    return tuple(
        (draw.choice(("routed", "shared", "all")), n) for n in draw.sample(range(1, 6), draw.randint(0, 2))
    )


def in_words(rules: Rules) -> Spec:
    """The same rules as a spec, one rule a block, named by its module path."""
    connect = []
    for layer, without in rules.items():
        for module, drops in (("self_attn", without.attention), ("mlp", without.mlp)):
            if drops:
                written = [f"{name}@{n}" for name, n in drops]
                connect.append({"blocks": f"model.layers.{layer}.{module}", "without": written})
    return spec(*connect)


def with_an_effect(rules: Rules, *, names: set[str]) -> Rules:
    """Without the blocks where nothing is dropped, which a spec must not name.

    Writes before block b are b - 1, ..., 1; odd ones are attention, which has neither routed nor shared addends.
    """

    def effective(block: int, drops: tuple[Drop, ...]) -> tuple[Drop, ...]:
        for name, n in drops:
            if n < block and (name == "all" or ((block - n) % 2 == 0 and name in names)):
                return drops
        return ()

    return {
        layer: Without(effective(2 * layer + 1, without.attention), effective(2 * layer + 2, without.mlp))
        for layer, without in rules.items()
    }


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(
    ("model_type", "names"),
    [("qwen2_moe", {"routed", "shared"}), ("mixtral", {"routed"})],
    ids=["qwen2_moe", "mixtral"],
)
def test_random_rules_are_wired_as_written(model_type: str, names: set[str], seed: int) -> None:
    draw = random.Random(seed)
    drawn = {layer: Without(random_drops(draw), random_drops(draw)) for layer in range(LAYERS)}
    rules = with_an_effect(drawn, names=names)
    assert any(without != Without() for without in rules.values()), "this seed draws no rule; take another"
    model = tiny(model_type, layers=LAYERS)

    student = fxskip.transform(model, in_words(rules))

    assert_same_training(student, rewired(model, rules), batch(padded=True), gradient_tolerance=REORDERED)
