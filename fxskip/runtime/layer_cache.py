"""The part of a cache that one decoder layer uses: keys and values, recurrent states, an indexer's keys.

A layer finds its part by its index. Captured, that index would be a constant of the graph, and every
layer would need a graph of its own. So a layer gets only its part, and the index no longer matters.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin


class LayerCache(Cache):
    """A cache of one layer, whatever index it is asked for; inside the layer it stands for the whole cache."""

    def __init__(self, part: Any) -> None:
        super().__init__(layers=[part])

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Append keys [B, heads, S, D] and values, and return what attention looks at."""
        keys, values = super().update(key_states, value_states, 0, *args, **kwargs)
        return keys, values

    def update_conv_state(self, conv_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        """Store the convolution's state [B, channels, kernel]."""
        return super().update_conv_state(conv_states, 0, *args, **kwargs)

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> Any:
        """Store the recurrent state of linear attention or of an SSM."""
        return super().update_recurrent_state(recurrent_states, 0, *args, **kwargs)

    def update_indexer(self, indexer_key_states: Tensor, layer_idx: int) -> Any:
        """Append the indexer's keys [B, S, D] and return all of them."""
        return super().update_indexer(indexer_key_states, 0)

    # The questions a layer asks. Some are younger than the oldest supported transformers, which never asks them.

    def get_conv_state(self, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        """The convolution's state, or None before the first token."""
        return super().get_conv_state(0, *args, **kwargs)

    def get_recurrent_state(self, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        """The recurrent state, or None before the first token."""
        return super().get_recurrent_state(0, *args, **kwargs)

    def has_previous_state(self, layer_idx: int | None = None, *args: Any, **kwargs: Any) -> Any:
        """Whether the layer has a convolution's or recurrent state."""
        return super().has_previous_state(0, *args, **kwargs)

    def is_recording_past(self, layer_idx: int) -> Any:
        """Whether the layer keeps what a later `crop` needs."""
        return super().is_recording_past(0)

    def get_seq_length(self, layer_idx: int = 0) -> Any:
        """Number of tokens this layer has seen."""
        return super().get_seq_length(0)

    def get_query_offset(self, layer_idx: int = 0) -> Any:
        """Position of the next token."""
        return super().get_query_offset(0)

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """Length and offset of the keys that the next `query_length` tokens look at."""
        length, offset = super().get_mask_sizes(query_length, 0)
        return length, offset

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """Tokens that the layer can hold; -1 without a limit."""
        length: int = super().get_max_length(0)
        return length


_BY_LAYER = tuple(name for name in vars(LayerCache) if hasattr(Cache, name) and not name.startswith("__"))
"""The methods that take the index of a layer. A cache with one of its own does more than to look up the layer."""


def layer_caches(kwargs: dict[str, Any], layer: int) -> dict[str, Any]:
    """`kwargs` with every cache replaced by the part of decoder layer `layer`."""
    return {
        name: _part(value, layer) if isinstance(value, Cache) else value for name, value in kwargs.items()
    }


def uses_one_part(layer: nn.Module, index: int) -> bool:
    """Whether all modules of decoder layer number `index` look under that number in a cache.

    Some have two attentions a layer, or share keys with other layers: these need the whole cache.
    """
    found = {value for m in layer.modules() for name, value in vars(m).items() if name.endswith("layer_idx")}
    return found <= {index, None}


@contextmanager
def on_device(kwargs: dict[str, Any], layer: int, device: torch.device) -> Iterator[None]:
    """Around decoder layer `layer`: what `Cache.update` of an offloaded cache does before and after its layer's.

    The layer's keys and values have arrived, the next layer's are on their way, and the layer's leave afterwards.
    """
    offloaded = [cache for cache in kwargs.values() if isinstance(cache, Cache) and _moves(cache, layer)]
    for cache in offloaded:
        current = torch.cuda.default_stream(device)
        current.wait_stream(cache.prefetch_stream)
        cache.prefetch_stream.wait_stream(current)
        cache.prefetch(layer + 1, cache.only_non_sliding)
    yield
    for cache in offloaded:
        cache.offload(layer, cache.only_non_sliding)


def _moves(cache: Cache, layer: int) -> bool:
    """Whether the layer's part is kept on the CPU between its uses; recurrent states never are."""
    return cache.offloading and not _is_special(cache) and isinstance(cache.layers[layer], CacheLayerMixin)


def _part(cache: Cache, layer: int) -> Cache:
    if _is_special(cache):
        return cache  # it does more than hand the call on: correct as it is, but one capture a layer
    while len(cache.layers) <= layer and cache.layer_class_to_replicate is not None:
        cache.layers.append(cache.layer_class_to_replicate())
    return LayerCache(cache.layers[layer])


def _is_special(cache: Cache) -> bool:
    return any(getattr(type(cache), name) is not getattr(Cache, name) for name in _BY_LAYER)
