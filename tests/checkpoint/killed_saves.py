"""Saves that die by SIGKILL at every step they take on the file system.

    python -m tests.checkpoint.killed_saves STOCK OLD ROOT

Saves a student of STOCK over copies of the folder OLD, in ROOT/1/out, ROOT/2/out, ..., and dies at the 1st, 2nd, ...
event. Then saves once undisturbed, into ROOT/whole/out, and over what the last kill left. Prints the number of kills.
"""

import os
import shutil
import signal
import sys
from pathlib import Path

import torch

from fxskip.cli.saving import save_with_tokenizer
from tests.checkpoint.samples import rewired

# What Python reports of itself (sys.addaudithook) when it opens, makes, links, renames or removes something.
EVENTS = {
    "open",
    "os.chmod",
    "os.link",
    "os.mkdir",
    "os.remove",
    "os.rename",
    "os.rmdir",
    "os.scandir",
    "shutil.rmtree",
}


class Killer:
    """Kills the process at the n-th event that concerns a path below `root`."""

    def __init__(self) -> None:
        self.root, self.left = None, 0
        sys.addaudithook(self)  # for good: hooks cannot be removed

    def __call__(self, event: str, arguments: tuple) -> None:
        if self.root is not None and event in EVENTS and any(self._is_below(item) for item in arguments):
            self.left -= 1
            if self.left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    def _is_below(self, item: object) -> bool:
        return isinstance(item, str | os.PathLike) and os.fspath(item).startswith(str(self.root))


def saves_to_the_end(student, stock: Path, out: Path, killer: Killer, event: int) -> bool:
    """Save in a fork that dies at an event. The imports and the transform take longer than all the saves."""
    child = os.fork()
    if child == 0:
        killer.root, killer.left = out.parent, event
        save_with_tokenizer(student, stock, out)
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    assert status in (0, signal.SIGKILL), status
    return status == 0


def main(stock: Path, old: Path, root: Path) -> None:
    torch.set_num_threads(1)
    student, killer = rewired(stock, "ladder"), Killer()
    event = 0
    while True:
        event += 1
        out = root / str(event) / "out"
        shutil.copytree(old, out)
        if saves_to_the_end(student, stock, out, killer, event):
            break
    shutil.rmtree(out.parent)
    print(event - 1)
    for number in range(1, event):
        shutil.copytree(root / str(number), root / f"again_{number}", symlinks=True)
    save_with_tokenizer(student, stock, root / "whole" / "out")
    for number in range(1, event):
        save_with_tokenizer(student, stock, root / f"again_{number}" / "out")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
