"""Keys a query meets, against masks that are written out."""

from types import SimpleNamespace

import pytest

from fxskip.schedule.attention_span import attended, attended_in

CONTEXT = 512


def mean_of_mask(sees) -> float:
    """Keys a query meets on average, half a key for itself: what L / 2 counts of a full causal mask."""
    pairs = sum(sees(q, k) for q in range(CONTEXT) for k in range(q + 1))
    return pairs / CONTEXT - 0.5


@pytest.mark.parametrize("window", [1, 64, 200, 512, 4096])
def test_a_sliding_window(window):
    expected = mean_of_mask(lambda q, k: q - k < window)
    assert attended(CONTEXT, window=window) == pytest.approx(expected, abs=0.51)


@pytest.mark.parametrize("chunk", [64, 256, 512, 8192])
def test_chunks(chunk):
    assert attended(CONTEXT, chunk=chunk) == mean_of_mask(lambda q, k: q // chunk == k // chunk)


def test_a_full_causal_mask():
    assert attended(CONTEXT) == mean_of_mask(lambda q, k: True) == CONTEXT / 2


def test_the_config_says_which_layer_has_which_mask():
    config = SimpleNamespace(
        layer_types=["full_attention", "sliding_attention", "chunked_attention", "linear_attention"],
        sliding_window=64,
        attention_chunk_size=128,
    )
    found = [attended_in(config, layer, CONTEXT) for layer in range(4)]
    assert found == [256, attended(CONTEXT, window=64), 64, 256]


def test_a_window_without_a_list_of_layer_types_is_in_every_layer():
    assert attended_in(SimpleNamespace(sliding_window=64), 3, CONTEXT) == attended(CONTEXT, window=64)
    assert attended_in(SimpleNamespace(sliding_window=None), 3, CONTEXT) == CONTEXT / 2
    assert attended_in(SimpleNamespace(), 3, CONTEXT) == CONTEXT / 2
