"""Training and evaluation text as windows of token ids, and the order in which they are used."""

# N windows, L length of a window, B windows in one batch

import hashlib
from collections.abc import Iterator, Mapping, Sized
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from fxskip.errors import FxskipError

IGNORED = -100  # the label of a position that is not to be predicted, as everywhere in transformers


@dataclass(frozen=True)
class Batch:
    """Some windows on the models' device.

    `attention_mask_BL` is None when nothing is padded: then attention can use its fast causal kernel.
    `targets_BL` are the labels shifted by one: position t predicts targets_BL[:, t], or counts for nothing if
    that is -100. All losses and metrics use these positions, so that they speak of the same tokens.
    """

    input_ids_BL: Tensor
    attention_mask_BL: Tensor | None
    targets_BL: Tensor
    tokens: int


@dataclass(frozen=True)
class Windows:
    """All windows in memory, on the CPU. Made by `as_windows`."""

    input_ids_NL: Tensor
    attention_mask_NL: Tensor
    labels_NL: Tensor

    def __len__(self) -> int:
        return self.input_ids_NL.shape[0]

    @cached_property
    def digest(self) -> str:
        """sha256 of everything that a run depends on."""
        sha = hashlib.sha256()
        for tensor in (self.input_ids_NL, self.attention_mask_NL, self.labels_NL):
            sha.update(str(tuple(tensor.shape)).encode())
            sha.update(tensor.contiguous().numpy().tobytes())
        return sha.hexdigest()

    def batch(self, indices_B: Tensor, device: torch.device) -> Batch:
        mask_BL, labels_BL = self.attention_mask_NL[indices_B], self.labels_NL[indices_B]
        targets_BL = torch.full_like(labels_BL, IGNORED)
        targets_BL[:, :-1] = labels_BL[:, 1:].masked_fill(~mask_BL[:, :-1], IGNORED)
        return Batch(
            self.input_ids_NL[indices_B].to(device),
            None if bool(mask_BL.all()) else mask_BL.to(device, torch.int64),
            targets_BL.to(device),
            int(mask_BL.sum()),
        )

    def in_order(self, batch_size: int, device: torch.device) -> Iterator[Batch]:
        """Every window once."""
        for indices_B in torch.arange(len(self)).split(batch_size):
            yield self.batch(indices_B, device)

    def shuffled(self, step: int, batch_size: int, seed: int, device: torch.device) -> Batch:
        """The batch of optimizer step `step` (from 0).

        The windows are an endless row of epochs, each in a new random order; a batch may straddle two. The
        order follows from seed and epoch alone, so the step number is the position in the data.
        """
        places = range(step * batch_size, (step + 1) * batch_size)
        orders = {epoch: self._order(epoch, seed) for epoch in {place // len(self) for place in places}}
        indices = [orders[place // len(self)][place % len(self)] for place in places]
        return self.batch(torch.stack(indices), device)

    def _order(self, epoch: int, seed: int) -> Tensor:
        # Mixed by a hash: seed + epoch would give run 1 in its first epoch the order of run 0 in its second.
        mixed = hashlib.sha256(f"{seed}/{epoch}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(mixed[:7], "little"))
        return torch.randperm(len(self), generator=generator)


def as_windows(who: str, name: str, data: Any, vocabulary: int) -> Windows:
    """`data` as windows: a tensor of token ids [N, L], or a sequence of dicts with `input_ids`.

    The dicts may have `attention_mask` (0: padding) and `labels` (-100: not to be predicted), each as long as
    `input_ids`; shorter windows are padded on the right. Anything with a length will do: a list, a map-style
    torch dataset, a datasets.Dataset. It is read once, into memory.
    """
    if isinstance(data, Tensor):
        windows = windows_of_tensor(who, name, data)
    elif isinstance(data, Sized) and hasattr(data, "__getitem__") and not isinstance(data, str | Mapping):
        windows = windows_of_dicts(who, name, data)
    else:
        raise TypeError(
            f"{who}: {name} is a {type(data).__name__}; give an integer tensor [windows, length] or a "
            "sequence of dicts with input_ids (a list, not an iterator: a resumed run reads it again)"
        )
    return checked_windows(who, name, windows, vocabulary)


def windows_of_tensor(who: str, name: str, data: Tensor) -> Windows:
    if data.dim() != 2 or data.is_floating_point() or data.dtype == torch.bool:
        raise FxskipError(
            who,
            f"{name} is {data.dtype} {list(data.shape)}",
            hint=f"{name} is an integer tensor [windows, length]",
        )
    ids_NL = data.to("cpu", torch.int64)
    return Windows(ids_NL, torch.ones_like(ids_NL, dtype=torch.bool), ids_NL)


def windows_of_dicts(who: str, name: str, data: Any) -> Windows:
    rows = [row_of_dict(who, f"{name}[{index}]", data[index]) for index in range(len(data))]
    length = max((len(row[0]) for row in rows), default=0)
    padding = (0, 0, IGNORED)
    columns = [
        torch.stack([torch.nn.functional.pad(row[k], (0, length - len(row[k])), value=fill) for row in rows])
        if rows
        else torch.empty(0, length, dtype=torch.int64)
        for k, fill in enumerate(padding)
    ]
    return Windows(columns[0], columns[1] != 0, columns[2].masked_fill(columns[1] == 0, IGNORED))


def row_of_dict(who: str, name: str, row: Any) -> tuple[Tensor, Tensor, Tensor]:
    """input_ids, attention_mask and labels of one window, each int64 [length]."""
    if not isinstance(row, Mapping) or "input_ids" not in row:
        found = (
            f"has keys {sorted(map(str, row))}" if isinstance(row, Mapping) else f"is a {type(row).__name__}"
        )
        raise FxskipError(who, f"{name} {found}", hint="each window is a dict with input_ids")
    ids_L = torch.as_tensor(row["input_ids"])
    mask_L = torch.as_tensor(row.get("attention_mask", torch.ones_like(ids_L)))
    labels_L = torch.as_tensor(row.get("labels", ids_L))
    for key, value in (("input_ids", ids_L), ("attention_mask", mask_L), ("labels", labels_L)):
        if value.shape != ids_L.shape or value.dim() != 1 or value.is_floating_point():
            raise FxskipError(
                who,
                f"{name}: {key} is {value.dtype} {list(value.shape)}",
                hint=f"{key} is a row of integers, as long as input_ids ({list(ids_L.shape)})",
            )
    return ids_L.to("cpu", torch.int64), mask_L.to("cpu", torch.int64), labels_L.to("cpu", torch.int64)


def checked_windows(who: str, name: str, windows: Windows, vocabulary: int) -> Windows:
    """There is something to predict, and every id is in the vocabulary."""
    for key, ids_NL, ignored in (
        ("input_ids", windows.input_ids_NL, ~windows.attention_mask_NL),
        ("labels", windows.labels_NL, windows.labels_NL == IGNORED),
    ):
        bad = ((ids_NL < 0) | (ids_NL >= vocabulary)) & ~ignored
        if bool(bad.any()):
            row, column = bad.nonzero()[0].tolist()
            raise FxskipError(
                who,
                f"{name}: window {row} has {key} {int(ids_NL[row, column])} at position {column}",
                hint=f"the model's ids are 0 to {vocabulary - 1}; is the text from another tokenizer?",
            )
    if not bool((windows.labels_NL[:, 1:] != IGNORED).any()):
        raise FxskipError(
            who,
            f"{name} has {list(windows.input_ids_NL.shape)} [windows, length] and no token to predict",
            hint="windows of two tokens or more, with labels that are not all -100",
        )
    return windows
