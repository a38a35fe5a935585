"""The distillation loss with its vocabulary spread over the GPUs of one host: time and memory a rank.

Every measurement has fresh processes, forked from one that has imported everything and has not touched a GPU, so
that no variant inherits another's memory, and none waits for imports.
"""

import json
import multiprocessing
import os
import queue
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from fxskip.bench.loss_errors import relative
from fxskip.bench.loss_inputs import FLOOR, FULL, Inputs, draw_inputs, three_products, tiny
from fxskip.bench.measure import (
    FAILED,
    UNAVAILABLE,
    Work,
    elapsed_ms,
    environment,
    peak_gib,
    reason,
    require_no_failures,
)
from fxskip.errors import FxskipError
from fxskip.loss import sparse_kl
from fxskip.loss.sparse_baselines import dense_sparse_kl, forward_chunked_sparse_kl, full_chunked_sparse_kl
from fxskip.loss.tails import TAILS

VOCABULARY = 131072
TOKENS = [4096, 8192, 16384, 32768, 65536, 131072, 262144]
TIME_LIMIT_S = 90

Body = Callable[[int, int], dict[str, Any]]
Make = Callable[[Inputs, dist.ProcessGroup], Work]


def ours(inputs: Inputs, group: dist.ProcessGroup, **options: Any) -> Work:
    return inputs.chunked(sparse_kl, group=group, validate=False, implementation="triton", **options)


def baseline(inputs: Inputs, group: dist.ProcessGroup, *, loss: Callable[..., torch.Tensor]) -> Work:
    return inputs.chunked(loss, group=group)


def dense(inputs: Inputs, group: dist.ProcessGroup) -> Work:
    return inputs.step(dense_sparse_kl, group=group)


VARIANTS: dict[str, Make] = {
    FLOOR: lambda inputs, group: three_products(inputs),
    "sparse_kl": ours,
    "sparse_kl, accumulate 1": partial(ours, accumulate=1),
    "full_chunked_sparse_kl": partial(baseline, loss=full_chunked_sparse_kl),
    "forward_chunked_sparse_kl": partial(baseline, loss=forward_chunked_sparse_kl),
    "dense_sparse_kl": dense,
}


def run_ranks(out: Path, ranks: int, tokens: list[int], *, is_tiny: bool = False) -> None:
    """Each variant at each number of tokens; `out` is rewritten after each measurement.

    What fails is in the report with its message, and the rest runs; FxskipError at the end lists it.
    """
    report: dict[str, Any] = {"ranks": ranks, "tiny": is_tiny, "rows": []}
    print(f"vocabulary over {ranks} ranks; peak is above the inputs, of the fuller rank", flush=True)
    report |= in_fresh_processes(partial(agreement, is_tiny), ranks)
    if "agreement" not in report:
        raise FxskipError(
            "bench loss",
            f"a small call on {ranks} GPUs failed: {report}",
            hint="--ranks is at most the number of GPUs of this host, and they must reach each other through NCCL",
        )
    print(f"relative differences from one rank: {report['agreement']}", flush=True)
    for count in tokens:
        for name in VARIANTS:
            row: dict[str, Any] = {"variant": name, "tokens": count}
            row |= in_fresh_processes(partial(measured_rank, is_tiny, name, count), ranks)
            report |= row.pop("environment", {})
            report["rows"].append(row)
            out.write_text(json.dumps(report, indent=1))
            print_row(row)
    require_no_failures(report)


def print_row(row: dict[str, Any]) -> None:
    head = f"  {row['tokens']:7d} {row['variant']:28s}"
    if "median_ms" not in row:
        print(head, row.get(FAILED) or row.get(UNAVAILABLE), flush=True)
        return
    peak = "" if row["peak_gib"] is None else f"  +{row['peak_gib']:.4f} GiB"
    print(f"{head} {row['median_ms']:9.2f} ms {1000 / row['median_ms']:7.2f} it/s{peak}", flush=True)


