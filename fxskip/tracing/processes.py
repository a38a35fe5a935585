"""Processes of one host that form a group, started by a command for itself."""

from __future__ import annotations

import multiprocessing
import os
import queue
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from fxskip.errors import FxskipError, first_line

LIMIT_S = 900.0
"""How long to wait for the next thing that rank 0 has to say."""
_GRACE_S = 10.0
"""After the death of a process: how long the others have to say why."""

Body = Callable[[int], Iterator[Any]]
"""What each process runs, given its rank. Importable by name, for processes are spawned."""


def in_processes(
    body: Body, ranks: int, *, environment: Mapping[str, str] | None = None, limit_s: float = LIMIT_S
) -> Iterator[Any]:
    """What `body` yields on rank 0, as it comes; on the other ranks the same is run and dropped.

    The group is the default one: NCCL, with a GPU for each process, where there are GPUs, gloo elsewhere.

    environment   variables that are set in the processes before anything reads them

    Raises what the first process to fail raised, a FxskipError in place of any other exception, and one where nothing
    comes for `limit_s` or a process died without a word. No process is left behind.
    """
    context = multiprocessing.get_context("spawn")
    said: Any = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        arguments = (body, ranks, f"file://{folder}/store", dict(environment or {}), said)
        processes = [context.Process(target=_one_rank, args=(rank, *arguments)) for rank in range(ranks)]
        for process in processes:
            process.start()
        try:
            yield from _listen(said, processes, limit_s)
        finally:
            for process in processes:
                process.join(timeout=_GRACE_S)
                if process.is_alive():
                    process.kill()
                    process.join()


def _listen(said: Any, processes: Sequence[Any], limit_s: float) -> Iterator[Any]:
    heard, died = time.monotonic(), None
    while True:
        try:
            kind, value = said.get(timeout=0.5)
        except queue.Empty:
            now = time.monotonic()
            dead = [rank for rank, process in enumerate(processes) if process.exitcode]
            died = died or (now if dead else None)
            if died is not None and now - died > _GRACE_S:
                code = processes[dead[0]].exitcode
                raise _silent(f"process {dead[0]} died without a word, exit code {code}") from None
            if now - heard > limit_s:
                raise _silent(f"nothing came for {limit_s:g} s") from None
            continue
        heard = time.monotonic()
        if kind == "error":
            raise value
        if kind == "end":
            return
        yield value


def _silent(found: str) -> FxskipError:
    return FxskipError(
        "processes", found, hint="look at the output above; fewer layers or tokens if memory ran out"
    )


def _one_rank(
    rank: int, body: Body, ranks: int, store: str, environment: Mapping[str, str], said: Any
) -> None:
    os.environ.update(environment)
    try:
        with group(rank, ranks, store):
            for item in body(rank):
                if rank == 0:
                    said.put(("item", item))
        if rank == 0:
            said.put(("end", None))
    except Exception as error:
        # Whatever it is: the parent must hear of it, or it would wait for its limit.
        said.put(("error", _to_send(rank, error)))
        said.close()
        said.join_thread()
        os._exit(1)  # a group that is broken may wait for ever in its end


def _to_send(rank: int, error: Exception) -> FxskipError:
    if isinstance(error, FxskipError):
        return error
    traceback.print_exc()
    return FxskipError(
        f"rank {rank}",
        f"{type(error).__name__}: {first_line(error)[:300]}",
        hint="its traceback is in the output above",
    )


@contextmanager
def group(rank: int, ranks: int, store: str) -> Iterator[None]:
    """The default process group, on the best transport there is. `store` is an init_method of torch.distributed."""
    where: dict[str, Any] = {"backend": "gloo"}
    if torch.cuda.is_available():
        local = rank % torch.cuda.device_count()
        torch.cuda.set_device(local)
        where = {"backend": "nccl", "device_id": torch.device("cuda", local)}
    else:
        torch.set_num_threads(1)
    dist.init_process_group(init_method=store, rank=rank, world_size=ranks, **where)
    yield
    if dist.is_initialized():  # who runs inside may have ended it, for one of their own
        dist.destroy_process_group()
