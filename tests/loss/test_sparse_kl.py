"""`sparse_kl` is its formula, in both implementations; the kernels run in Triton's interpreter."""

import math
from itertools import combinations

import pytest
import torch

from fxskip.errors import FxskipError
from fxskip.loss import sparse_kl, truncated_minimum
from fxskip.loss.tails import TAILS
from tests.loss.device import DEVICE
from tests.loss.implementations import BY_TAIL, IMPLEMENTATIONS, NEEDS_TRITON, has_triton
from tests.loss.sparse_inputs import COUNTS, OPTIONS, WEIGHTS, K, N, Sparse, V, assert_close

pytestmark = pytest.mark.filterwarnings(
    "ignore::RuntimeWarning:triton"
)  # numpy's, where a mask discards a value


@NEEDS_TRITON
@BY_TAIL
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_the_kernels_equal_the_formula(tail, options):
    case = Sparse(options=options, bias="scale" in options)
    case.ids %= V - 7  # inside the vocabulary of every option; some are equal now
    got = case.outcome(tail=tail, implementation="triton", chunk_tokens=5)
    assert got[0].dtype == torch.float32
    assert_close(got, case.expected(tail))


@BY_TAIL
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_plain_torch_equals_the_formula(tail, bias, options):
    case = Sparse(dtype=torch.float64, options=options, bias=bias)
    case.ids %= V - 7
    assert_close(case.outcome(tail=tail, chunk_tokens=4), case.expected(tail), rtol=1e-10, atol=1e-12)


PAIRS = list(combinations([name for name in OPTIONS if name not in ("plain", "after the product", "all")], 2))


@pytest.mark.parametrize(("one", "other"), PAIRS, ids="+".join)
def test_pairs_of_options(one, other):
    """Plain PyTorch for every tail; the kernels for one, which changes from pair to pair, no worse than it."""
    options = OPTIONS[one] | OPTIONS[other]
    for tail in TAILS:
        case = Sparse(dtype=torch.float64, options=options, bias=True)
        case.ids %= V - 7
        assert_close(case.outcome(tail=tail, chunk_tokens=4), case.expected(tail), rtol=1e-10, atol=1e-12)
    if has_triton():
        number = PAIRS.index((one, other))
        case = Sparse(options=options, bias=number % 2 == 0)
        case.ids %= V - 7
        assert_no_worse(case, TAILS[number % len(TAILS)], chunk_tokens=5)


def assert_no_worse(case, tail, *, margin=2e-6, scales=None, **more):
    """The kernels' errors, against float64 and relative to the plain version's, plus `margin` of a value's size."""
    right = case.expected(tail)
    plain = case.outcome(tail=tail, implementation="torch", **more)
    kernels = case.outcome(tail=tail, implementation="triton", **more)
    for got, other, exact, scale in zip(kernels, plain, right, scales or right, strict=True):
        error, plain_error = ((x.double() - exact).norm() for x in (got, other))
        assert error <= 1.5 * plain_error + margin * scale.norm()


@NEEDS_TRITON
def test_small_logits_under_a_large_softcap():
    """tanh keeps its relative precision near 0: an absolute one would be multiplied by the softcap."""
    case = Sparse(tokens=6, options={"softcap": 1000.0})
    assert_no_worse(case, "truncated", margin=5e-7)


@NEEDS_TRITON
@BY_TAIL
@pytest.mark.parametrize("student", ["far", "near", "equal", "peaked", "flat"])
def test_students_far_from_and_near_to_the_teacher(tail, student):
    case = Sparse(tokens=6)
    scales = case.expected(tail)  # of gradients that are not near 0
    size = {"peaked": 8.0, "flat": 0.01}.get(student, 1.0)
    with torch.no_grad():
        case.leaves[1] *= size
    if student in ("near", "equal"):
        own = case.leaves[0].detach().double() @ case.leaves[1].detach().double().T
        noise = 0.01 if student == "near" else 0.0
        logp = (own + noise * torch.linspace(-1, 1, V, dtype=torch.float64).to(own)).log_softmax(-1)
        case.logp = logp.gather(1, case.ids).float()
    plain = case.outcome(tail=tail, implementation="torch")
    assert_close(plain, case.expected(tail))
    # Compiled, a logit in base 2 and the normaliser beside it are rounded once more: an error that grows with logits.
    largest = (case.leaves[0] @ case.leaves[1].T).abs().max().item() if DEVICE == "cuda" else 0.0
    assert_no_worse(case, tail, margin=2e-6 + 2 * largest * 2**-24, scales=scales)
    if student == "equal" and tail == "ghost":  # the minimum
        assert all(value.norm() <= 1e-5 * scale.norm() for value, scale in zip(plain, scales, strict=True))


@BY_TAIL
def test_plain_torch_in_float32(tail):
    case = Sparse(options=OPTIONS["all"], bias=True)
    assert_close(case.outcome(tail=tail, chunk_tokens=4), case.expected(tail))


@BY_TAIL
@IMPLEMENTATIONS
@pytest.mark.parametrize("entries", [1, V], ids=["K=1", "K=V"])
def test_supports_of_one_token_and_of_all(tail, implementation, entries):
    # Whole rows of float32 probabilities add up to 1 within rounding: a bucket of no tokens must have no mass.
    case = Sparse(entries=entries)
    assert_close(case.outcome(tail=tail, implementation=implementation), case.expected(tail))


@BY_TAIL
@IMPLEMENTATIONS
def test_equal_ids_are_one_token(tail, implementation):
    case = Sparse()
    case.ids[:, 3], case.ids[4] = case.ids[:, 1], 17
    case.logp -= 1.0  # all of row 4 falls on one token
    assert_close(case.outcome(tail=tail, implementation=implementation), case.expected(tail))


