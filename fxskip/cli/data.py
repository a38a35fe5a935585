"""Text files and files of token ids as windows for `distill` and `evaluate`."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from fxskip.cli.models import load_tokenizer
from fxskip.errors import FxskipError

Window = dict[str, Tensor]


def read_windows(files: Sequence[Path], tokenizer_folder: Path, length: int) -> list[Window]:
    """The windows of all files in their order. Each text is encoded as one document and cut; no token is lost,
    so the last window of a file may be shorter (a single token predicts nothing and is left out)."""
    encode = _encoder(tokenizer_folder) if any(not _is_ids(file) for file in files) else None
    windows: list[Window] = []
    for file in files:
        rows = _stored_rows(file) if encode is None or _is_ids(file) else encode(file).split(length)
        found = [{"input_ids": row} for row in rows if len(row) > 1]
        if not found:
            raise _wrong(file, "holds no two tokens, so there is nothing to predict", "give a longer text")
        windows += found
    return windows


def _is_ids(file: Path) -> bool:
    return file.suffix == ".safetensors"


def _encoder(folder: Path) -> Callable[[Path], Tensor]:
    tokenizer = load_tokenizer(folder)

    def encode(file: Path) -> Tensor:
        if file.suffix in (".pt", ".pth", ".bin", ".pkl", ".npy"):
            raise _wrong(file, "is no text", "save the ids as a tensor input_ids in a .safetensors file")
        try:
            text = file.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise _wrong(
                file, f"is not UTF-8 text: {error.reason} at byte {error.start}", "convert it"
            ) from None
        ids: Any = tokenizer(text, verbose=False)["input_ids"]  # verbose: no warning about the model's length
        return torch.tensor(ids, dtype=torch.int64)

    return encode


def _stored_rows(file: Path) -> Sequence[Tensor]:
    try:
        tensors = load_file(file)
    except SafetensorError as error:
        raise _wrong(file, f"cannot be read: {error}", "write it with safetensors.torch.save_file") from None
    ids = tensors.get("input_ids")
    if ids is None or ids.dim() != 2 or ids.is_floating_point() or ids.dtype == torch.bool:
        parts = [
            f"{name} {list(t.shape)} {str(t.dtype).removeprefix('torch.')}" for name, t in tensors.items()
        ]
        found = ", ".join(parts) or "nothing"
        raise _wrong(file, f"holds {found}", "save one integer tensor input_ids [windows, length]")
    return ids.to(torch.int64).unbind()


def _wrong(file: Path, found: str, hint: str) -> FxskipError:
    return FxskipError(str(file), found, hint=hint)
