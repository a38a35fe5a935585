"""Keep the code around the decoder layers out of a user's torch.compile.

For a compiler, transformers writes the causal mask out, [B, 1, S, S], and no longer says `is_causal`: SDPA then
has no flash kernel to choose. Eagerly it looks at the padding mask and at the positions, and writes a mask only
where there must be one. So the decoder of a rewired model always runs eagerly. What lies outside of it, the
language model head and the loss, is compiled if the user compiles the model.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from fxskip.sharding import own_class, set_own_class
from fxskip.swapped import Swapped, swapped_class


class EagerDecoder(Swapped):
    """Mixin of the module that holds the decoder layers and makes their masks."""

    @classmethod
    def fxskip_members(cls, base: type[nn.Module]) -> dict[str, Any]:
        """A forward that Dynamo leaves alone, and the name of `base`: transformers looks up by name what a class can
        record and how its weights are named."""
        reason = "fxskip runs the decoder eagerly, so that attention stays causal without a written-out mask"
        return {
            "forward": torch.compiler.disable(base.forward, reason=reason),
            "__module__": base.__module__,
            "__name__": base.__name__,
            "__qualname__": base.__qualname__,
        }


def keep_eager(decoder: nn.Module) -> None:
    """Have `decoder`, in place, run its forward as written when somebody compiles what is around it."""
    if not isinstance(decoder, EagerDecoder):
        set_own_class(decoder, swapped_class(EagerDecoder, own_class(decoder)))
