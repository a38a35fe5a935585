"""Weights of a model whose experts are spread over processes: whole ones from the parts, and parts of whole ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor


def is_spread(model: nn.Module) -> bool:
    """Whether some parameter lies on several processes."""
    return any(isinstance(parameter, DTensor) for parameter in model.parameters())


def whole_state_dict(model: nn.Module) -> dict[str, Any]:
    """The state dict with every tensor whole, in the original's layout; those that were gathered are on the CPU.

    All processes of the mesh must call it. One tensor is gathered at a time.
    """
    return {
        name: tensor.full_tensor().cpu() if isinstance(tensor, DTensor) else tensor
        for name, tensor in model.state_dict().items()
    }


def own_parts(state_dict: Mapping[str, Any], model: nn.Module) -> dict[str, Any]:
    """`state_dict` with this process's part where the model holds a part and a whole tensor was given."""
    held = model.state_dict()
    return {name: _part(tensor, held.get(name)) for name, tensor in state_dict.items()}


def _part(given: Any, held: Any) -> Any:
    if not isinstance(held, DTensor) or isinstance(given, DTensor) or not isinstance(given, Tensor):
        return given
    if given.shape != held.shape:
        return given  # load_state_dict says what is wrong with it
    # Every process has the whole tensor, so nothing needs to be sent.
    return distribute_tensor(given.to(held.device), held.device_mesh, held.placements, src_data_rank=None)
