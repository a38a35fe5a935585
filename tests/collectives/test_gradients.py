"""Gradients of the mean loss, their norm, and optimizers, with some parameters spread over processes."""

import copy
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import fxskip
from tests.collectives.spreads import ROUNDING, difference, in_mode, model, own_batch, spread, whole
from tests.ranks import run_ranks
from tests.training_loop.ranks import run_on_ranks


@cache
def pair() -> tuple[nn.Module, nn.Module]:
    original = model("mixtral", layers=2, double=True)
    return spread(original), fxskip.transform(original, "farskip")


def gradients_of_the_mean(alone: nn.Module, ranks: int) -> dict[str, torch.Tensor]:
    """What one process computes from the batches of all."""
    alone.zero_grad(set_to_none=True)
    for rank in range(ranks):
        (alone(**own_batch(rank), use_cache=False).loss / ranks).backward()
    return {name: p.grad for name, p in alone.named_parameters() if p.grad is not None}


def assert_close(module: nn.Module, want: dict[str, torch.Tensor]) -> None:
    found = {n.removeprefix("module."): p.grad for n, p in module.named_parameters() if p.grad is not None}
    assert found.keys() == want.keys()
    for name, gradient in found.items():
        assert difference(whole(gradient), want[name]) < ROUNDING, name


def the_mean_over_processes(rank: int, folder: Path) -> None:
    twin, alone = in_mode(pair()[0], "scheduled"), pair()[1]
    twin(**own_batch(rank), use_cache=False).loss.backward()
    fxskip.average_gradients(twin)
    assert_close(twin, gradients_of_the_mean(alone, dist.get_world_size()))


def the_mean_beside_ddp(rank: int, folder: Path) -> None:
    twin, alone = DistributedDataParallel(in_mode(pair()[0], "scheduled")), pair()[1]
    twin(**own_batch(rank), use_cache=False).loss.backward()
    fxskip.average_gradients(twin, dense=False)
    assert_close(twin, gradients_of_the_mean(alone, dist.get_world_size()))


def a_gradient_on_one_rank_only(rank: int, folder: Path) -> None:
    twin = in_mode(pair()[0], "scheduled")
    unused, never = nn.Parameter(torch.ones(2).double()), nn.Parameter(torch.ones(2).double())
    twin.register_parameter("on_one_rank", unused)
    twin.register_parameter("on_none", never)
    if rank == 0:
        unused.grad = torch.full_like(unused, 4.0)
    fxskip.average_gradients(twin)
    assert torch.equal(unused.grad, torch.full_like(unused, 2.0)) and never.grad is None


def the_norm_of_the_whole_gradient(rank: int, folder: Path) -> None:
    twin, alone = in_mode(pair()[0], "scheduled"), pair()[1]
    for norm_type in (2.0, 1.0, float("inf")):
        twin.zero_grad(set_to_none=True)
        twin(**own_batch(rank), use_cache=False).loss.backward()
        fxskip.average_gradients(twin)
        gradients_of_the_mean(alone, 2)
        want = torch.nn.utils.clip_grad_norm_(alone.parameters(), 0.01, norm_type)
        got = fxskip.clip_grad_norm_(twin.parameters(), 0.01, norm_type)
        assert difference(got, want) < ROUNDING and float(want) > 0.01
        assert_close(twin, {n: p.grad for n, p in alone.named_parameters() if p.grad is not None})


def the_norm_where_one_rank_has_less(rank: int, folder: Path) -> None:
    """Of experts, rank 0 has no gradient at all; the norm is that of zeros in their place."""
    twin = in_mode(pair()[0], "scheduled")
    for norm_type in (2.0, 3.0, float("inf")):
        twin.zero_grad(set_to_none=True)
        twin(**own_batch(rank), use_cache=False).loss.backward()
        fxskip.average_gradients(twin)
        everything = []
        for parameter in twin.parameters():
            spread_out = isinstance(parameter, DTensor)
            if rank == 0 and spread_out:
                parameter.grad = None
            if spread_out:
                gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                everything.append(gradient.full_tensor().flatten())  # type: ignore[attr-defined]
            elif parameter.grad is not None:
                everything.append(parameter.grad.flatten())
        want = torch.linalg.vector_norm(torch.cat(everything), norm_type)
        got = fxskip.clip_grad_norm_(twin.parameters(), 1e-3, norm_type)
        assert difference(got, want) < ROUNDING and want > 1e-3
        again = fxskip.clip_grad_norm_(twin.parameters(), 1.0, norm_type)
        assert difference(again, torch.tensor(1e-3).double()) < 1e-2  # 1e-6 is added to the norm


