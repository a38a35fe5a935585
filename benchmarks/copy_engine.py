"""What an exchange of rows costs, by copies between devices and by NCCL, and what matrix products beside it lose.

    python benchmarks/copy_engine.py --out benchmarks/results/copy-engine.json [--rows 24576] [--width 2048]
        [--repeats 10]

Two processes, each with `--rows` rows of bfloat16 for the other and none for itself. Background, queued before products
so that it lasts longer than they do:

    nothing
    copy within a device   as many bytes, as an exchange by copies does before it
    exchange by copies     `fxskip.collectives.copy_engine`
    exchange by NCCL       where there are two devices

`each_ms` is one exchange (or copy) of many in a row, alone; `products_ms` the products with it beside them; `host_ms`
what the call that issues one takes. On one device, which the processes share, one of them stands still for all but the
exchange, of which `host_ms` alone means anything there; the rest is left out.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from provenance import ROOT, provenance

sys.path.insert(0, str(ROOT))

from fxskip.collectives.all_to_all import AllToAll
from fxskip.collectives.copy_engine import CopyExchange, tried, use_slots
from fxskip.collectives.failures import Work
from fxskip.collectives.peer_memory import SymmetricMemory

RANKS = 2
PRODUCTS = 10
COUNT = {"nothing": 0, "copy within a device": 150, "exchange by copies": 40, "exchange by NCCL": 40}
Issue = Callable[[], Work]


def backgrounds(
    sizes: argparse.Namespace, rank: int, group: Any, device: torch.device
) -> dict[str, Issue | None]:
    """What may run beside products, by name."""
    rows = torch.randn(sizes.rows, sizes.width, device=device, dtype=torch.bfloat16)
    other, memory = torch.empty_like(rows), SymmetricMemory(group, device)
    use_slots(group, tried(memory))
    counts = tuple(0 if to == rank else sizes.rows for to in range(RANKS))

    def copy() -> None:
        other.copy_(rows)

    found: dict[str, Issue | None] = {
        "nothing": None,
        "copy within a device": lambda: memory.run(copy),
        "exchange by copies": partial(CopyExchange(group, counts, counts, sizes.rows).send, other, rows),
    }
    if torch.cuda.device_count() >= RANKS:
        found["exchange by NCCL"] = partial(AllToAll(group, counts, counts).send, other, rows)
    return found


def sample(issue: Issue | None, count: int, products: Callable[[], None]) -> tuple[float, float, float]:
    """Milliseconds of `count` in a row, of the products that are enqueued behind them, and of the host's calls."""
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(4)]
    torch.cuda.synchronize()
    dist.barrier()
    torch.cuda.synchronize()
    marks[0].record()
    begun = time.perf_counter()
    works = [issue() for _ in range(count)] if issue is not None else []
    host = 1e3 * (time.perf_counter() - begun)
    marks[1].record()
    products()
    marks[2].record()
    for work in works:
        work.wait()
    marks[3].record()
    torch.cuda.synchronize()
    return marks[0].elapsed_time(marks[3]), marks[1].elapsed_time(marks[2]), host


def measured(
    sizes: argparse.Namespace, rank: int, group: Any, device: torch.device
) -> Iterator[tuple[str, Any]]:
    """Raw samples of each background, as this rank has them."""
    left = torch.randn(8192, 2048, device=device, dtype=torch.bfloat16)
    right = torch.randn(2048, 8192, device=device, dtype=torch.bfloat16)
    out = left @ right

    def products() -> None:
        for _ in range(PRODUCTS):
            torch.mm(left, right, out=out)

    def none() -> None:
        return

    shared = torch.cuda.device_count() < RANKS
    for name, issue in backgrounds(sizes, rank, group, device).items():
        exchanges = name.startswith("exchange")
        count, work = COUNT[name], products
        if shared and rank and not exchanges:
            issue, count, work = None, 0, none
        found: dict[str, list[float]] = {"each_ms": [], "products_ms": [], "host_ms": []}
        for number in range(-2, sizes.repeats):
            took, _, host = sample(issue, count, none)
            _, beside, _ = sample(issue, count, work)
            if number >= 0 and not (shared and exchanges):
                found["each_ms"].append(took / max(count, 1))
                found["products_ms"].append(beside)
            if number >= 0:
                found["host_ms"].append(host / max(count, 1))
        yield name, found


def one_rank(rank: int, sizes: argparse.Namespace, port: int) -> None:
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    backend = "nccl" if torch.cuda.device_count() >= RANKS else "gloo"
    where = f"tcp://127.0.0.1:{port}"
    dist.init_process_group(backend, init_method=where, rank=rank, world_size=RANKS)
    report: dict[str, Any] = {
        "about": provenance(),
        "sizes": {n: getattr(sizes, n) for n in ("rows", "width", "repeats")},
    }
    report["devices"] = min(RANKS, torch.cuda.device_count())
    for name, found in measured(sizes, rank, dist.group.WORLD, device):
        report[name] = found
        if rank == 0:
            print(
                name,
                *(f"{k} {statistics.median(v):.4f}" for k, v in found.items() if v),
                sep="  ",
                flush=True,
            )
            sizes.out.parent.mkdir(parents=True, exist_ok=True)
            sizes.out.write_text(json.dumps(report, indent=1) + "\n")
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    defaults = {"rows": 24576, "width": 2048, "repeats": 10, "port": 29571}
    for name, default in defaults.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    sizes = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("this needs a CUDA device")
    os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    torch.multiprocessing.spawn(one_rank, args=(sizes, sizes.port), nprocs=RANKS)


if __name__ == "__main__":
    main()
