"""The distillation loss with its vocabulary spread over the GPUs of one host: time and memory a rank.

Every measurement has fresh processes, forked from one that has imported everything and has not touched a GPU, so
that no variant inherits another's memory, and none waits for imports.
"""

import json
import multiprocessing
import os
import queue
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from fxskip.bench.loss_inputs import Inputs, draw_inputs, three_products
from fxskip.bench.measure import Work, elapsed_ms, environment, peak_gib
from fxskip.loss import sparse_kl
from fxskip.loss.sparse_baselines import dense_sparse_kl, forward_chunked_sparse_kl, full_chunked_sparse_kl

VOCABULARY = 131072
TOKENS = [4096, 8192, 16384, 32768, 65536, 131072, 262144]
TIME_LIMIT_S = 90

Make = Callable[[Inputs, dist.ProcessGroup], Work]


def ours(inputs: Inputs, group: dist.ProcessGroup, **options: Any) -> Work:
    return inputs.step(sparse_kl, group=group, validate=False, implementation="triton", **options)


def baseline(inputs: Inputs, group: dist.ProcessGroup, *, loss: Callable[..., torch.Tensor]) -> Work:
    return inputs.step(loss, group=group)


VARIANTS: dict[str, Make] = {
    "three products": lambda inputs, group: three_products(inputs),
    "sparse_kl": ours,
    "sparse_kl, accumulate 1": partial(ours, accumulate=1),
    "full_chunked_sparse_kl": partial(baseline, loss=full_chunked_sparse_kl),
    "forward_chunked_sparse_kl": partial(baseline, loss=forward_chunked_sparse_kl),
    "dense_sparse_kl": partial(baseline, loss=dense_sparse_kl),
}


def run_ranks(out: Path, ranks: int, tokens: list[int]) -> None:
    """Each variant at each number of tokens; `out` is rewritten after each measurement."""
    report: dict[str, Any] = {"vocabulary": VOCABULARY, "ranks": ranks, "rows": []}
    print(f"V={VOCABULARY} over {ranks} GPUs; peak is above the inputs, of the fuller rank", flush=True)
    for count in tokens:
        for name in VARIANTS:
            row = {"variant": name, "tokens": count} | in_fresh_processes(name, count, ranks)
            report |= row.pop("environment", {})
            report["rows"].append(row)
            out.write_text(json.dumps(report, indent=1))
            print_row(row)


def print_row(row: dict[str, Any]) -> None:
    if "failed" in row:
        print(f"  {row['tokens']:7d} {row['variant']:28s} {row['failed']}", flush=True)
        return
    print(
        f"  {row['tokens']:7d} {row['variant']:28s} {row['median_ms']:9.2f} ms {1000 / row['median_ms']:7.2f} it/s"
        f"  +{row['peak_gib']:.3f} GiB",
        flush=True,
    )


def in_fresh_processes(name: str, tokens: int, ranks: int) -> dict[str, Any]:
    context = multiprocessing.get_context("fork")
    results: Any = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        arguments = (name, tokens, ranks, f"file://{folder}/store", results)
        processes = [context.Process(target=one_rank, args=(rank, *arguments)) for rank in range(ranks)]
        for process in processes:
            process.start()
        try:
            row: dict[str, Any] = results.get(timeout=TIME_LIMIT_S)
        except queue.Empty:
            row = {"failed": f"no result within {TIME_LIMIT_S} s"}
        for process in processes:
            process.join(timeout=5 if "failed" in row else 30)
            if process.is_alive():
                process.kill()  # its peer failed, and it waits in a collective
                process.join()
    return row


def one_rank(rank: int, name: str, tokens: int, ranks: int, store: str, results: Any) -> None:
    try:
        torch.cuda.set_device(rank)
        dist.init_process_group(
            "nccl", init_method=store, rank=rank, world_size=ranks, device_id=torch.device("cuda", rank)
        )
        row = measured_rank(VARIANTS[name], tokens, rank, ranks)
        if rank == 0:
            results.put(row)
        dist.destroy_process_group()
    except Exception as error:
        # Whatever it is: the parent must hear of it, or it would wait for its limit.
        results.put({"failed": f"rank {rank}: {type(error).__name__}: {str(error).splitlines()[0][:160]}"})
        results.close()
        results.join_thread()
        os._exit(1)


def measured_rank(make: Make, tokens: int, rank: int, ranks: int) -> dict[str, Any]:
    group = dist.group.WORLD
    assert group is not None
    inputs = draw_inputs(tokens, VOCABULARY, shards=ranks, rank=rank)
    work = make(inputs, group)
    for _ in range(2):
        work()
    peak = peak_gib(work)
    samples = []
    started = time.monotonic()
    for number in range(10):
        dist.barrier()
        samples.append(elapsed_ms(work))
        # The ranks stop at the same sample: rank 0's clock decides.
        enough = torch.tensor([number >= 2 and time.monotonic() - started > 6.0], device="cuda")
        dist.broadcast(enough, 0)
        if enough.item():
            break
    mine = torch.tensor([*samples, peak], device="cuda", dtype=torch.float64)
    dist.all_reduce(mine, op=dist.ReduceOp.MAX)  # a step is as long as on the slower rank
    *samples, peak = mine.tolist()
    row: dict[str, Any] = {
        "samples_ms": samples,
        "median_ms": sorted(samples)[len(samples) // 2],
        "peak_gib": peak,
    }
    return row | {"environment": environment()}
