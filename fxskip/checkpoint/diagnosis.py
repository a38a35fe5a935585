"""What an examination of a saved model found, as text and as JSON. Made by `fxskip.checkpoint.doctor.examine`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from fxskip.spec import load_spec

Kind = Literal["rewired", "stock", "neither"]
Status = Literal["ok", "FAIL", "skipped"]


@dataclass(frozen=True)
class Check:
    """One thing that was looked at. `remedy` says what to do where it failed."""

    name: str
    status: Status
    found: str
    remedy: str = ""

    def __str__(self) -> str:
        line = f"  {self.status:<9}{self.name:<16}{_indented(self.found)}"
        return line + (f"\n{'':11}{'remedy':<16}{_indented(self.remedy)}" if self.remedy else "")


@dataclass(frozen=True)
class Diagnosis:
    """What `examine` found. `spec` has all rules, presets replaced; None where there is no readable spec."""

    path: Path
    kind: Kind
    base_model_type: str | None
    """The type of the original, `mixtral`."""
    spec: Mapping[str, Any] | None
    saved_with: Mapping[str, str]
    installed: Mapping[str, str]
    checks: tuple[Check, ...]

    @property
    def is_intact(self) -> bool:
        """Whether no check failed. A stock checkpoint can be intact too: see `kind`."""
        return all(check.status != "FAIL" for check in self.checks)

    def to_json(self) -> str:
        """All of it as JSON text."""
        return json.dumps(asdict(self) | {"path": str(self.path), "is_intact": self.is_intact}, indent=2)

    def __str__(self) -> str:
        lines = [f"{self.path}: {self._title()}, {'intact' if self.is_intact else 'NOT intact'}"]
        if self.saved_with:
            pairs = [(name, self.saved_with.get(name, "?"), now) for name, now in self.installed.items()]
            parts = [f"{n} {then}" + (f" (now {now})" if now != then else "") for n, then, now in pairs]
            lines.append(f"  saved with {', '.join(parts)}")
        if self.spec is not None:
            lines += ["  spec", *(f"    {line}" for line in load_spec(self.spec).to_yaml().splitlines())]
        return "\n".join([*lines, *map(str, self.checks)])

    def _title(self) -> str:
        if self.kind == "neither":
            return "no checkpoint of a language model that the installed transformers knows"
        if self.kind == "stock":
            return f"stock {self.base_model_type} checkpoint, not rewired"
        name = "" if self.spec is None else f" by the spec {self.spec.get('name', 'without a name')!r}"
        return f"{self.base_model_type or 'model of unknown type'}, rewired{name}"


def _indented(text: str) -> str:
    return text.replace("\n", "\n" + " " * 27)
