"""Saving a model with all that belongs to it, in one step."""

import shutil
from pathlib import Path

from transformers import PreTrainedModel

from fxskip.checkpoint.atomic import replaced_directory
from fxskip.checkpoint.doctor import kind_of
from fxskip.errors import CheckpointError

_TOKENIZER = (
    "tokenizer*", "vocab*", "merges.txt", "added_tokens.json", "special_tokens_map.json",
    "chat_template*", "*.model", "*.tiktoken", "tekken.json",
)  # fmt: skip


def tokenizer_files(folder: Path) -> list[Path]:
    """Files and folders that make up the tokenizer of a saved model."""
    return sorted({path for pattern in _TOKENIZER for path in folder.glob(pattern)})


def require_rewired(folder: Path) -> None:
    """Refuse a folder that holds anything but a rewired model."""
    if (kind := kind_of(folder)) != "rewired":
        found = "a stock model" if kind == "stock" else "no model"
        raise CheckpointError(
            str(folder), f"holds {found}, not a rewired one", hint="fxskip convert makes one"
        )


def require_free(out: Path, *sources: Path, tokenizer: Path, overwrite: bool = False) -> None:
    """Refuse to write over or into what the command reads, and over anything but a rewired model.

    `tokenizer` is the model whose tokenizer will be copied; it is a source too.
    """
    for source in (*sources, tokenizer):
        here, there = out.resolve(), source.resolve()
        if here == there or here in there.parents:
            raise CheckpointError(
                str(out), f"would be written over {source}, which is read", hint="name another folder"
            )
        if there in here.parents:
            raise CheckpointError(
                str(out), f"lies inside {source}, which is read", hint="name a folder beside it"
            )
    if not out.exists():
        return
    if not out.is_dir():
        raise CheckpointError(str(out), "is a file", hint="name a folder")
    _require_no_other_tokenizer(out, tokenizer)
    if any(out.iterdir()) and kind_of(out) != "rewired" and not overwrite:
        raise CheckpointError(
            str(out),
            "holds something that is not a rewired model",
            hint="name another folder, or give --overwrite: weights there are replaced, other files stay",
        )


def save_with_tokenizer(model: PreTrainedModel, source: Path, out: Path) -> None:
    """Save `model`, its generation config and the tokenizer of `source` into `out`.

    A kill at any moment leaves `out` as it was or complete.
    """
    with replaced_directory(out) as folder:
        saved = folder / "saved"
        model.save_pretrained(saved)
        for path in saved.iterdir():
            path.rename(folder / path.name)
        saved.rmdir()
        for path in tokenizer_files(source):
            if path.is_dir():
                shutil.copytree(path, folder / path.name)
            else:
                shutil.copy2(path, folder / path.name)


def _require_no_other_tokenizer(out: Path, source: Path) -> None:
    """Files of a tokenizer that are not replaced would stay, and might be read instead of the right ones."""
    own = [path.name for path in tokenizer_files(source)]
    if others := sorted({path.name for path in tokenizer_files(out)} - set(own)):
        raise CheckpointError(
            str(out),
            f"holds files of another tokenizer: {', '.join(others)}",
            where=f"{source} has {', '.join(own) or 'no tokenizer'}",
            hint="delete them, or name another folder",
        )
