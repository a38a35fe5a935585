"""`sparse_kl` is its formula, in both implementations; the kernels run in Triton's interpreter."""

import importlib.util
import math
from dataclasses import dataclass, field
from itertools import combinations
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch._subclasses.fake_tensor import DataDependentOutputException
from torch.utils.checkpoint import checkpoint

from fxskip.errors import FxskipError
from fxskip.loss import sparse_kl, truncated_minimum
from fxskip.loss.operators import sparse_kl_operator
from fxskip.loss.tails import TAILS
from tests.loss.device import DEVICE, on_device
from tests.loss.sparse_formulas import loss_and_gradients, relative_error
from tests.loss.spies import Spy

pytestmark = pytest.mark.filterwarnings(
    "ignore::RuntimeWarning:triton"
)  # numpy's, where a mask discards a value


def has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


N, D, V, K = 13, 6, 50, 5
NEEDS_TRITON = pytest.mark.skipif(not has_triton(), reason="triton is not installed")
IMPLEMENTATIONS = pytest.mark.parametrize(
    "implementation", ["torch", pytest.param("triton", marks=NEEDS_TRITON)]
)
BY_TAIL = pytest.mark.parametrize("tail", TAILS)


@dataclass
class Sparse:
    """Seeded inputs; `options` are those of a call, with the bias among the leaves if there is one."""

    dtype: torch.dtype = torch.float32
    tokens: int = N
    vocabulary: int = V
    entries: int = K
    options: dict = field(default_factory=dict)
    bias: bool = False

    def __post_init__(self):
        generator = torch.Generator(DEVICE).manual_seed(3)

        def randn(*shape):
            return torch.randn(shape, generator=generator, dtype=torch.float64, device=DEVICE)

        self.leaves = [randn(self.tokens, D), randn(self.vocabulary, D)] + [
            randn(self.vocabulary)
        ] * self.bias
        self.leaves = [leaf.to(self.dtype).requires_grad_() for leaf in self.leaves]
        order = torch.rand(self.tokens, self.vocabulary, generator=generator, device=DEVICE).argsort(dim=-1)
        self.ids = order[:, : self.entries].contiguous()
        logp = (2 * randn(self.tokens, self.vocabulary)).log_softmax(dim=-1)
        self.logp = logp.gather(1, self.ids).float()

    def call(self, **more) -> Tensor:
        bias = {"bias": self.leaves[2]} if self.bias else {}
        return sparse_kl(*self.leaves[:2], self.ids, self.logp, **bias, **(self.options | more))

    def outcome(self, **more) -> list[Tensor]:
        loss = self.call(**more)
        return [loss.detach(), *torch.autograd.grad(loss, self.leaves)]

    def expected(self, tail="truncated") -> list[Tensor]:
        return loss_and_gradients(tail, self.leaves, self.ids, self.logp, **self.options)


def assert_close(got, expected, *, rtol=2e-5, atol=2e-6):
    for value, right in zip(got, expected, strict=True):
        torch.testing.assert_close(value.double(), right.double(), rtol=rtol, atol=atol)


WEIGHTS = torch.tensor([0.0, 2.0, 0.5] * 4 + [0.0], device=DEVICE)
COUNTS = torch.tensor([0, 1, 2, 3, 4, 5] * 2 + [5], device=DEVICE)
OPTIONS = {
    "plain": {},
    "counts": {"counts": COUNTS},
    "scale": {"scale": 0.3},
    "softcap": {"softcap": 2.0},
    "temperature": {"temperature": 2.5},
    "after the product": {"scale": 0.7, "softcap": 3.0, "temperature": 0.6},
    "weights": {"token_weight": WEIGHTS},
    "denominator": {"denominator": 29.0},
    "denominator tensor": {"token_weight": WEIGHTS, "denominator": torch.tensor(7.0)},
    "padded": {"vocabulary": V - 7},
    "all": {"scale": 0.7, "softcap": 3.0, "temperature": 0.6, "token_weight": WEIGHTS, "counts": COUNTS},
}


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


@IMPLEMENTATIONS
@pytest.mark.parametrize(("chunk_tokens", "accumulate"), [(1, 3), (5, 1), (5, 2), (13, 2), (100, 7)])
def test_chunks_are_an_upper_bound_and_change_nothing(implementation, chunk_tokens, accumulate):
    case = Sparse()
    got = case.outcome(implementation=implementation, chunk_tokens=chunk_tokens, accumulate=accumulate)
    assert_close(got, case.expected())
    with Spy() as spy:
        case.call(implementation="torch", chunk_tokens=chunk_tokens, accumulate=accumulate)
    columns = 128  # the buffer's rows are padded to this
    assert spy.elements <= max(min(chunk_tokens * accumulate, N) * columns, V * D)


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


