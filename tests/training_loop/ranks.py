"""Run checks on two processes over gloo. An error or a hang names the rank and the check."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from tests.ranks import run_ranks

RANKS = 2

Check = Callable[[int, Path], None]
"""A module-level function of the rank and a folder that all ranks share."""


def run_on_ranks(checks: Sequence[Check], folder: Path, *, limit_s: int) -> None:
    """Start the processes once, for the imports take longest, and run all checks in each, one after the other."""
    body = partial(_run_checks, tuple(checks), folder)
    run_ranks(body, RANKS, folder / "store", limit_s=limit_s, begun=partial(_begun, folder))


def _run_checks(checks: Sequence[Check], folder: Path, rank: int) -> None:
    for check in checks:
        (folder / f"rank{rank}").write_text(_name(check))
        torch._dynamo.reset()
        try:
            check(rank, folder)
        except BaseException as error:
            error.add_note(f"in the check {_name(check)!r} on rank {rank}")
            raise
        dist.barrier()


def _begun(folder: Path) -> str:
    """The check that each rank began last."""
    return ", ".join(f"{file.name}: {file.read_text()}" for file in sorted(folder.glob("rank*")))


def _name(check: Check) -> str:
    """Of a function, or of a partial of one, with what it was given."""
    if isinstance(check, partial):
        return f"{check.func.__name__}({', '.join(map(str, check.args))})"
    return check.__name__
