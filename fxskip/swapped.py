"""Modules whose class is swapped, in place, for a subclass of it that is made at run time.

A decoder layer becomes a region, a module a leaf, a decoder an eager one: same attributes, hooks and identity. The
subclass exists in no module under its name, so pickle and deepcopy make it again from the original class.
"""

from __future__ import annotations

from typing import Any, ClassVar

from torch import nn

from fxskip.sharding import refuse_to_pickle


class Swapped(nn.Module):
    """Mixin that comes before the original class in a swapped module's class."""

    fxskip_base: ClassVar[type[nn.Module]]
    """The original class."""

    @classmethod
    def fxskip_members(cls, base: type[nn.Module]) -> dict[str, Any]:
        """What the subclass of `base` has beside what it inherits, and, as __name__, what it is called."""
        return {"__name__": f"FxSkip{base.__name__}", "__module__": cls.__module__}

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        refuse_to_pickle(self)
        mixin = next(kind for kind in type(self).__mro__ if Swapped in kind.__bases__)
        return _bare, (mixin, self.fxskip_base), vars(self).copy()


_CLASSES: dict[tuple[type[Swapped], type[nn.Module]], type[nn.Module]] = {}


def swapped_class(mixin: type[Swapped], base: type[nn.Module]) -> type[nn.Module]:
    """The subclass of `mixin` and `base`; one for each pair."""
    if (mixin, base) not in _CLASSES:
        members = mixin.fxskip_members(base)
        name = members.pop("__name__")
        _CLASSES[mixin, base] = type(name, (mixin, base), members | {"fxskip_base": base})
    return _CLASSES[mixin, base]


def _bare(mixin: type[Swapped], base: type[nn.Module]) -> nn.Module:
    cls = swapped_class(mixin, base)
    return cls.__new__(cls)