def test_the_truncated_minimum_counts_what_the_loss_counts():
    case = Sparse()
    case.logp[WEIGHTS == 0] = torch.nan
    counted = case.logp.where(torch.arange(K) < COUNTS[:, None], -torch.inf).exp().sum(-1)
    rows = torch.tensor([m * math.log(m) if m > 0 else 0.0 for m in counted.tolist()])
    expected = (rows * WEIGHTS)[WEIGHTS > 0].sum() / WEIGHTS.sum()
    got = truncated_minimum(case.logp, counts=COUNTS, token_weight=WEIGHTS)
    assert got.item() == pytest.approx(expected.item(), rel=1e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"logp": [[-1.0]]}, "truncated_minimum: logp is a list"),
        ({"logp": torch.zeros(N)}, r"logp has shape \[13\]\n.*\[N, K\]"),
        ({"logp": torch.zeros(N, K).long()}, "logp is torch.int64"),
        ({"logp": torch.full((N, K), torch.nan)}, r"logp\[0, 0\] is nan"),
        ({"logp": torch.zeros(N, K)}, "row 0 of logp add up to 5"),
        ({"counts": torch.full((N,), K + 1)}, r"counts\[0\] is 6"),
        ({"counts": COUNTS[1:]}, r"counts is torch.int64 \[12\]"),
        ({"token_weight": -WEIGHTS}, r"token_weight\[1\] is -2.0"),
        ({"denominator": 0.0}, "denominator is 0.0"),
    ],
    ids=lambda value: "" if isinstance(value, str) else next(iter(value)),
)
def test_a_bad_argument_of_the_minimum_is_named(change, message):
    with pytest.raises(FxskipError, match=message):
        truncated_minimum(**on_device({"logp": Sparse().logp} | change))


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


def test_only_what_is_wanted_is_computed():
    case = Sparse(bias=True)
    with Spy() as spy:
        case.call(chunk_tokens=N)
    assert spy.products == 3
    case.leaves[1].requires_grad_(False)
    with Spy() as spy:
        loss = case.call(chunk_tokens=N)
    assert spy.products == 2
    assert [saved.numel() for saved in loss.grad_fn.saved_tensors] == [N * D, 0, V]
    with Spy() as spy, torch.no_grad():
        case.call(chunk_tokens=N)
    assert spy.products == 1


@pytest.mark.parametrize("half", [WEIGHTS, COUNTS.clamp_max(1)], ids=["", "other weights"])
def test_masked_tokens_are_in_no_product(half):
    case = Sparse(options={"token_weight": half.float()})
    with Spy() as spy:
        case.call(chunk_tokens=5)
    assert spy.flops == 3 * 2 * int((half > 0).sum()) * D * V


def test_the_operator_is_what_the_compiler_is_told():
    case = Sparse(bias=True)
    with patch("fxskip.loss.sparse_kl.sparse_kl_operator", wraps=sparse_kl_operator) as called:
        case.call(token_weight=WEIGHTS, counts=COUNTS)
    checks = "test_schema", "test_autograd_registration", "test_faketensor"
    torch.library.opcheck(
        sparse_kl_operator, called.call_args.args, called.call_args.kwargs, test_utils=checks
    )


def test_unvalidated_calls_read_nothing_from_the_device():
    """Fake tensors have no values: whatever asks for one, where a GPU would be waited for, raises."""
    case = Sparse(bias=True, options={"counts": COUNTS, "denominator": torch.tensor(5.0)})
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        case.leaves = [mode.from_tensor(leaf) for leaf in case.leaves]
        case.ids, case.logp = mode.from_tensor(case.ids), mode.from_tensor(case.logp)
        case.options = {name: mode.from_tensor(value) for name, value in case.options.items()}
        with patch("fxskip.loss.sparse_kl.sparse_kl_operator", wraps=sparse_kl_operator) as called:
            # The checks around the operator, and its derivative. The kernels would take the addresses of fake tensors.
            case.call(validate=False, implementation="torch").backward()
            with torch.no_grad():
                sparse_kl_operator._init_fn(*called.call_args.args, **called.call_args.kwargs)  # what it does
            case.call(validate=True, implementation="torch")
            with torch.no_grad(), pytest.raises(DataDependentOutputException):
                sparse_kl_operator._init_fn(*called.call_args.args, **called.call_args.kwargs)


