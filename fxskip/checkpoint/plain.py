"""The wiring of a rewired model that is not from transformers: kept on the model, which stays of its class.

There is no config and no loader of its own. deepcopy, pickle and torch.save of the whole model carry the wiring;
to load weights alone, build the model, transform it with the same spec, and call load_state_dict.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from fxskip.checkpoint.record import WiringRecord
from fxskip.runtime.regions import install
from fxskip.spec import load_spec

_ATTRIBUTE = "fxskip"


@dataclass(frozen=True)
class PlainRecord:
    """Plain data in an attribute of the model: what `explain` needs to capture the model again."""

    wiring: WiringRecord
    layers: tuple[str, ...]
    inputs: tuple[Any, ...]
    """The example inputs, their tensors without values."""


def adopt_plain(model: nn.Module, record: PlainRecord) -> None:
    """Install the wiring of `record` in the layers of `model`, in place, and keep the record on the model."""
    layers = {path: model.get_submodule(path) for path in record.layers}
    wiring, runtime = record.wiring.wiring(where=type(model).__name__), load_spec(record.wiring.spec).runtime
    install(layers, wiring.regions, record.wiring.leaves, runtime)
    keep_record(model, record)


def keep_record(model: nn.Module, record: PlainRecord) -> None:
    """Keep the record on the model."""
    setattr(model, _ATTRIBUTE, record)


def plain_record(model: object) -> PlainRecord | None:
    """The record of a rewired model that is not from transformers; None for any other object."""
    found = vars(model).get(_ATTRIBUTE) if isinstance(model, nn.Module) else None
    return found if isinstance(found, PlainRecord) else None
