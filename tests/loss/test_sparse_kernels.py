"""What of the kernels of `sparse_kl` small calls do not reach: long rows, large supports, large addresses."""

import importlib.util

import pytest
import torch

from fxskip.loss.head import Head
from fxskip.loss.sparse_rows import SparseTarget, TorchRows
from fxskip.loss.tails import TAILS
from fxskip.loss.teacher_rows import TeacherRows
from fxskip.loss.vocabulary import Shard
from tests.loss.device import DEVICE
from tests.loss.sparse_inputs import Sparse, assert_close
from tests.loss.spies import interpret_in_place

pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton"),
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed"),
]


def target(rows, columns, entries, tail="truncated", counts=None):
    generator = torch.Generator(DEVICE).manual_seed(0)
    ids = torch.randint(columns, (rows, entries), generator=generator)
    logp = torch.randn(rows, entries, generator=generator).log_softmax(-1) - 0.1
    head = Head(torch.zeros(columns, 1), None, 1.0, None, 1.0)
    teacher = TeacherRows(ids, logp, counts)
    share = torch.full((rows,), 0.25)
    return SparseTarget(head, teacher, share, tail, Shard(None, 0, columns, columns))


def outcome(row_loss, logits):
    """Loss and gradient of the rows; `logits` are overwritten."""
    loss = row_loss.begin(logits, logits, slice(0, len(logits)), None)()
    return loss.double(), logits.double()


@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("columns", [64, 192, 200])
def test_rows_of_several_steps_and_a_rest(tail, columns):
    from fxskip.loss.sparse_triton import TritonRows, Tuning

    made = target(3, columns, 7, tail)
    logits = torch.randn(3, columns)
    got = outcome(TritonRows(made, Tuning(block=16, warps=1)), logits.clone())
    assert_close(got, outcome(TorchRows(made), logits.double()))


@pytest.mark.parametrize("tail", TAILS)
def test_more_entries_than_are_compared_with_each_other(tail):
    from fxskip.loss.sparse_triton import COMPARED_ENTRIES

    entries = COMPARED_ENTRIES + 10
    case = Sparse(tokens=2, vocabulary=entries + 90, entries=entries)
    case.ids[:, 40:60] = case.ids[:, :20]
    case.logp -= 1.0
    case.options = {"counts": torch.tensor([entries, 50])}
    assert_close(case.outcome(tail=tail, implementation="triton"), case.expected(tail))


def test_few_sizes_of_a_support_are_compiled():
    from fxskip.loss.sparse_triton import capacity_of

    assert all(k <= capacity_of(k) <= max(16, 2 * k) for k in range(1, 5000))
    assert len({capacity_of(k) for k in range(1, 131073)}) == 8 + 10


def test_rows_further_apart_than_32_bit_numbers_reach(monkeypatch):
    """Two rows of one chunk, 2**31 elements apart; memory between them is never touched."""
    from fxskip.loss.sparse_triton import TritonRows

    interpret_in_place(monkeypatch)
    columns, stride = 50, 2**31
    far = torch.empty(stride + columns, dtype=torch.bfloat16).as_strided((2, columns), (stride, 1))
    made = target(2, columns, 7)
    logits = torch.randn(2, columns).bfloat16()
    near = outcome(TritonRows(made), logits.clone())
    far.copy_(logits)
    got = outcome(TritonRows(made), far)
    assert all(torch.equal(a, b) for a, b in zip(got, near, strict=True))