@IMPLEMENTATIONS
def test_two_runs_give_equal_bits(implementation):
    case = Sparse(bias=True, options={"token_weight": WEIGHTS})
    runs = [case.outcome(implementation=implementation, chunk_tokens=4) for _ in range(2)]
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def test_the_weight_gradient_of_many_chunks_is_rounded_once():
    case = Sparse(dtype=torch.bfloat16, tokens=256)
    right = case.expected()[2]
    for chunk_tokens in (256, 1):
        got = case.outcome(chunk_tokens=chunk_tokens, accumulate=1, logits_dtype=torch.float32)[2]
        assert got.dtype == torch.bfloat16
        assert relative_error(got, right) < 2.5e-3


def test_backward_twice_is_the_same_and_a_second_derivative_is_refused():
    case = Sparse(bias=True)
    loss = case.call()
    first = torch.autograd.grad(3.0 * loss, case.leaves, retain_graph=True)
    second = torch.autograd.grad(3.0 * loss, case.leaves, retain_graph=True)
    last = torch.autograd.grad(3.0 * loss, case.leaves)
    assert all(torch.equal(a, b) and torch.equal(a, c) for a, b, c in zip(first, second, last, strict=True))
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(loss, case.leaves)
    with pytest.raises(FxskipError, match="sparse_kl: create_graph=True asks for a gradient of the gradient"):
        torch.autograd.grad(case.call(), case.leaves, create_graph=True)


def test_compiled_checkpointed_and_under_autocast():
    case = Sparse(options={"token_weight": WEIGHTS})
    expected = case.outcome()

    def doubled(hidden, weight):
        return 2 * sparse_kl(hidden, weight, case.ids, case.logp, **case.options)

    compiled = torch.compile(doubled, backend="aot_eager", fullgraph=True)
    for loss in (
        compiled(*case.leaves),
        checkpoint(doubled, *case.leaves, use_reentrant=False),
        checkpoint(doubled, *case.leaves, use_reentrant=True),
    ):
        loss.backward()
        got = [loss.detach(), *(leaf.grad for leaf in case.leaves)]
        assert all(torch.equal(a, 2 * b) for a, b in zip(got, expected, strict=True))
        for leaf in case.leaves:
            leaf.grad = None
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        assert torch.equal(case.call(), expected[0])


def test_a_tied_head_gets_both_gradients():
    case = Sparse()
    table = case.leaves[1]
    tokens = torch.arange(N) % V

    def step(loss):
        hidden = table[tokens].tanh()
        (gradient,) = torch.autograd.grad(loss(hidden), table)
        return gradient

    got = step(lambda hidden: sparse_kl(hidden, table, case.ids, case.logp))

    def formula(hidden):
        log_q = (hidden @ table.T).log_softmax(-1).gather(1, case.ids)
        return (case.logp.exp() * (case.logp - log_q)).sum() / N

    torch.testing.assert_close(got, step(formula), rtol=1e-5, atol=1e-6)


