"""The wiring of a rewired program, where copies and pickles of an fx.GraphModule carry it along."""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx
from torch.fx.graph_module import _USER_PRESERVED_ATTRIBUTES_KEY

from fxskip.checkpoint.record import WiringRecord
from fxskip.schedule.costs import ModelCosts

_KEY = "fxskip"


@dataclass(frozen=True)
class ProgramRecord:
    """Plain data: what `explain` shows of a program, whose original graph is gone."""

    model: str
    """Name of the original program's class."""
    wiring: WiringRecord
    costs: ModelCosts
    operations: tuple[str, ...]
    """The program's operations in order, as it was rewired; see `operations`."""


def keep_record(program: fx.GraphModule, record: ProgramRecord) -> None:
    """Attach the record to a program: an attribute, which pickle keeps, that `meta` tells deepcopy to keep too."""
    setattr(program, _KEY, record)
    program.meta.setdefault(_USER_PRESERVED_ATTRIBUTES_KEY, {})[_KEY] = record


def operations(program: fx.GraphModule) -> tuple[str, ...]:
    """The names of the program's operations in order. Unlike its code, they are the same after pickling."""
    calls = [n for n in program.graph.nodes if n.op.startswith("call_")]
    return tuple(str(getattr(n.target, "__name__", n.target)) for n in calls)


def program_record(model: object) -> ProgramRecord | None:
    """The record of a rewired program; None for any other object."""
    found = vars(model).get(_KEY) if isinstance(model, fx.GraphModule) else None
    return found if isinstance(found, ProgramRecord) else None
