"""Replace a folder so that a kill at any moment leaves either all of the old or all of the new one."""

from __future__ import annotations

import ctypes
import fcntl
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fxskip.errors import CheckpointError

_WEIGHTS = (
    "model*.safetensors",
    "model.safetensors.index.json",
    "pytorch_model*.bin",
    "pytorch_model.bin.index.json",
)
_RENAME_EXCHANGE, _AT_FDCWD = 2, -100


@contextmanager
def replaced_directory(target: Path) -> Iterator[Path]:
    """Give an empty folder to write into; when the block ends, it becomes `target`.

    Other files of an existing `target` (a tokenizer, a log) come along, old weights do not. Where the block
    raises, `target` stays as it was. What a killed process left behind is removed by the next one.

    Raises CheckpointError for a target that is no folder of its own.
    """
    target = target.resolve()
    _require_replaceable(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    _remove_leftovers(target)
    fresh = Path(tempfile.mkdtemp(prefix=f".{target.name}.saving-", dir=target.parent))
    fresh.chmod(0o777 & ~_umask())
    lock = os.open(fresh, os.O_RDONLY)
    try:
        # The lock, not a process id, says that the folder is in use: also between containers and hosts.
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield fresh
        if target.exists():
            _bring_along(target, fresh)
        _flush(fresh)
        _put_in_place(fresh, target)
        _flush_folder(target.parent)
    finally:
        os.close(lock)
        shutil.rmtree(fresh, ignore_errors=True)


def _require_replaceable(target: Path) -> None:
    if target.exists() and not target.is_dir():
        raise CheckpointError("save", f"{target} is a file", hint="name a folder")
    if target == Path.cwd() or target in Path.cwd().parents or target.is_mount():
        raise CheckpointError(
            "save",
            f"{target} cannot be replaced: it is the current folder, one above it, or a mount point",
            hint=f"save into a folder inside it, for example {target / 'model'}",
        )


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _bring_along(old: Path, new: Path) -> None:
    """Link what `old` has beside its weights and `new` has not; a link costs nothing, and an open log stays whole."""
    stale = {path for pattern in _WEIGHTS for path in old.glob(pattern)}
    for path in old.iterdir():
        if path in stale or (new / path.name).exists():
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.copytree(path, new / path.name, symlinks=True, copy_function=_link_or_copy)
        else:
            _link_or_copy(path, new / path.name)


def _link_or_copy(source: Path | str, target: Path | str) -> None:
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError:
        shutil.copy2(source, target, follow_symlinks=False)


def _flush(folder: Path) -> None:
    for path in [*folder.rglob("*"), folder]:
        if not path.is_symlink():
            _flush_folder(path)


def _flush_folder(path: Path) -> None:
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
        aside = _aside(target)
        os.rename(target, aside)
        os.rename(fresh, target)
        shutil.rmtree(aside)


def _exchange(one: Path, other: Path) -> bool:
    """Swap two folders in one step where the system can; afterwards `one` holds what `other` held."""
    if not sys.platform.startswith("linux"):
        return False
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    failed: int = rename(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE)
    return failed == 0


def _aside(target: Path) -> Path:
    return target.with_name(f".{target.name}.previous")


def _remove_leftovers(target: Path) -> None:
    aside = _aside(target)
    if aside.exists():
        if target.exists():
            shutil.rmtree(aside)
        else:
            os.rename(aside, target)
    for path in target.parent.glob(f".{target.name}.saving-*"):
        if not _is_in_use(path):
            shutil.rmtree(path, ignore_errors=True)


def _is_in_use(folder: Path) -> bool:
    """Whether a living process holds the folder's lock."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False
