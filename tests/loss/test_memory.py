"""The bytes of docs/loss.md, "Memory and speed": what the kernels hold above their inputs."""

import pytest
import torch

from fxskip.loss import hidden_kl, sparse_kl
from fxskip.loss.spare import Spare
from tests.loss.implementations import NEEDS_TRITON, has_triton
from tests.loss.spies import Ledger, interpret_in_place

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")
N, V, K = 64, 200, 5
PADDED = 256  # rows of the logits begin at multiples of 128
SCALARS = 64  # the loss, its sums and the denominator, of 4 or 8 bytes each


@pytest.fixture(autouse=True)
def in_place(monkeypatch):
    if has_triton():
        interpret_in_place(monkeypatch)


def seeded(width, dtype=torch.float32):
    torch.manual_seed(0)
    hidden, weight = torch.randn(N, width, dtype=dtype), torch.randn(V, width, dtype=dtype)
    ids = torch.rand(N, V).topk(K).indices
    logp = torch.randn(N, K).log_softmax(-1) - 0.1
    return hidden.requires_grad_(), weight.requires_grad_(), ids, logp


@NEEDS_TRITON
@pytest.mark.parametrize(("chunk_tokens", "accumulate"), [(16, 2), (16, 1), (8, 4), (64, 2)])
def test_the_kernels_hold_the_gradients_the_logits_and_nothing_else(chunk_tokens, accumulate):
    width = 24  # a row of d hidden has room for the numbers of its teacher's row
    inputs = seeded(width)
    step = min(chunk_tokens * accumulate, N)
    with Ledger(*inputs) as ledger:
        loss = sparse_kl(
            *inputs, chunk_tokens=chunk_tokens, accumulate=accumulate, implementation="triton", validate=False
        )
    d_hidden, d_weight, logits = N * width * 4, V * width * 4, step * PADDED * 4
    assert 0 <= ledger.peak - (d_hidden + d_weight + logits) <= SCALARS
    assert 0 <= ledger.live - (d_hidden + d_weight) <= SCALARS
    del loss
    assert ledger.live <= SCALARS  # the denominator's and others' last numbers


@NEEDS_TRITON
def test_what_does_not_fit_into_d_hidden_is_allocated_for_a_step():
    for wants_hidden, width in ((True, 6), (False, 24)):
        inputs = seeded(width)
        inputs[0].requires_grad_(wants_hidden)
        with Ledger(*inputs) as ledger:
            sparse_kl(*inputs, chunk_tokens=16, implementation="triton", validate=False)
        fixed = N * width * 4 * wants_hidden + V * width * 4 + 32 * PADDED * 4
        scratch = 32 * (8 * K + 24)
        least = 0 if wants_hidden else scratch  # some of it fits
        assert least < ledger.peak - fixed <= scratch + SCALARS


@NEEDS_TRITON
@pytest.mark.parametrize("is_shared", [False, True], ids=["two heads", "one head"])
@pytest.mark.parametrize("beta", [0.0, 0.5])
def test_an_online_teacher_has_one_chunk_of_logits(beta, is_shared):
    width, chunk_tokens = 24, 16
    hidden, weight = seeded(width)[:2]
    teacher = torch.randn(N, width)
    head = weight if is_shared else weight.detach().clone()
    with Ledger(hidden, weight, teacher, head) as ledger:
        hidden_kl(
            hidden, weight, teacher, head, beta=beta, chunk_tokens=chunk_tokens, implementation="triton",
            validate=False,
        )  # fmt: skip
    held = N * width * 4 + V * width * 4 + 3 * chunk_tokens * PADDED * 4
    sums = chunk_tokens * 4 * (4 + 1 + 2)  # and share, and the losses of two chunks
    # The states of both, for one product, gone before the sums; beside them the losses of the chunk before.
    stacked = (2 * width + 1) * chunk_tokens * 4 * is_shared
    assert 0 < ledger.peak - held <= max(sums, stacked) + SCALARS


@NEEDS_TRITON
def test_masked_tokens_are_gathered_a_step_at_a_time():
    width = 24
    inputs = seeded(width)
    weight = torch.arange(N).remainder(2).float()
    with Ledger(*inputs, weight) as ledger:
        sparse_kl(*inputs, token_weight=weight, chunk_tokens=8, implementation="triton", validate=False)
    counted, step = N // 2, 16
    held = counted * width * 4 + V * width * 4 + step * PADDED * 4  # as if only they were there ...
    # ... and their states, numbers and weights
    gathered = step * width * 4 + counted * 8 + N * 4
    teacher = step * (K * (8 + 4) + 4)  # and the share of each token
    assert gathered <= ledger.peak - held <= gathered + teacher + SCALARS


def test_the_backward_adds_the_weights_gradient_in_its_own_dtype():
    width = 24
    inputs = seeded(width, torch.bfloat16)
    with Ledger(*inputs) as ledger:
        loss = sparse_kl(*inputs, chunk_tokens=16, validate=False)
        ledger.peak = ledger.live
        loss.backward()
    assert 0 <= ledger.peak - (N * width * 2 + V * width * (4 + 2)) <= SCALARS
    assert 0 <= ledger.live - (N + V) * width * 2 <= V * width * 4 + SCALARS


def test_spare_memory_is_aligned_disjoint_and_followed_by_new():
    memory = torch.zeros(50, dtype=torch.bfloat16)[1:]
    spare = Spare(memory, memory.device)
    taken = [
        spare.take((2, 3), torch.float32),
        spare.take((5,), torch.float32),
        spare.take((20,), torch.float32),
    ]
    for number, tensor in enumerate(taken):
        tensor.fill_(number)
    inside = [tensor.untyped_storage().data_ptr() == memory.untyped_storage().data_ptr() for tensor in taken]
    assert inside == [True, True, False]
    assert all(tensor.data_ptr() % 16 == 0 for tensor in taken)
    assert all((tensor == number).all() for number, tensor in enumerate(taken))