BAD = [
    ({"ids": torch.full((N, K), V)}, r"ids\[0, 0\] is 50\n.*ids are 0 to 49"),
    ({"ids": torch.full((N, K), -1)}, r"ids\[0, 0\] is -1"),
    ({"ids": torch.zeros(N, K)}, "ids is torch.float32"),
    ({"ids": torch.zeros(N, K + 1, dtype=torch.int64)}, r"ids is \[13, 6\], logp \[13, 5\]"),
    ({"ids": torch.zeros(N, 0, dtype=torch.int64)}, r"ids has shape \[13, 0\]"),
    (
        {"ids": torch.zeros(N, K, dtype=torch.int64, device="meta")},
        "arguments are on several devices: .*ids on meta",
    ),
    ({"logp": torch.full((N, K), -torch.inf)}, r"logp\[0, 0\] is -inf"),
    ({"logp": torch.full((N, K), torch.nan)}, r"logp\[0, 0\] is nan"),
    ({"logp": torch.zeros(N, K)}, "row 0 of logp add up to 5"),
    ({"logp": torch.zeros(N, K, requires_grad=True)}, "logp requires a gradient"),
    ({"logp": torch.zeros(N, K, dtype=torch.int64)}, "logp is torch.int64"),
    ({"counts": torch.full((N,), K + 1)}, r"counts\[0\] is 6"),
    ({"counts": torch.zeros(N)}, "counts is torch.float32"),
    ({"hidden": torch.zeros(1, N, D)}, r"hidden has shape \[1, 13, 6\]"),
    ({"hidden": torch.zeros(N, D).long()}, "hidden is torch.int64"),
    ({"hidden": torch.zeros(N - 1, D)}, r"ids has shape \[13, 5\]\n.*\[12, K\]"),
    ({"weight": torch.zeros(V, D + 1)}, "weight is .*widths differ"),
    ({"bias": torch.zeros(V + 1)}, r"bias is \[51\]"),
    ({"tail": "other"}, "tail is 'other'\n.*truncated, ghost, renormalised, subset"),
    ({"temperature": 0.0}, "temperature is 0.0"),
    ({"softcap": -1.0}, "softcap is -1.0"),
    ({"scale": 0.0}, "scale is 0.0"),
    ({"token_weight": torch.full((N,), -1.0)}, r"token_weight\[0\] is -1.0"),
    ({"denominator": 0.0}, "denominator is 0.0"),
    ({"chunk_tokens": 0}, "chunk_tokens is 0"),
    ({"accumulate": 0}, "accumulate is 0"),
    ({"vocabulary": V + 1}, "vocabulary is 51, and weight has 50 rows"),
    ({"logits_dtype": torch.bfloat16}, "logits_dtype is torch.bfloat16, hidden torch.float32"),
    ({"implementation": "cuda"}, "implementation is 'cuda'"),
]


@pytest.mark.parametrize(
    ("change", "message"), BAD, ids=lambda value: "" if isinstance(value, str) else next(iter(value))
)
def test_a_bad_argument_is_named(change, message):
    case = Sparse()
    arguments = {"hidden": case.leaves[0], "weight": case.leaves[1], "ids": case.ids, "logp": case.logp}
    with pytest.raises(FxskipError, match=message):
        sparse_kl(**on_device(arguments | change))


@NEEDS_TRITON
@pytest.mark.parametrize(
    ("dtype", "scale", "obstacle"),
    [(torch.float64, 1.0, "hidden is torch.float64"), (torch.float32, -1.0, "scale is -1.0")],
)
def test_the_kernels_are_not_replaced_when_they_are_asked_for(dtype, scale, obstacle):
    case = Sparse(dtype=dtype, options={"scale": scale})
    with pytest.raises(FxskipError, match=f"implementation='triton' cannot run: {obstacle}"):
        case.call(implementation="triton")


def test_float16_gradients_under_a_large_denominator():
    """A gradient scaler acts in the backward: until then d hidden must not have lost its small numbers."""
    case = Sparse(options={"denominator": 1e6})
    hidden, weight = (leaf.detach().half().requires_grad_() for leaf in case.leaves)
    loss = sparse_kl(hidden, weight, case.ids, case.logp, denominator=1e6, implementation="torch")
    got = torch.autograd.grad(65536.0 * loss, (hidden, weight))
    right = loss_and_gradients("truncated", [hidden, weight], case.ids, case.logp, denominator=1e6)[1:]
    for value, exact in zip(got, right, strict=True):
        assert value.dtype == torch.float16
        assert relative_error(value, 65536.0 * exact) < 1e-3


def test_counts_of_rows_that_do_not_count():
    case = Sparse(options={"token_weight": WEIGHTS, "counts": COUNTS})
    expected = case.outcome()
    case.options["counts"] = COUNTS.masked_fill(WEIGHTS == 0, 9)
    assert all(torch.equal(a, b) for a, b in zip(case.outcome(), expected, strict=True))


@pytest.mark.parametrize("denominator", [0.0, -2.0, math.nan])
def test_the_value_of_a_denominator_is_checked(denominator):
    with pytest.raises(FxskipError, match=f"sparse_kl: denominator is {denominator}"):
        Sparse(options={"denominator": torch.tensor(denominator)}).call()


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


@pytest.mark.parametrize("value", [1e39, 1e-50, math.inf, 10**400])
def test_numbers_that_float32_cannot_hold(value):
    with pytest.raises(FxskipError, match="sparse_kl: scale is .*"):
        Sparse().call(scale=value)
