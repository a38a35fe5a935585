"""Keep the code around the decoder layers out of a user's torch.compile.

For a compiler, transformers writes the causal mask out, [B, 1, S, S], and no longer says `is_causal`: SDPA then
has no flash kernel to choose. Eagerly it looks at the padding mask and at the positions, and writes a mask only
where there must be one. So the decoder of a rewired model always runs eagerly. What lies outside of it, the
language model head and the loss, is compiled if the user compiles the model.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import nn

from fxskip.capture.sharding import own_class, refuse_to_pickle, set_own_class


class EagerDecoder(nn.Module):
    """Mixin of the module that holds the decoder layers and makes their masks."""

    fxskip_base: ClassVar[type[nn.Module]]

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        refuse_to_pickle(self)
        return _bare_decoder, (self.fxskip_base,), vars(self).copy()


def keep_eager(decoder: nn.Module) -> None:
    """Have `decoder`, in place, run its forward as written when somebody compiles what is around it."""
    if not isinstance(decoder, EagerDecoder):
        set_own_class(decoder, _eager_class(own_class(decoder)))


_EAGER_CLASSES: dict[type[nn.Module], type[nn.Module]] = {}


def _eager_class(base: type[nn.Module]) -> type[nn.Module]:
    """The subclass of `base` with a forward that Dynamo leaves alone; one for each class.

    It bears the name of `base`: transformers looks up by name what a class can record and how its weights are named.
    """
    if base not in _EAGER_CLASSES:
        reason = "fxskip runs the decoder eagerly, so that attention stays causal without a written-out mask"
        members = {
            "fxskip_base": base,
            "forward": torch.compiler.disable(base.forward, reason=reason),
            "__module__": base.__module__,
            "__qualname__": base.__qualname__,
        }
        _EAGER_CLASSES[base] = type(base.__name__, (EagerDecoder, base), members)
    return _EAGER_CLASSES[base]


def _bare_decoder(base: type[nn.Module]) -> nn.Module:
    cls = _eager_class(base)
    return cls.__new__(cls)
