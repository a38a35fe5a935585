"""DDP and FSDP2 around scheduled regions, on one and two processes over gloo: bitwise as around plain autograd."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from fxskip.backward.program import Program, Step
from fxskip.backward.scheduled_region import ScheduledRegion
from fxskip.backward.weight_gradients import product
from tests.backward.random_programs import plain
from tests.training_loop.ranks import run_on_ranks

D = 6


def up(x: Tensor, tied: Tensor, bias: Tensor) -> tuple[Tensor]:
    return (F.gelu(product(F.linear, (1, 2), x, tied, bias)),)


def side(x: Tensor, scale: Tensor) -> tuple[Tensor]:
    return (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * scale,)


def down(x: Tensor, h: Tensor, side: Tensor, tied: Tensor) -> tuple[Tensor]:
    return (x + F.linear(h, tied) * side,)


PROGRAM = Program(
    (
        Step("up", up, ("x", "tied", "bias"), ("h",)),
        Step("side", side, ("x", "scale"), ("s",)),
        Step("down", down, ("x", "h", "s", "tied"), ("y",)),
    ),
    ("x", "tied", "bias", "scale"),
    ("y",),
)
BACKWARD = ("down", "side", "up.dgrad", "up.wgrad")

Run = Callable[..., tuple[Any, ...]]


class Layer(nn.Module):
    def __init__(self, run: Run, unused: bool) -> None:
        super().__init__()
        self.tied = nn.Parameter(torch.randn(D, D) / D)
        self.bias = nn.Parameter(torch.randn(D))
        self.scale = nn.Parameter(torch.randn(D))
        if unused:
            self.unused = nn.Parameter(torch.randn(D))
        self.run = run

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.run(x, self.tied, self.bias, self.scale)[0]
        return out


def plainly(*inputs: Any) -> tuple[Any, ...]:
    return plain(PROGRAM, inputs)


def pair(unused: bool = False) -> tuple[nn.Module, nn.Module]:
    """A network of scheduled regions, and the same under plain autograd."""

    def network(run: Callable[[], Run]) -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(D, D), Layer(run(), unused), Layer(run(), False))

    return network(lambda: ScheduledRegion(PROGRAM, backward=BACKWARD)), network(lambda: plainly)


def batch(rank: int, step: int) -> Tensor:
    return torch.randn(3 + rank, D, generator=torch.Generator().manual_seed(10 * step + rank))


def gradients(module: nn.Module) -> dict[str, Tensor | None]:
    return {n: full(p.grad) for n, p in module.named_parameters()}


def full(gradient: Tensor | None) -> Tensor | None:
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient


def assert_same(one: nn.Module, other: nn.Module) -> None:
    want = gradients(other)
    assert any(gradient is not None for gradient in want.values())
    for name, gradient in gradients(one).items():
        expected = want[name]
        assert (gradient is None) == (expected is None), name
        if gradient is not None and expected is not None:
            assert gradient.isfinite().all(), name
            assert torch.equal(gradient, expected), name


def compare(rank: int, wrap: Callable[[nn.Module], nn.Module], unused: bool = False) -> None:
    """Three optimizer steps, the first of which accumulates over two batches."""
    wrapped = [wrap(module) for module in pair(unused)]
    optimizers = [torch.optim.SGD(module.parameters(), lr=1e-3) for module in wrapped]
    for step in range(3):
        for module in wrapped:
            for part in range(2 if step == 0 else 1):
                module(batch(rank, 5 * step + part)).square().mean().backward()
        assert_same(*wrapped)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def ddp(rank: int, folder: Path) -> None:
    compare(rank, DistributedDataParallel)


def ddp_finds_unused_parameters(rank: int, folder: Path) -> None:
    compare(rank, lambda m: DistributedDataParallel(m, find_unused_parameters=True), unused=True)


def ddp_with_a_static_graph(rank: int, folder: Path) -> None:
    wrapped = [DistributedDataParallel(module, static_graph=True) for module in pair()]
    for step in range(3):
        for module in wrapped:
            module.zero_grad()
            module(batch(rank, step)).square().mean().backward()
        assert_same(*wrapped)


def ddp_without_synchronisation(rank: int, folder: Path) -> None:
    wrapped = [DistributedDataParallel(module) for module in pair()]
    for module in wrapped:
        with module.no_sync():
            module(batch(rank, 0)).square().mean().backward()
        module(batch(rank, 1)).square().mean().backward()
    assert_same(*wrapped)


def ddp_reduces_while_steps_still_run(rank: int, folder: Path) -> None:
    """The first gradient to be complete is on its way before the last step of the region has run backward."""
    events: list[str] = []

    class Log(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            events.append("last step")
            return gradient

    steps = (
        Step("log", lambda x: (Log.apply(x),), ("x",), ("a",)),
        Step("scale", lambda a, w: (a * w,), ("a", "w"), ("y",)),
    )
    region = ScheduledRegion(Program(steps, ("x", "w"), ("y",)))

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.w = nn.Linear(D, D), nn.Parameter(torch.ones(D))

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = region(self.first(x), self.w)[0]
            return out

    net = DistributedDataParallel(Net(), bucket_cap_mb=1e-5)
    # A lambda, for DDP wants annotations that are no strings, or none.
    net.register_comm_hook(
        None, lambda state, bucket: (events.append("reduce"), allreduce_hook(None, bucket))[1]
    )
    for step in range(2):  # DDP rebuilds its buckets after the first step, in the order gradients arrived
        events.clear()
        net(batch(rank, step)).square().mean().backward()
    assert events[:2] == ["reduce", "last step"]


def fsdp2_around_the_network(rank: int, folder: Path) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    compare(rank, lambda module: fully_shard(module, mesh=mesh))


def fsdp2_around_each_layer(rank: int, folder: Path) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)

    def shard(module: nn.Module) -> nn.Module:
        for layer in module.children():
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        return fully_shard(module, mesh=mesh, mp_policy=policy)

    compare(rank, shard)


@pytest.mark.distributed
@pytest.mark.slow
def test_data_parallel_around_scheduled_regions(tmp_path: Path) -> None:
    checks = (
        ddp,
        ddp_finds_unused_parameters,
        ddp_with_a_static_graph,
        ddp_without_synchronisation,
        ddp_reduces_while_steps_still_run,
        fsdp2_around_the_network,
        fsdp2_around_each_layer,
    )
    run_on_ranks(checks, tmp_path, limit_s=120)


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    """A group of this process alone."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("check", [ddp, ddp_finds_unused_parameters, fsdp2_around_each_layer])
def test_data_parallel_on_one_process(
    alone: None, check: Callable[[int, Path], None], tmp_path: Path
) -> None:
    check(0, tmp_path)
