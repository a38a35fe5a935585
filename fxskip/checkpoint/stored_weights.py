"""The weights of a saved model as their files describe them: names, shapes and types, without the values."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from fxskip.errors import CheckpointError

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_RESTORE = "restore the file from a copy, or convert the original model again"
_CHUNK = 1 << 24
"""Elements looked at in one go: 64 MiB of float32."""


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a file. `dtype` is the name in the file: F32, BF16."""

    file: Path
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class StoredWeights:
    """All tensors of a folder by name. Made by `read_headers`."""

    tensors: Mapping[str, StoredTensor]

    @property
    def files(self) -> tuple[Path, ...]:
        return tuple(sorted({tensor.file for tensor in self.tensors.values()}))

    def __str__(self) -> str:
        elements = sum(torch.Size(tensor.shape).numel() for tensor in self.tensors.values())
        types = ", ".join(sorted({tensor.dtype for tensor in self.tensors.values()}))
        files = f"{len(self.files)} file{'s' if len(self.files) > 1 else ''}"
        return f"{files}, {len(self.tensors)} tensors, {elements:,} values, {types}"

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tensor.shape for name, tensor in self.tensors.items()}

    def are_equal(self, one: str, other: str) -> bool:
        """Whether two tensors hold the same values. Both are read, chunk by chunk."""
        pairs = zip(self._chunks(one), self._chunks(other), strict=False)
        same_shape = self.tensors[one].shape == self.tensors[other].shape
        return same_shape and all(torch.equal(a, b) for a, b in pairs)

    def not_finite(self) -> list[str]:
        """Names of the tensors that hold an infinity or a NaN. All are read, chunk by chunk."""
        return [
            name
            for name in self.tensors
            # Through float32, because isfinite knows no 8-bit floats.
            if not all(bool(c.float().isfinite().all()) for c in self._chunks(name) if c.is_floating_point())
        ]

    def _chunks(self, name: str) -> Iterator[Tensor]:
        with safe_open(self.tensors[name].file, "pt") as file:
            # The tensor is a view of the mapped file; only the chunk in hand has to be in memory.
            yield from file.get_tensor(name).flatten().split(_CHUNK)


def read_headers(folder: Path) -> StoredWeights:
    """Read the headers of a folder's safetensors files, and compare them with the index if there is one.

    CheckpointError: no weights, a file is missing, cut short or not named by the index, or index and files differ.
    """
    single, index = folder / SINGLE, folder / INDEX
    if single.exists() and index.exists():
        raise _fault(
            folder, f"holds both {SINGLE} and {INDEX}", f"delete what is not of the last save: {_RESTORE}"
        )
    if single.exists():
        files, placed = [single], None
    elif index.exists():
        placed = _read_index(index)
        files = sorted({folder / file for file in placed.values()})
    else:
        found = sorted(path.name for path in [*folder.glob("*.bin"), *folder.glob("*.safetensors")])
        others = f"; it holds {', '.join(found)}" if found else ""
        raise _fault(folder, f"has neither {SINGLE} nor {INDEX}{others}", _RESTORE)
    _require_the_files(folder, files)
    tensors = {name: tensor for file in files for name, tensor in _read_header(file).items()}
    if placed is not None:
        _require_the_index(folder, placed, tensors)
    return StoredWeights(tensors)


def _read_index(index: Path) -> dict[str, str]:
    try:
        placed = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        return {str(name): str(file) for name, file in placed.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _fault(index, f"is no index of weights: {error}", _RESTORE) from None


def _read_header(path: Path) -> dict[str, StoredTensor]:
    try:
        with safe_open(path, "pt") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            return {
                name: StoredTensor(path, tuple(part.get_shape()), part.get_dtype())
                for name, part in slices.items()
            }
    except SafetensorError as error:
        raise _fault(path, f"is damaged or cut short: {error}", _RESTORE) from None


def _require_the_files(folder: Path, files: list[Path]) -> None:
    if missing := [path.name for path in files if not path.is_file()]:
        raise _fault(folder, f"lacks {', '.join(missing)}, which {INDEX} names", _RESTORE)
    if stray := sorted(path.name for path in folder.glob("model*.safetensors") if path not in files):
        raise _fault(folder, f"holds {', '.join(stray)} of another save", "delete these files")


def _require_the_index(folder: Path, placed: Mapping[str, str], tensors: Mapping[str, StoredTensor]) -> None:
    real = {name: tensor.file.name for name, tensor in tensors.items()}
    wrong = sorted(name for name in placed.keys() | real.keys() if placed.get(name) != real.get(name))
    if wrong:
        first = wrong[0]
        found = f"{first}: {placed.get(first, 'absent')} in {INDEX}, really {real.get(first, 'absent')}"
        raise _fault(folder, f"{found}; {len(wrong)} such tensors", _RESTORE)


def _fault(path: Path, found: str, hint: str) -> CheckpointError:
    return CheckpointError("weights", f"{path.name} {found}", where=str(path), hint=hint)
