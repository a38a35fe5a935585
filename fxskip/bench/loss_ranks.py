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
from torch import Tensor

from fxskip.bench.goals import print_verdicts, verdicts
from fxskip.bench.loss_errors import relative
from fxskip.bench.loss_goals import two_ranks
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
from fxskip.loss import hidden_kl, sparse_kl
from fxskip.loss.sparse_baselines import dense_sparse_kl, forward_chunked_sparse_kl, full_chunked_sparse_kl
from fxskip.loss.tails import TAILS

VOCABULARY = 131072
TOKENS = [4096, 8192, 16384, 32768, 65536, 131072, 262144]
TIME_LIMIT_S = 90

Body = Callable[[int, int], dict[str, Any]]
Make = Callable[[Inputs, dist.ProcessGroup], Work]


def ours(inputs: Inputs, group: dist.ProcessGroup, **options: Any) -> Work:
    return inputs.chunked(sparse_kl, group=group, validate=False, implementation="triton", **options)


def baseline(inputs: Inputs, group: dist.ProcessGroup, *, loss: Callable[..., Tensor]) -> Work:
    return inputs.chunked(loss, group=group)


def dense(inputs: Inputs, group: dist.ProcessGroup) -> Work:
    return inputs.step(dense_sparse_kl, group=group)


BASELINES: dict[str, Make] = {
    "full_chunked_sparse_kl": partial(baseline, loss=full_chunked_sparse_kl),
    "forward_chunked_sparse_kl": partial(baseline, loss=forward_chunked_sparse_kl),
    "dense_sparse_kl": dense,
}
VARIANTS: dict[str, Make] = {
    FLOOR: lambda inputs, group: three_products(inputs),
    "sparse_kl": ours,
    "sparse_kl, accumulate 1": partial(ours, accumulate=1),
    **BASELINES,
}
# Of a sharded result from that of one rank, in bfloat16: the parts of d hidden are rounded before they are added up.
LOSS_DIFFERENCE, GRADIENT_DIFFERENCE = 1e-4, 1e-2


def run_ranks(out: Path, ranks: int, tokens: list[int], *, is_tiny: bool = False) -> None:
    """Each variant at each number of tokens; `out` is rewritten after each measurement.

    What fails is in the report with its message, and the rest runs; FxskipError at the end lists it.
    """
    setting = tiny() if is_tiny else FULL
    report: dict[str, Any] = {"ranks": ranks, "tiny": is_tiny, "width": setting.width, "dtype": "bfloat16"}
    report["rows"] = []
    print(f"vocabulary over {ranks} ranks; peak is above the inputs, of the fuller rank", flush=True)
    report |= in_fresh_processes(partial(agreement, is_tiny), ranks)
    if "agreement" not in report:
        raise FxskipError(
            "bench loss",
            f"a small call on {ranks} GPUs failed: {report}",
            hint="--ranks is at most the number of GPUs of this host, and they must reach each other through NCCL",
        )
    print("relative differences from one rank", flush=True)
    for name, found in report["agreement"].items():
        print(f"  {name:28s} {found}", flush=True)
    done = []
    for count in tokens:
        for name in VARIANTS:
            row: dict[str, Any] = {"variant": name, "tokens": count}
            row |= in_fresh_processes(
                partial(measured_rank, is_tiny, name, count), ranks, is_comparison=name in BASELINES
            )
            report |= row.pop("environment", {})
            report["rows"].append(row)
            out.write_text(json.dumps(report, indent=1))
            print_row(row)
        done.append(str(count))
    if ranks == 2:
        report["goals"] = verdicts(two_ranks(), report, done)
        out.write_text(json.dumps(report, indent=1))
        print_verdicts(report["goals"], is_tiny=is_tiny)
    require_no_failures(report, who="bench loss", repeat="repeat a number of tokens with --tokens")


def print_row(row: dict[str, Any]) -> None:
    head = f"  {row['tokens']:7d} {row['variant']:28s}"
    if "median_ms" not in row:
        print(head, row.get(FAILED) or row.get(UNAVAILABLE), flush=True)
        return
    peak = "" if row["peak_gib"] is None else f"  +{row['peak_gib']:.4f} GiB"
    print(f"{head} {row['median_ms']:9.2f} ms {1000 / row['median_ms']:7.2f} it/s{peak}", flush=True)


def in_fresh_processes(body: Body, ranks: int, *, is_comparison: bool = False) -> dict[str, Any]:
    """What body(rank, ranks) returns on rank 0, all ranks being in one group; or `reason` of why it ended."""
    context = multiprocessing.get_context("fork")
    results: Any = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        arguments = (body, ranks, is_comparison, f"file://{folder}/store", results)
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


