"""Which attention a model really calls: what scaled_dot_product_attention is given, read off PyTorch's profiler."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch.profiler import ProfilerActivity, profile


@dataclass(frozen=True)
class AttentionCall:
    """One call. mask: the shape of attn_mask, or None; queries: their number, S."""

    queries: int
    is_causal: bool
    mask: tuple[int, ...] | None


def attention_calls(run: Callable[[], Any]) -> list[AttentionCall]:
    """The calls that `run` makes, in order. What is captured by then only: a capture calls attention too."""
    run()
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        run()
    calls = []
    for event in profiler.events():
        if event.name == "aten::scaled_dot_product_attention":
            query, _, _, mask, *_ = event.input_shapes
            is_causal = event.concrete_inputs[5]
            assert isinstance(is_causal, bool)
            calls.append(AttentionCall(query[-2], is_causal, tuple(mask) or None))
    return calls
