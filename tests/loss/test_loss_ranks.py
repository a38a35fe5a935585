"""A vocabulary over two processes: loss, d hidden and each shard's gradients are those of one process."""

import contextlib
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from fxskip.errors import FxskipError
from fxskip.loss import hidden_kl, sparse_kl
from fxskip.loss.sparse_baselines import dense_sparse_kl, forward_chunked_sparse_kl, full_chunked_sparse_kl
from fxskip.loss.tails import TAILS
from tests.loss.formulas import Case, kl, logits
from tests.loss.implementations import has_triton
from tests.loss.sparse_formulas import loss_and_gradients
from tests.loss.sparse_inputs import COUNTS, WEIGHTS, D, K, N, Sparse, V, assert_close
from tests.ranks import run_ranks

RANKS = 2
PADDED = V + 6


def one_rank(rank: int) -> None:
    equal_to_one_process(rank)
    an_online_teacher_equals_one_process(rank)
    a_rank_may_hold_nothing_but_padding(rank)
    gradients_agree_with_autograd(rank)
    data_parallel_ranks_add_up(rank)
    wrong_shards_are_refused(rank)


def equal_to_one_process(rank: int) -> None:
    """Shards of unequal size, the last with padding; row 0's support lies on one rank alone."""
    shard = [slice(0, 30), slice(30, PADDED)][rank]
    for tail, options in (
        ("truncated", {}),
        ("truncated", {"scale": 0.7, "softcap": 3.0, "temperature": 0.6}),
        ("ghost", {"counts": COUNTS}),
        ("renormalised", {"token_weight": WEIGHTS, "denominator": 5.0}),
        ("subset", {}),
    ):
        case = Sparse(vocabulary=PADDED, bias=True, options=options)
        case.ids %= V
        case.ids[0] = torch.arange(K)
        hidden, weight, bias = case.leaves
        right = loss_and_gradients(tail, case.leaves, case.ids, case.logp, vocabulary=V, **options)
        right = [right[0], right[1], right[2][shard], right[3][shard]]
        # The interpreter takes its time: a case with all that the kernels do between and after the exchange.
        is_interpreted = tail == "ghost" and has_triton()
        for implementation in ("torch", "triton") if is_interpreted else ("torch",):
            leaves = [hidden, *(leaf.detach()[shard].requires_grad_() for leaf in (weight, bias))]
            loss = sparse_kl(
                *leaves[:2], case.ids, case.logp, bias=leaves[2], tail=tail, vocabulary=V, group=dist.group.WORLD,
                implementation=implementation, chunk_tokens=4, **options,
            )  # fmt: skip
            assert_close([loss.detach(), *torch.autograd.grad(loss, leaves)], right)


def an_online_teacher_equals_one_process(rank: int) -> None:
    """Student and teacher of different widths; the masses of a rank differ between them."""
    shard = [slice(0, 30), slice(30, PADDED)][rank]
    for options in (
        {"beta": 0.0},
        {"beta": 1.0, "scale": 0.7, "softcap": 3.0, "temperature": 0.6},
        {"beta": 0.3, "token_weight": WEIGHTS, "denominator": 5.0},
    ):
        case = Case(vocabulary=PADDED, bias=True)
        with torch.no_grad():
            case.biases["student_bias"][:20] += 2.0
        hidden, weight, bias = case.student
        right = case.expected(vocabulary=V, **options)
        right = [right[0], right[1], right[2][shard], right[3][shard]]
        # The interpreter takes its time: forward KL is the reverse with other sums.
        is_interpreted = options["beta"] > 0 and has_triton()
        for implementation in ("torch", "triton") if is_interpreted else ("torch",):
            leaves = [hidden, *(leaf.detach()[shard].requires_grad_() for leaf in (weight, bias))]
            loss = hidden_kl(
                *leaves[:2], case.teacher_hidden, case.teacher_weight[shard], student_bias=leaves[2],
                teacher_bias=case.biases["teacher_bias"][shard], vocabulary=V, group=dist.group.WORLD,
                implementation=implementation, chunk_tokens=4, **options,
            )  # fmt: skip
            assert_close([loss.detach(), *torch.autograd.grad(loss, leaves)], right)


