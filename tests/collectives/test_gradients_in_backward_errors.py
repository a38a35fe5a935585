"""Averages of gradients that are refused, that processes do not agree on, or that an error ends."""

import warnings
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import fxskip
from fxskip.collectives.landing import under_way
from tests.collectives.averages import (
    LAYERS,
    assert_same_gradients,
    backward,
    copies,
    pair,
)
from tests.collectives.spreads import in_mode, model, regions, spread
from tests.collectives.test_failures import (
    ATTENTION,
    FailAt,
    Mishap,
    backward_of,
    on_a_group_of_its_own,
    run,
)
from tests.ranks import run_ranks
from tests.training_loop.ranks import run_on_ranks


def refused(rank: int, folder: Path) -> None:
    by_call, student = copies()
    with pytest.raises(fxskip.PassError, match=r"in_backward: the model is inside DistributedDataParallel"):
        backward(DistributedDataParallel(student), rank)
    by_itself = pytest.raises(fxskip.PassError, match="no backward pass of .* averages gradients")
    with by_itself, fxskip.no_sync(by_call):
        pass
    sharded = copies()[1]
    for layer in regions(sharded):
        fully_shard(layer, ignored_params={p for p in layer.parameters() if hasattr(p, "to_local")})
    with pytest.raises(fxskip.PassError, match=r"in_backward: the model is sharded by fully_shard"):
        backward(sharded, rank)
    table = by_call.lm_head.weight  # type: ignore[union-attr]
    table.grad = torch.zeros_like(table).to_sparse()  # type: ignore[arg-type,operator,union-attr]
    with pytest.raises(
        fxskip.PassError, match="the gradient of lm_head.weight is float32 sparse_coo, the parameter"
    ):
        fxskip.average_gradients(by_call)
    with pytest.raises(fxskip.PassError, match="all processes have the same tokens"):
        spread(
            model("mixtral", layers=LAYERS),
            parallel={"tensor": {"size": 2}},
            schedule={"gradients": "in_backward"},
        )


def other_parameters_train(rank: int) -> None:
    """Said in the forward pass, before rows are sent."""
    student = on_a_group_of_its_own(in_mode(pair()[1], "scheduled"))
    if rank == 1:
        student.lm_head.requires_grad_(False)  # type: ignore[union-attr,operator]
    with pytest.raises(fxskip.CollectiveError, match=r"rank 0: .* averages gradients of set [0-9a-f]{4}"):
        backward(student, rank)


def others_would_be_averaged(rank: int, folder: Path) -> None:
    """By call: what differs is named, with the ranks that have it, and what is in another order."""
    by_call = copies()[0]
    by_call.lm_head.requires_grad_(rank == 0)  # type: ignore[union-attr,operator]
    with pytest.raises(
        fxskip.CollectiveError, match="average_gradients: the processes train different"
    ) as caught:
        fxskip.average_gradients(by_call)
    assert "rank 0: lm_head.weight float32[" in str(caught.value)
    assert "rank 1: none of these" in str(caught.value)
    by_call.requires_grad_(False)
    for name in ("one", "other") if rank == 0 else ("other", "one"):
        by_call.register_parameter(name, nn.Parameter(torch.ones(2)))
    with pytest.raises(fxskip.CollectiveError, match="rank 1: number 0 is one ") as caught:
        fxskip.average_gradients(by_call)
    assert "rank 0: number 0 is other float32[2]" in str(caught.value)  # the last one registered comes first


def spread_twice(rank: int, folder: Path) -> None:
    with pytest.raises(fxskip.PassError, match="parallelize: the model is spread already"):
        fxskip.parallelize(copies()[0])


def all_fail_in_backward(rank: int) -> None:
    """While a bucket is in flight; all go on together."""
    by_call, student = copies()
    backward(by_call, rank)
    fxskip.average_gradients(by_call)
    loss = backward_of(student, rank)
    said = "error ended a backward pass, with .*head_gradients .data. of decoder layer 1.* in flight"
    with pytest.warns(UserWarning, match=said), pytest.raises(Mishap), FailAt(f"{ATTENTION}_backward", 1):
        loss.backward()
    assert under_way() == []
    student.zero_grad()
    backward(student, rank)
    assert_same_gradients(student, by_call)