def a_norm_that_is_not_finite(rank: int, folder: Path) -> None:
    """On one rank alone; all say so, and nothing is scaled."""
    twin = in_mode(pair()[0], "scheduled")
    twin(**own_batch(rank), use_cache=False).loss.backward()
    fxskip.average_gradients(twin)
    experts = next(p for p in twin.parameters() if isinstance(p, DTensor))
    if rank == 1:
        experts.grad.to_local()[0] = float("nan")  # type: ignore[union-attr]
    before = twin.lm_head.weight.grad.clone()  # type: ignore[union-attr,operator]
    with pytest.raises(RuntimeError, match=r"clip_grad_norm_: the norm of order 2.0 of the gradients is nan"):
        fxskip.clip_grad_norm_(twin.parameters(), 1e-3, error_if_nonfinite=True)
    assert torch.equal(twin.lm_head.weight.grad, before)  # type: ignore[union-attr,arg-type]
    assert fxskip.clip_grad_norm_(twin.parameters(), 1e-3).isnan()
    with pytest.raises(fxskip.PassError, match="norm_type is 0"):
        fxskip.clip_grad_norm_(twin.parameters(), 1e-3, 0)


def a_copy_has_no_gradients(rank: int, folder: Path) -> None:
    """Neither of what each process holds, as torch copies parameters, nor of experts; the original keeps its own."""
    twin = in_mode(pair()[0], "scheduled")
    twin(**own_batch(rank), use_cache=False).loss.backward()
    had = [name for name, p in twin.named_parameters() if p.grad is not None]
    other = copy.deepcopy(twin)
    assert [name for name, p in other.named_parameters() if p.grad is not None] == []
    assert [name for name, p in twin.named_parameters() if p.grad is not None] == had
    assert any("experts" in name for name in had)


def steps(module: nn.Module, optimizer: torch.optim.Optimizer, rank: int, *, mean: bool) -> None:
    """Three steps with clipping; `mean` over both batches in one process."""
    for number in range(3):
        batches = [own_batch(r, 2, 7 + number) for r in (range(2) if mean else [rank])]
        for inputs in batches:
            (module(**inputs, use_cache=False).loss / len(batches)).backward()
        if not mean:
            fxskip.average_gradients(module)
        fxskip.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def optimizers(rank: int, folder: Path) -> None:
    """To rounding, which AdamW enlarges where a gradient is near zero."""
    adamw: Any = torch.optim.AdamW
    for make in (
        lambda m: adamw(m.parameters(), lr=1e-3),
        lambda m: adamw(fxskip.parameter_groups(m), lr=1e-3, foreach=True),
        lambda m: adamw(fxskip.parameter_groups(m), lr=1e-3, fused=True),
        lambda m: torch.optim.SGD(m.parameters(), lr=0.1),
        lambda m: torch.optim.SGD(fxskip.parameter_groups(m), lr=0.1, foreach=True),
    ):
        twin, alone = (
            in_mode(pair()[0], "scheduled"),
            fxskip.transform(model("mixtral", layers=2, double=True), "farskip"),
        )
        steps(twin, make(twin), rank, mean=False)
        steps(alone, make(alone), rank, mean=True)
        assert sum(isinstance(p, DTensor) for p in twin.parameters()) == 4
        for (name, got), want in zip(twin.named_parameters(), alone.parameters(), strict=True):
            assert difference(whole(got.detach()), want.detach()) < 1e-8, name


def other_parameters_train(rank: int, folder: Path) -> None:
    """What one rank has frozen would be averaged with what another rank has in its place."""
    twin = in_mode(pair()[0], "scheduled")
    twin(**own_batch(rank), use_cache=False).loss.backward()
    twin.lm_head.weight.requires_grad_(rank == 0)  # type: ignore[union-attr,operator]
    with pytest.raises(fxskip.CollectiveError, match="average_gradients: the processes train different"):
        fxskip.average_gradients(twin)
    twin.lm_head.weight.requires_grad_(True)  # type: ignore[union-attr,operator]


def the_norm_of_one_parameter(rank: int, folder: Path) -> None:
    parameter = nn.Parameter(torch.ones(4))
    parameter.grad = torch.full((4,), 3.0)
    assert fxskip.clip_grad_norm_(parameter, 1.0) == 6.0
    torch.testing.assert_close(parameter.grad, torch.full((4,), 0.5))


def not_spread_is_refused(rank: int, folder: Path) -> None:
    with pytest.raises(fxskip.PassError, match="not spread over processes"):
        fxskip.average_gradients(pair()[1])


def four_processes(rank: int) -> None:
    """Two sets of experts: a mesh of data 2 and expert 2."""
    torch.set_num_threads(1)
    assert pair()[0].model.layers[0].fxskip_mesh.mesh.shape == (2, 2)  # type: ignore[union-attr,index]
    the_mean_over_processes(rank, Path())
    the_mean_beside_ddp(rank, Path())


@pytest.mark.distributed
@pytest.mark.slow
def test_two_processes(tmp_path: Path) -> None:
    checks = (
        the_mean_over_processes,
        the_mean_beside_ddp,
        a_gradient_on_one_rank_only,
        the_norm_of_the_whole_gradient,
        optimizers,
        not_spread_is_refused,
        other_parameters_train,
        the_norm_of_one_parameter,
        the_norm_where_one_rank_has_less,
        a_norm_that_is_not_finite,
        a_copy_has_no_gradients,
    )
    run_on_ranks(checks, tmp_path, limit_s=400)


@pytest.mark.distributed
@pytest.mark.slow
def test_four_processes(tmp_path: Path) -> None:
    run_ranks(four_processes, 4, tmp_path / "store", limit_s=400)