def a_rank_may_hold_nothing_but_padding(rank: int) -> None:
    """As where the padded size of a vocabulary is a multiple of the number of ranks, times some block."""
    shard = [slice(0, V), slice(V, 2 * V)][rank]
    case, pair = Sparse(vocabulary=2 * V), Case(vocabulary=2 * V)
    case.ids %= V
    options = {"vocabulary": V, "group": dist.group.WORLD}
    right = loss_and_gradients("ghost", case.leaves, case.ids, case.logp, vocabulary=V)
    for implementation in ("torch", "triton") if has_triton() else ("torch",):
        options["implementation"] = implementation
        leaves = [case.leaves[0], case.leaves[1].detach()[shard].requires_grad_()]
        loss = sparse_kl(*leaves, case.ids, case.logp, tail="ghost", **options)
        got = [loss.detach(), *torch.autograd.grad(loss, leaves)]
        assert_close(got, [right[0], right[1], right[2][shard]])
        for beta in (0.0, 0.5, 1.0) if implementation == "torch" else (0.5,):
            expected = pair.expected(vocabulary=V, beta=beta)
            leaves = [pair.student_hidden, pair.student_weight.detach()[shard].requires_grad_()]
            teacher = pair.teacher_hidden, pair.teacher_weight[shard]
            loss = hidden_kl(*leaves, *teacher, beta=beta, **options)
            got = [loss.detach(), *torch.autograd.grad(loss, leaves)]
            assert_close(got, [expected[0], expected[1], expected[2][shard]])