def one_fails_in_backward(rank: int) -> None:
    """In the first layer, behind its last exchange: the other is at the end of the pass."""
    student = on_a_group_of_its_own(in_mode(pair()[1], "scheduled"))
    embedding = student.model.embed_tokens.weight  # type: ignore[union-attr]
    loss = backward_of(student, rank)
    if rank == 1:
        hook = embedding.register_hook(_go_wrong)  # type: ignore[operator,union-attr]
        with pytest.warns(UserWarning, match="in flight"), pytest.raises(Mishap):
            loss.backward()
        hook.remove()
        return
    said = r"embedding_gradients \(data\) of decoder layer 0: waited for in vain: rank 1 had an error"
    with pytest.raises(fxskip.CollectiveError, match=said):
        loss.backward()


def _go_wrong(gradient: Tensor) -> Tensor:
    raise Mishap("the embedding went wrong")


def one_is_in_no_sync(rank: int) -> None:
    student = on_a_group_of_its_own(in_mode(pair()[1], "scheduled"))
    backward(student, rank)
    inside = fxskip.no_sync(student) if rank == 1 else nullcontext()
    with pytest.raises(fxskip.CollectiveError, match="averages"), warnings.catch_warnings(), inside:
        warnings.simplefilter("ignore")
        backward(student, rank)


DATA_AXES = {
    "all_reduce": {"expert": {"size": 2, "exchange": "all_reduce"}},
    "tensor": {"tensor": {"size": 2}},
    "all_to_all": {"expert": {"size": 2}},
}
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def ranks_that_train_other_parameters(rank: int) -> None:
    """On the axis data, and on that of ranks with the same tokens: all four say who, before a gradient is sent, and
    train on when they agree."""
    torch.set_num_threads(1)
    for kind, parallel in DATA_AXES.items():
        student = spread(
            model("qwen2_moe", layers=LAYERS), parallel=parallel, schedule={"gradients": "in_backward"}
        )
        batch_of = rank if kind == "all_to_all" else rank // 2
        some_freeze(student, HEAD, (2, 3), rank, batch_of)
        # Ranks 0 and 1, and 2 and 3, exchange counts of rows, which say it first.
        some_freeze(student, EMBEDDING, (1, 3), rank, batch_of, by_counts=kind == "all_to_all")
        some_are_in_no_sync(student, (2, 3), rank, batch_of)
        backward(student, batch_of)
        embedding = student.get_parameter(EMBEDDING)
        assert embedding.grad is not None and embedding.grad.any()
        mine = embedding.grad.clone()
        torch.distributed.broadcast(mine, 0)
        assert torch.equal(mine, embedding.grad)


def some_freeze(
    student: nn.Module,
    name: str,
    those: tuple[int, ...],
    rank: int,
    batch_of: int,
    *,
    by_counts: bool = False,
) -> None:
    """For one pass, which all ranks refuse: each says what each of them trains, or what its partner does."""
    parameter = student.get_parameter(name)
    parameter.requires_grad_(rank not in those)
    line = f"{name} float32{list(parameter.shape)}"
    said = [f"rank {one}: {'none of these' if one in those else line}" for one in range(4)]
    if by_counts:
        said = [f"rank {rank // 2 * 2}: decoder layer 0"]
    with pytest.raises(fxskip.CollectiveError) as caught:
        backward(student, batch_of)
    assert [one for one in said if one not in str(caught.value)] == [], str(caught.value)
    parameter.requires_grad_(True)


def some_are_in_no_sync(student: nn.Module, those: tuple[int, ...], rank: int, batch_of: int) -> None:
    """For one pass, which all ranks refuse."""
    refused = pytest.raises(fxskip.CollectiveError, match="rank 2: nothing is averaged, inside of no_sync")
    with refused, fxskip.no_sync(student) if rank in those else nullcontext():
        backward(student, batch_of)


@pytest.mark.distributed
@pytest.mark.slow
def test_ranks_that_train_other_parameters(tmp_path: Path) -> None:
    run_ranks(ranks_that_train_other_parameters, 4, tmp_path / "store", limit_s=400)


@pytest.mark.distributed
@pytest.mark.slow
def test_errors(tmp_path: Path) -> None:
    checks = (all_fail_in_backward, one_fails_in_backward, other_parameters_train, one_is_in_no_sync)
    ends, last = run(checks, tmp_path)
    assert (ends, last) == ({0: 0, 1: 0}, ["done", "done"])


@pytest.mark.distributed
def test_two_processes(tmp_path: Path) -> None:
    run_on_ranks((others_would_be_averaged, spread_twice), tmp_path, limit_s=240)


@pytest.mark.distributed
@pytest.mark.slow
def test_refusals(tmp_path: Path) -> None:
    run_on_ranks((refused,), tmp_path, limit_s=300)
