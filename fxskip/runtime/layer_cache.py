"""The part of a key-value cache that one decoder layer uses.

A layer finds its part by its index. Captured, that index would be a constant of the graph, and every
layer would need a graph of its own. So a layer gets only its part, and the index no longer matters.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers import Cache


class LayerCache:
    """Stands for a `transformers.Cache` inside one decoder layer; keys [B, heads, S, D], values likewise."""

    def __init__(self, part: Any) -> None:
        self.part = part

    def update(
        self, key: Tensor, value: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Append the new keys and values and return all of the layer's; `layer_idx` is not needed."""
        keys, values = self.part.update(key, value, *args, **kwargs)
        return keys, values

    def get_seq_length(self, layer_idx: int = 0) -> Any:
        """Number of tokens this layer has seen."""
        return self.part.get_seq_length()


def needs_whole_cache(layer: nn.Module, index: int) -> bool:
    """Whether a module of decoder layer `index` uses another part of a cache, as a second attention does."""
    return any(getattr(module, "layer_idx", None) not in (None, index) for module in layer.modules())


def layer_caches(kwargs: dict[str, Any], layer: int) -> dict[str, Any]:
    """`kwargs` with every cache replaced by the part of decoder layer `layer`."""
    return {
        name: _part(value, layer) if isinstance(value, Cache) else value for name, value in kwargs.items()
    }


def _part(cache: Cache, layer: int) -> LayerCache | Cache:
    if type(cache).update is not Cache.update or cache.offloading:
        return cache  # it does more than hand the update on: correct as it is, but one capture a layer
    while len(cache.layers) <= layer and cache.layer_class_to_replicate is not None:
        cache.layers.append(cache.layer_class_to_replicate())
    part = cache.layers[layer]
    if hasattr(part, "update_conv_state") or hasattr(part, "update_indexer"):
        return cache  # more than keys and values: recurrent states, an index of keys
    return LayerCache(part)