def gradients_agree_with_autograd(rank: int) -> None:
    """The baselines, and equal shards without validation."""
    shard = slice(rank * V // 2, (rank + 1) * V // 2)
    case = Sparse()
    hidden, weight = case.leaves
    right = case.expected()
    leaves = [hidden, weight.detach()[shard].requires_grad_()]
    for form, options in (
        (dense_sparse_kl, {}),
        (forward_chunked_sparse_kl, {"chunk_tokens": 4}),
        (full_chunked_sparse_kl, {"chunk_tokens": 4}),
        (sparse_kl, {"chunk_tokens": 4, "validate": False}),
    ):
        loss = form(*leaves, case.ids, case.logp, group=dist.group.WORLD, **options)
        assert_close(
            [loss.detach(), *torch.autograd.grad(loss, leaves)], [right[0], right[1], right[2][shard]]
        )


def data_parallel_ranks_add_up(rank: int) -> None:
    """Different tokens on each rank, two micro-batches on one: with the global count it is one batch."""
    case = Sparse(entries=K)
    right = case.expected()
    head = torch.nn.Linear(D, V, bias=False)
    with torch.no_grad():
        head.weight.copy_(case.leaves[1])
    model = DistributedDataParallel(Scored(head))
    micro_batches = [[slice(0, 4)], [slice(4, 9), slice(9, N)]][rank]
    losses = []
    for number, rows in enumerate(micro_batches):
        last = number == len(micro_batches) - 1
        with contextlib.nullcontext() if last else model.no_sync():
            # DDP takes the mean over ranks, and the loss is to be the sum over all tokens by their number.
            loss = model(case.leaves[0][rows].detach(), case.ids[rows], case.logp[rows], N / RANKS)
            loss.backward()
            losses.append(loss.detach())
    total = torch.stack(losses).sum()
    dist.all_reduce(total)
    assert_close([total / RANKS, head.weight.grad], [right[0], right[2]])


class Scored(torch.nn.Module):
    def __init__(self, head: torch.nn.Linear) -> None:
        super().__init__()
        self.head = head

    def forward(self, hidden, ids, logp, denominator):
        return sparse_kl(hidden, self.head.weight, ids, logp, denominator=denominator)


def wrong_shards_are_refused(rank: int) -> None:
    ids, logp = torch.zeros(N, 1, dtype=torch.int64), torch.full((N, 1), -1.0)
    shard = torch.zeros(V // 2, D)
    with pytest.raises(FxskipError, match="vocabulary is 51, and weight has 50 rows on 2 ranks"):
        sparse_kl(torch.zeros(N, D), shard, ids, logp, vocabulary=V + 1, group=dist.group.WORLD)
    tokens = N - rank
    with pytest.raises(FxskipError, match="the ranks of group differ: tokens of hidden is 13, 12"):
        sparse_kl(torch.zeros(tokens, D), shard, ids[:tokens], logp[:tokens], group=dist.group.WORLD)
    arguments = torch.zeros(N, D), shard, ids, logp
    different = (
        ({"chunk_tokens": 4 + rank}, "chunk_tokens is 4, 5"),
        ({"token_weight": torch.ones(N).index_fill(0, torch.arange(rank), 0.0)}, "weight is 13, 12"),
        ({"tail": TAILS[rank]}, "tail is 0, 1"),
        ({"vocabulary": V - rank}, "vocabulary is 50, 49"),
    )
    for options, found in different:
        with pytest.raises(FxskipError, match=found):
            sparse_kl(*arguments, **options, group=dist.group.WORLD)
    wanted = torch.zeros(N, D, requires_grad=rank == 0)
    with pytest.raises(FxskipError, match=r"hidden\.requires_grad is 1, 0"):
        sparse_kl(wanted, *arguments[1:], group=dist.group.WORLD)


@pytest.mark.distributed
@pytest.mark.skipif(
    torch.cuda.is_available(),
    reason="gloo has the CPU's tensors; fxskip bench loss --ranks 2 compares on GPUs",
)
@pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")
def test_two_ranks_equal_one(tmp_path: Path) -> None:
    run_ranks(one_rank, RANKS, tmp_path / "store")


def each_on_its_gpu(rank: int) -> None:
    """Both losses over NCCL, equal shards, against float64."""
    torch.cuda.set_device(rank)
    group = dist.new_group(backend="nccl")
    tokens, width, vocabulary = 65, 64, 1002
    generator = torch.Generator().manual_seed(0)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).cuda()

    hidden, other = (randn(tokens, width).requires_grad_(wanted) for wanted in (True, False))
    weight = (randn(vocabulary, width) / 8).requires_grad_()
    ids = torch.rand(tokens, vocabulary, generator=generator).topk(20).indices.cuda()
    logp = randn(tokens, 20).log_softmax(-1) - 0.1
    half = slice(rank * vocabulary // 2, (rank + 1) * vocabulary // 2)
    leaves = [hidden, weight.detach()[half].clone().requires_grad_()]
    options = {"group": group, "chunk_tokens": 16, "implementation": "triton"}

    def require_equal(loss: torch.Tensor, right: list[torch.Tensor]) -> None:
        got = [loss.detach(), *torch.autograd.grad(loss, leaves)]
        assert_close(got, [right[0], right[1], right[2][half]], rtol=1e-4, atol=1e-6)

    for validate in (True, False):
        for tail in TAILS:
            right = loss_and_gradients(tail, [hidden, weight], ids, logp)
            require_equal(sparse_kl(*leaves, ids, logp, tail=tail, validate=validate, **options), right)
        for beta in (0.0, 0.5, 1.0):
            wide = [leaf.detach().double().requires_grad_() for leaf in (hidden, weight)]
            loss = kl(logits(*wide), logits(other, weight.detach()), beta=beta)
            right = [loss.detach(), *torch.autograd.grad(loss, wide)]
            teacher = other, weight.detach()[half]
            require_equal(hidden_kl(*leaves, *teacher, beta=beta, validate=validate, **options), right)


@pytest.mark.distributed
@pytest.mark.gpu(2)
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_two_gpus_equal_float64(tmp_path: Path) -> None:
    run_ranks(each_on_its_gpu, RANKS, tmp_path / "store")


@pytest.mark.parametrize("form", [dense_sparse_kl, forward_chunked_sparse_kl, full_chunked_sparse_kl])
def test_the_baselines_on_one_rank(form):
    case = Sparse()
    loss = form(*case.leaves, case.ids, case.logp)
    assert_close([loss.detach(), *torch.autograd.grad(loss, case.leaves)], case.expected())