@BY_TAIL
@IMPLEMENTATIONS
def test_more_entries_than_a_block_of_the_kernels(tail, implementation):
    case = Sparse(tokens=3, vocabulary=200, entries=150)
    case.ids[:, 140:] = case.ids[:, :10]  # equal ids in two blocks
    case.logp -= 1.0
    assert_close(case.outcome(tail=tail, implementation=implementation), case.expected(tail))


@IMPLEMENTATIONS
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])
def test_small_storage_types_of_the_teacher(implementation, dtype):
    case = Sparse()
    case.ids, case.logp = case.ids.int(), case.logp.to(dtype)
    case.options = {"counts": COUNTS.int()}
    assert_close(case.outcome(implementation=implementation), case.expected())


@IMPLEMENTATIONS
def test_a_student_that_puts_almost_all_mass_on_the_support(implementation):
    # 1 - Q is about 1e-10 here: a difference of float32 numbers near 1 would be 0, and its logarithm infinite.
    case = Sparse(bias=True)
    case.ids[:] = torch.arange(K)
    with torch.no_grad():
        case.leaves[2][:K] += 25.0
    assert_close(case.outcome(tail="ghost", implementation=implementation), case.expected("ghost"), atol=1e-5)


@pytest.mark.parametrize(
    ("tail", "nats"),
    [
        ("truncated", 0.6 * math.log(0.6 / 0.64) + 0.3 * math.log(0.3 / 0.33)),
        ("ghost", 0.6 * math.log(0.6 / 0.64) + 0.3 * math.log(0.3 / 0.33) + 0.1 * math.log(0.1 / 0.03)),
        ("renormalised", 2 / 3 * math.log(2 / 3 / 0.64) + 1 / 3 * math.log(1 / 3 / 0.33)),
        ("subset", 2 / 3 * math.log(2 / 3 / (64 / 97)) + 1 / 3 * math.log(1 / 3 / (33 / 97))),
    ],
)
def test_a_row_by_hand(tail, nats):
    # Teacher .6 and .3 on two tokens; the student has .64, .33 and .03. The truncated loss is negative.
    weight = torch.tensor([0.64, 0.33, 0.03]).log()[:, None]
    logp = torch.tensor([[0.6, 0.3]]).log()
    loss = sparse_kl(torch.ones(1, 1), weight, torch.tensor([[0, 1]]), logp, tail=tail)
    assert loss.item() == pytest.approx(nats, abs=1e-6)
    if tail == "truncated":
        assert loss.item() < 0
        lowest = truncated_minimum(logp)
        assert lowest.item() == pytest.approx(0.9 * math.log(0.9), abs=1e-6)
        best = torch.tensor([0.6 / 0.9, 0.3 / 0.9, 1e-30]).log()[:, None]
        at_best = sparse_kl(torch.ones(1, 1), best, torch.tensor([[0, 1]]), logp)
        assert at_best.item() == pytest.approx(lowest.item(), abs=1e-6)


@IMPLEMENTATIONS
def test_masked_rows_may_hold_anything(implementation):
    case = Sparse(options={"token_weight": WEIGHTS})
    expected = case.expected()
    with torch.no_grad():
        case.leaves[0][WEIGHTS == 0] = torch.nan
    case.logp[WEIGHTS == 0] = -torch.inf
    case.ids[WEIGHTS == 0] = -100
    assert_close(case.outcome(implementation=implementation, chunk_tokens=3), expected)


@IMPLEMENTATIONS
@pytest.mark.parametrize("tokens", [0, N])
def test_without_a_counted_token_loss_and_gradients_are_zero(implementation, tokens):
    case = Sparse(tokens=tokens, bias=True)
    loss = case.call(token_weight=torch.zeros(tokens), implementation=implementation)
    loss.backward()
    assert loss.item() == 0.0
    assert all(leaf.grad is not None and not leaf.grad.any() for leaf in case.leaves)


@IMPLEMENTATIONS
def test_the_denominator_makes_micro_batches_add_up(implementation):
    case = Sparse()
    parts = [slice(0, 1), slice(1, 8), slice(8, N)]
    total = 0.0
    for rows in parts:
        loss = sparse_kl(
            case.leaves[0][rows], case.leaves[1], case.ids[rows], case.logp[rows], denominator=N,
            implementation=implementation,
        )  # fmt: skip
        loss.backward()
        total += loss.detach()
    assert_close([total, *(leaf.grad for leaf in case.leaves)], case.expected())


def test_a_teacher_stored_in_bfloat16_and_counts_of_one_byte():
    entries = 300
    case = Sparse(vocabulary=400, entries=entries)
    case.logp = torch.full((N, entries), 1 / entries).log().bfloat16()  # adds up to 1.006
    expected = case.outcome(counts=torch.full((N,), 100))
    got = case.outcome(counts=torch.full((N,), 100, dtype=torch.uint8))
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    case.logp = torch.full((N, entries), 0.01).log().bfloat16()
    case.call(counts=torch.full((N,), 100))  # 1.011: the rounding of 100 times 0.01
    with pytest.raises(FxskipError, match="add up to 3"):
        case.call()


def test_counts_of_rows_that_do_not_count():
    case = Sparse(options={"token_weight": WEIGHTS, "counts": COUNTS})
    expected = case.outcome()
    case.options["counts"] = COUNTS.masked_fill(WEIGHTS == 0, 9)
    assert all(torch.equal(a, b) for a, b in zip(case.outcome(), expected, strict=True))
