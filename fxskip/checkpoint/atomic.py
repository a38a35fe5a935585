"""Replace a folder so that a kill at any moment leaves either all of the old or all of the new one."""

from __future__ import annotations

import ctypes
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fxskip.errors import CheckpointError

_WEIGHTS = ("model*.safetensors", "model.safetensors.index.json", "pytorch_model*.bin", "pytorch_model.bin.index.json")
_RENAME_EXCHANGE, _AT_FDCWD = 2, -100


@contextmanager
def replaced_directory(target: Path) -> Iterator[Path]:
    """Give an empty folder to write into; when the block ends, it becomes `target`.

    Other files of an existing `target` (a tokenizer, say) come along, old weights do not. Where the block
    raises, `target` stays as it was. What a killed process left behind is removed by the next one.
    """
    target = target.absolute()
    if target.is_file():
        raise CheckpointError("save", f"{target} is a file", hint="name a folder")
    target.parent.mkdir(parents=True, exist_ok=True)
    _remove_leftovers(target)
    fresh = target.with_name(f".{target.name}.saving-{os.getpid()}")
    fresh.mkdir()
    try:
        yield fresh
        if target.exists():
            _bring_along(target, fresh)
        _flush(fresh)
        _put_in_place(fresh, target)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def _bring_along(old: Path, new: Path) -> None:
    """Copy what `old` has beside its weights and `new` has not."""
    stale = {path for pattern in _WEIGHTS for path in old.glob(pattern)}
    for path in old.iterdir():
        if path in stale or (new / path.name).exists():
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.copytree(path, new / path.name, symlinks=True)
        else:
            shutil.copy2(path, new / path.name, follow_symlinks=False)


def _flush(folder: Path) -> None:
    for path in [*folder.rglob("*"), folder]:
        if path.is_symlink():
            continue
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _put_in_place(fresh: Path, target: Path) -> None:
    if not target.exists():
        os.rename(fresh, target)
    elif not _exchange(fresh, target):
        # No atomic exchange on this system: for a moment the old folder stands under another name.
        aside = target.with_name(f".{target.name}.previous")
        os.rename(target, aside)
        os.rename(fresh, target)
        shutil.rmtree(aside)


def _exchange(one: Path, other: Path) -> bool:
    """Swap two folders in one step where the system can; afterwards `one` holds what `other` held."""
    if not sys.platform.startswith("linux"):
        return False
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    return rename is not None and rename(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0


def _remove_leftovers(target: Path) -> None:
    aside = target.with_name(f".{target.name}.previous")
    if aside.exists():
        if target.exists():
            shutil.rmtree(aside)
        else:
            os.rename(aside, target)
    for path in target.parent.glob(f".{target.name}.saving-*"):
        if not _is_running(int(path.name.rpartition("-")[2])):
            shutil.rmtree(path, ignore_errors=True)


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