def one_rank(rank: int, body: Body, ranks: int, is_comparison: bool, store: str, results: Any) -> None:
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
        found = reason(error, is_comparison=is_comparison)
        results.put({name: f"rank {rank}: {message}" for name, message in found.items()})
        results.close()
        results.join_thread()
        os._exit(1)


def agreement(is_tiny: bool, rank: int, ranks: int) -> dict[str, Any]:
    """Loss, d hidden and d weight of the whole head over the ranks and on one, of both losses."""
    setting = tiny() if is_tiny else FULL
    inputs = draw_inputs(setting, 2048, 8192, width=512)
    teacher = inputs.ids, inputs.logp
    generator = torch.Generator(setting.device).manual_seed(2)
    states = torch.randn(inputs.hidden.shape, generator=generator, device=setting.device)
    online = states.to(inputs.hidden.dtype), inputs.weight.detach()
    options: dict[str, Any] = {"chunk_tokens": max(len(inputs.hidden) // 4, 1), "implementation": "triton"}
    losses: dict[str, Callable[..., Tensor]] = {
        f"sparse_kl, {tail}": partial(sparse_kl_of, teacher, tail=tail, **options) for tail in TAILS
    }
    for beta in (0.0, 0.5, 1.0):
        losses[f"hidden_kl, beta {beta:g}"] = partial(hidden_kl_of, online, beta=beta, **options)
    return {
        "agreement": {name: compared(differences(loss, inputs, rank, ranks)) for name, loss in losses.items()}
    }


def sparse_kl_of(teacher: tuple[Tensor, Tensor], hidden: Tensor, weight: Tensor, **options: Any) -> Tensor:
    return sparse_kl(hidden, weight, *teacher, **options)


def hidden_kl_of(
    teacher: tuple[Tensor, Tensor],
    hidden: Tensor,
    weight: Tensor,
    *,
    group: dist.ProcessGroup | None = None,
    **options: Any,
) -> Tensor:
    states, head = teacher
    mine = head if group is None else head.chunk(group.size())[group.rank()]
    return hidden_kl(hidden, weight, states, mine, group=group, **options)


def differences(loss: Callable[..., Tensor], inputs: Inputs, rank: int, ranks: int) -> list[float]:
    """Relative, of loss, d hidden and d weight; the largest of all ranks."""
    shard = inputs.weight.detach().chunk(ranks)[rank].clone().requires_grad_()
    alone = loss(inputs.hidden, inputs.weight)
    shared = loss(inputs.hidden, shard, group=dist.group.WORLD)
    right = torch.autograd.grad(alone, [inputs.hidden, inputs.weight])
    got = torch.autograd.grad(shared, [inputs.hidden, shard])
    parts = [relative(shared.detach(), alone.detach()), relative(got[0], right[0])]
    parts.append(relative(got[1], right[1].chunk(ranks)[rank]))
    largest = torch.tensor(parts, device=inputs.hidden.device)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    result: list[float] = largest.tolist()
    return result


def compared(found: list[float]) -> dict[str, Any]:
    """`found` by name, and that it failed where it is not within bounds."""
    bounds = LOSS_DIFFERENCE, GRADIENT_DIFFERENCE, GRADIENT_DIFFERENCE
    result: dict[str, Any] = dict(zip(("loss", "d hidden", "d weight"), found, strict=True))
    # `not <=` and not `>`: NaN is outside.
    if any(not value <= bound for value, bound in zip(found, bounds, strict=True)):
        result[FAILED] = f"differences of {found} from one rank: at most {bounds} are right"
    return result


def measured_rank(is_tiny: bool, name: str, tokens: int, rank: int, ranks: int) -> dict[str, Any]:
    group = dist.group.WORLD
    assert group is not None
    setting = tiny() if is_tiny else FULL
    inputs = draw_inputs(setting, tokens, VOCABULARY, shards=ranks, rank=rank)
    work = VARIANTS[name](inputs, group)
    for _ in range(2):
        work()
    held = torch.cuda.memory_allocated() / 2**30 if torch.cuda.is_available() else 0.0  # the inputs
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
        "iterations_a_second": 1000 / statistics.median(samples),
        "peak_gib": None if peak is None else fullest,
        "gib_with_inputs": None if peak is None else held + fullest,  # the inputs are as large on each rank
    }
    environment_and_size = environment() | {"vocabulary": len(inputs.weight) * ranks}
    return row | {"environment": environment_and_size}
