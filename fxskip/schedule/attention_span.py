"""How many keys a query meets, from what the model's config says about each layer's mask."""

from __future__ import annotations

from typing import Any


def attended(context: int, window: int | None = None, chunk: int | None = None) -> float:
    """Keys that a query meets on average under causal attention over `context` tokens.

    window  a query sees itself and the tokens just before it, `window` in all
    chunk   a query sees no further back than the start of its chunk of that many tokens
    """
    if chunk is not None and chunk < context:
        return chunk / 2
    if window is not None and window < context:
        return window - window * window / (2 * context)  # the first `window` queries see less
    return context / 2


def attended_in(config: Any, layer: int, context: int) -> float:
    """The same for one decoder layer, by the text config's layer_types, sliding_window and attention_chunk_size.

    Masks of other kinds (sparse attention that selects keys) count as full causal attention, which they are below.
    """
    window = getattr(config, "sliding_window", None)
    types = getattr(config, "layer_types", None)
    # Without a list of types a model that has a window has it in every layer.
    kind = types[layer] if types else "sliding_attention"
    if kind == "sliding_attention":
        return attended(context, window=window)
    if kind == "chunked_attention":
        return attended(context, chunk=getattr(config, "attention_chunk_size", None))
    return attended(context)
