"""Files that are whole or absent, whenever the process dies."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

TEMPORARY = ".writing"


def write_whole(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Fill a temporary file beside `path`, force it to the disk, then give it its name.

    A rename within one folder is atomic: at every moment `path` is the old file or the new one. A process
    that is killed earlier leaves a temporary file, which the next write of the same file replaces.
    """
    temporary = path.with_name(path.name + TEMPORARY)
    with temporary.open("wb") as file:
        write(file)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    sync_folder(path.parent)


def write_text(path: Path, text: str) -> None:
    write_whole(path, lambda file: file.write(text.encode()))


def sync_folder(folder: Path) -> None:
    """Force the rename itself to the disk; Windows has no way to ask for it."""
    if os.name == "nt":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
