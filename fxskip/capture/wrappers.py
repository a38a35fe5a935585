"""What users put around a model: PEFT, torch.compile, DistributedDataParallel."""

from __future__ import annotations

import sys
from typing import Any

import torch._dynamo
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from fxskip.errors import CaptureError


def inner_model(model: Any) -> Any:
    """The causal language model inside any wrappers; a model without one as it is."""
    while True:
        if isinstance(model, DistributedDataParallel):
            model = model.module
        elif isinstance(model, torch._dynamo.OptimizedModule):
            model = model._orig_mod
        elif is_peft(model):
            model = model.get_base_model()
        else:
            return model


def is_peft(model: object) -> bool:
    """Whether `model` is a PeftModel. PEFT is not imported: where it was not, nothing is of its kind."""
    peft = sys.modules.get("peft")
    return peft is not None and isinstance(model, peft.PeftModel)


def refuse_wrapped(who: str, model: nn.Module) -> None:
    """Raise CaptureError for a wrapper that would not notice that the model inside changes."""
    while is_peft(model):  # its adapters are modules of the model inside
        model = inner_model(model)
    if isinstance(model, DistributedDataParallel | torch._dynamo.OptimizedModule):
        raise CaptureError(
            who,
            f"the model is inside {type(model).__name__}",
            hint="transform the model first, then wrap the result (DistributedDataParallel, torch.compile)",
        )
