from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedConfig, StaticCache

import fxskip
from fxskip.runtime import capture_count
from fxskip.runtime.layer_cache import LayerCache, layer_caches
from tests.zoo import batch, tiny


def config() -> PreTrainedConfig:
    return tiny("mixtral").config


def dynamic() -> Cache:
    return DynamicCache()


def dynamic_with_config() -> Cache:
    return DynamicCache(config=config())


def static() -> Cache:
    return StaticCache(config=config(), max_cache_len=16)


def keys_and_values(tokens: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    key, value = torch.randn(2, 2, 2, tokens, 16, generator=generator)
    return key, value


@pytest.mark.parametrize("make", [dynamic, dynamic_with_config, static])
def test_a_layer_sees_its_part_of_the_cache(make: Any) -> None:
    """The same updates through the parts and through a whole cache; layers get different ones."""
    ours, whole = make(), make()
    for tokens, step in ((5, 0), (1, 1), (2, 2)):
        for layer in range(3):
            part = layer_caches({"past_key_values": ours}, layer)["past_key_values"]
            assert isinstance(part, LayerCache)
            assert int(part.get_seq_length()) == int(whole.get_seq_length(layer))
            new = keys_and_values(tokens, 10 * step + layer)
            # The index that the layer passes is that of the layer in its model; the part needs none.
            got, expected = part.update(*new, 99), whole.update(*new, layer)
            assert all(torch.equal(one, other) for one, other in zip(got, expected, strict=True))
            assert int(part.get_seq_length(99)) == int(whole.get_seq_length(layer))
    assert int(ours.get_seq_length()) == 8
    for one, other in zip(ours.layers, whole.layers, strict=True):
        assert torch.equal(one.keys, other.keys)


def test_other_arguments_are_handed_on_untouched() -> None:
    mask = torch.ones(2, 3)
    assert layer_caches({"attention_mask": mask, "use_cache": True}, 0) == {
        "attention_mask": mask,
        "use_cache": True,
    }


class CountingCache(DynamicCache):
    """A cache that does more in `update` than to hand it on."""

    updates = 0

    def update(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        self.updates += 1
        keys, values = super().update(*args, **kwargs)
        return keys, values


def test_a_cache_with_an_update_of_its_own_stays_whole() -> None:
    cache = CountingCache()
    assert layer_caches({"past_key_values": cache}, 1) == {"past_key_values": cache}


@pytest.mark.parametrize("implementation", ["dynamic", pytest.param("static", marks=pytest.mark.slow)])
def test_all_layers_of_a_kind_share_their_captures_in_generate(implementation: str) -> None:
    """One capture for the prompt and one for a single new token; with the layer index in it, it were one a layer."""
    model = tiny("mixtral", layers=3)
    student = fxskip.transform(model, "identity")
    torch._dynamo.reset()
    before = capture_count()
    given = {name: tensor for name, tensor in batch(2, 9).items() if name != "labels"}
    options = {"max_new_tokens": 3, "do_sample": False, "cache_implementation": implementation}

    assert torch.equal(student.generate(**given, **options), model.generate(**given, **options))
    assert capture_count() - before == 2
