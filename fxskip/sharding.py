"""Models that FSDP2 has sharded: the class below its wrapper, and a copy without the sharding.

`fully_shard` changes a module's class, as fxskip does: `Layer` becomes `FSDPLayer`, made of `FSDPModule` and
`Layer`. fxskip rewires the class below and leaves the wrapper on top, whichever of the two came first.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch.distributed
from torch import nn

from fxskip.errors import PassError

if torch.distributed.is_available():
    from torch.distributed.fsdp import FSDPModule
else:

    class FSDPModule:  # type: ignore[no-redef]
        """Stands in on builds without torch.distributed, where nothing can be sharded."""


_STATE = "__composable_api_state_key"
"""How the attributes begin that torch's composable wrappers keep their state in."""


def own_class(module: nn.Module) -> type[nn.Module]:
    """The module's class, without what `fully_shard` put on top of it."""
    found: type[nn.Module] = type(module)
    return found.__bases__[-1] if isinstance(module, FSDPModule) else found


def set_own_class(module: nn.Module, new: type[nn.Module]) -> None:
    """Give `module` the class `new`, in place, below what `fully_shard` put on top."""
    wrapper: type[nn.Module] = type(module)
    module.__class__ = _wrapped(wrapper, new) if issubclass(wrapper, FSDPModule) else new


_WRAPPED: dict[tuple[type[nn.Module], type[nn.Module]], type[nn.Module]] = {}


def _wrapped(wrapper: type[nn.Module], new: type[nn.Module]) -> type[nn.Module]:
    """The class that `fully_shard` would make of `new`, with the members of the one that it made."""
    if (wrapper, new) not in _WRAPPED:
        *above, below = wrapper.__bases__
        members = {"__deepcopy__": vars(wrapper)["__deepcopy__"], "__module__": wrapper.__module__}
        name = wrapper.__name__.replace(below.__name__, new.__name__)
        _WRAPPED[wrapper, new] = type(name, (*above, new), members)
    return _WRAPPED[wrapper, new]


def is_sharded(model: object) -> bool:
    """Whether `fully_shard` has been applied to the model or to a part of it."""
    return isinstance(model, nn.Module) and any(isinstance(module, FSDPModule) for module in model.modules())


def copy_without_sharding(model: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """A deep copy in which no module is sharded. `memo` holds what stands for each parameter and buffer.

    FSDP2 refuses to be copied. Here its classes, states and hooks are left out.
    """
    sharded: list[nn.Module] = [module for module in model.modules() if isinstance(module, FSDPModule)]
    for module in sharded:
        kind = own_class(module)
        memo[id(module)] = kind.__new__(kind)
    for module in sharded:
        memo[id(module)].__dict__.update(
            {name: copy.deepcopy(value, memo) for name, value in _without_fsdp(vars(module)).items()}
        )
    twin: nn.Module = copy.deepcopy(model, memo)
    for module in twin.modules():
        vars(module).pop("_is_fsdp_managed_module", None)
        vars(module).pop("_fsdp_use_orig_params", None)
    return twin


def refuse_to_pickle(module: nn.Module) -> None:
    """Raise PassError for a sharded module: a pickle of one rank would hold a part of the weights and no sharding."""
    if isinstance(module, FSDPModule):
        raise PassError(
            "pickle",
            f"{type(module).__name__} is sharded by fully_shard and cannot be pickled",
            hint="save a state_dict: torch.distributed.checkpoint.state_dict.get_model_state_dict(model)",
        )


def _without_fsdp(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """A module's attributes without FSDP2's state and hooks."""
    plain = {name: value for name, value in attributes.items() if not name.startswith(_STATE)}
    for name, hooks in plain.items():
        if name.endswith("_hooks"):
            plain[name] = type(hooks)((key, hook) for key, hook in hooks.items() if not _is_of_fsdp(hook))
    return plain


def _is_of_fsdp(hook: Any) -> bool:
    return str(getattr(hook, "__module__", "")).startswith("torch.distributed.fsdp.")
