"""Why a layer could not be captured, in the user's terms, for causes that Dynamo tells in its own."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Cause:
    """What Dynamo's message contains, what that means, and what to do about it."""

    signs: tuple[str, ...]
    found: str
    hint: str


CAUSES = (
    Cause(
        ("data-dependent", "Data-dependent", "Dynamic shape operator", "nonzero"),
        "the layer cannot be captured as one graph: its code depends on values, as a loop over experts does",
        'use experts without a loop: model.set_experts_implementation("grouped_mm") or "batched_mm"',
    ),
    Cause(
        ("FSDP hooks", "_fully_shard"),
        "a module inside the layer is sharded by fully_shard, and its collectives cannot be captured",
        "call fully_shard on whole decoder layers and on the model",
    ),
    Cause(
        ("backwards hooks",),
        "a module inside the layer has a full backward hook, which a captured layer cannot run",
        "take it off; parameter.register_hook and hooks on the decoder layer itself run",
    ),
    Cause(
        ("ParamWrapper", "_activate_lora"),
        "LoRA's target_parameters exchange a parameter while the layer runs, which a captured layer cannot do",
        "use target_modules, and train the experts themselves: parameter.requires_grad_(True)",
    ),
    Cause(
        ("does not support `output_attentions=True`",),
        "the attention implementation gives no attention weights, and output_attentions asks for them",
        'model.set_attn_implementation("eager")',
    ),
)


def cause(message: str) -> Cause | None:
    """The known cause of a failed capture; None for any other."""
    return next((known for known in CAUSES if any(sign in message for sign in known.signs)), None)
