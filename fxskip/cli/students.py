"""What `fxskip trace` and `fxskip tune` run: the student of a saved model, in one process or several."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from fxskip.api import transform
from fxskip.checkpoint.auto_classes import loader
from fxskip.cli.arguments import Dtype
from fxskip.cli.models import load_model, read_config
from fxskip.parallel import EXPERT
from fxskip.runtime.parallelize import axes
from fxskip.spec import Spec
from fxskip.tracing.processes import group, in_processes
from fxskip.tracing.timeline import Timeline
from fxskip.tracing.trace import trace
from fxskip.tracing.tune import Tuning, tune

Result = TypeVar("Result")


@dataclass(frozen=True)
class Request:
    """What is traced or tuned. Tokens are drawn at random, the same ones on ranks that must have the same."""

    model: Path
    """Folder of a saved model, or a config file: then weights are random."""
    spec: Spec
    sequences: int
    """On each rank."""
    tokens: int
    """Of a sequence."""
    steps: int
    dtype: Dtype
    """auto is that of the stored weights; for random ones bfloat16 on a GPU, float32 elsewhere."""
    trains: bool
    """Forward and backward, or forward alone."""


def traced(request: Request, out: Path | None) -> Iterator[Timeline]:
    """One timeline, on rank 0 under torchrun alone; `out` is its folder."""
    return _on_ranks(request, partial(_traced_rank, request, out))


def tuned(request: Request, out: Path) -> Iterator[Tuning]:
    """One tuning, on rank 0 under torchrun alone; `out` is the file of costs."""
    return _on_ranks(request, partial(_tuned_rank, request, out))


def _on_ranks(request: Request, body: Callable[[int], Iterator[Result]]) -> Iterator[Result]:
    """What `body` yields on rank 0. Under torchrun this process is one of those that the spec needs; else they are
    started here."""
    needed = prod(axes(request.spec).values())
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        rank = int(os.environ["RANK"])
        with group(rank, int(os.environ["WORLD_SIZE"]), "env://"):
            found = list(body(rank))
        yield from found if rank == 0 else ()
    elif needed == 1:
        yield from body(0)
    else:
        yield from in_processes(body, needed)


def _traced_rank(request: Request, out: Path | None, rank: int) -> Iterator[Timeline]:
    student, batch = _student_and_batch(request, rank)
    yield trace(student, batch, out if rank == 0 or not dist.is_initialized() else None, request.steps)


def _tuned_rank(request: Request, out: Path, rank: int) -> Iterator[Tuning]:
    student, batch = _student_and_batch(request, rank)
    yield tune(student, batch, out, steps=request.steps)


def _student_and_batch(request: Request, rank: int) -> tuple[nn.Module, dict[str, Any]]:
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    student = transform(_model(request, device), request.spec, inplace=True)
    student.train(request.trains)
    generator = torch.Generator().manual_seed(rank // ranks_with_same_tokens(request.spec))
    size = (request.sequences, request.tokens)
    ids = torch.randint(student.config.get_text_config().vocab_size, size, generator=generator).to(device)
    return student, {"input_ids": ids, "use_cache": False} | ({"labels": ids} if request.trains else {})


def ranks_with_same_tokens(spec: Spec) -> int:
    """How many neighbouring ranks share their tokens: those of the axis tensor, and of experts that are added up."""
    sizes, expert = axes(spec), spec.parallel.expert if spec.parallel is not None else None
    apart = sizes.get(EXPERT, 1) if expert is not None and expert.exchange == "all_to_all" else 1
    return prod(sizes.values()) // apart


def _model(request: Request, device: torch.device) -> Any:
    if not request.model.is_file():
        return load_model(request.model, request.dtype, device)
    found: Any = "bfloat16" if device.type == "cuda" else "float32"
    dtype = getattr(torch, found if request.dtype is Dtype.auto else request.dtype)
    config = read_config(request.model)
    torch.manual_seed(0)  # the same weights on every rank
    with device:
        return loader("trace", config).from_config(config, dtype=dtype)