def in_fresh_processes(body: Body, ranks: int) -> dict[str, Any]:
    """What body(rank, ranks) returns on rank 0, all ranks being in one group."""
    context = multiprocessing.get_context("fork")
    results: Any = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        arguments = (body, ranks, f"file://{folder}/store", results)
        processes = [context.Process(target=one_rank, args=(rank, *arguments)) for rank in range(ranks)]
        for process in processes:
            process.start()
        try:
            row: dict[str, Any] = results.get(timeout=TIME_LIMIT_S)
        except queue.Empty:
            row = {FAILED: f"no result within {TIME_LIMIT_S} s"}
        for process in processes:
            process.join(timeout=5 if FAILED in row or UNAVAILABLE in row else 30)
            if process.is_alive():
                process.kill()  # its peer failed, and it waits in a collective
                process.join()
    return row


def one_rank(rank: int, body: Body, ranks: int, store: str, results: Any) -> None:
    try:
        where: dict[str, Any] = {"backend": "gloo"}
        if torch.cuda.is_available():
            torch.cuda.set_device(rank)
            where = {"backend": "nccl", "device_id": torch.device("cuda", rank)}
        dist.init_process_group(init_method=store, rank=rank, world_size=ranks, **where)
        row = body(rank, ranks)
        if rank == 0:
            results.put(row)
        dist.destroy_process_group()
    except Exception as error:
        # Whatever it is: the parent must hear of it, or it would wait for its limit.
        results.put({name: f"rank {rank}: {message}" for name, message in reason(error).items()})
        results.close()
        results.join_thread()
        os._exit(1)


def agreement(is_tiny: bool, rank: int, ranks: int) -> dict[str, Any]:
    """Loss, d hidden and d weight of the whole head over the ranks and on one: the larger relative difference."""
    setting = tiny() if is_tiny else FULL
    inputs = draw_inputs(setting, 2048, 8192, width=512)
    shard = inputs.weight.detach().chunk(ranks)[rank].clone().requires_grad_()
    options: dict[str, Any] = {"chunk_tokens": max(len(inputs.hidden) // 4, 1), "implementation": "triton"}
    differences = {}
    for tail in TAILS:
        teacher = inputs.ids, inputs.logp
        alone = sparse_kl(inputs.hidden, inputs.weight, *teacher, tail=tail, **options)
        shared = sparse_kl(inputs.hidden, shard, *teacher, tail=tail, group=dist.group.WORLD, **options)
        right = torch.autograd.grad(alone, [inputs.hidden, inputs.weight])
        got = torch.autograd.grad(shared, [inputs.hidden, shard])
        parts = [relative(shared.detach(), alone.detach()), relative(got[0], right[0])]
        parts.append(relative(got[1], right[1].chunk(ranks)[rank]))
        largest = torch.tensor(parts, device=setting.device)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        differences[tail] = largest.tolist()
    return {"agreement": differences}


def measured_rank(is_tiny: bool, name: str, tokens: int, rank: int, ranks: int) -> dict[str, Any]:
    group = dist.group.WORLD
    assert group is not None
    setting = tiny() if is_tiny else FULL
    inputs = draw_inputs(setting, tokens, VOCABULARY, shards=ranks, rank=rank)
    work = VARIANTS[name](inputs, group)
    for _ in range(2):
        work()
    peak = peak_gib(work)
    samples = []
    started = time.monotonic()
    for number in range(min(10, setting.rounds)):
        dist.barrier()
        samples.append(elapsed_ms(work))
        # The ranks stop at the same sample: rank 0's clock decides.
        enough = torch.tensor([number >= 2 and time.monotonic() - started > 6.0], device=setting.device)
        dist.broadcast(enough, 0)
        if enough.item():
            break
    mine = torch.tensor([*samples, peak or 0.0], device=setting.device, dtype=torch.float64)
    dist.all_reduce(mine, op=dist.ReduceOp.MAX)  # a step is as long as on the slower rank
    *samples, fullest = mine.tolist()
    row: dict[str, Any] = {
        "samples_ms": samples,
        "median_ms": statistics.median(samples),
        "peak_gib": None if peak is None else fullest,
    }
    environment_and_size = environment() | {"vocabulary": len(inputs.weight) * ranks}
    return row | {"environment": environment_and_size}
