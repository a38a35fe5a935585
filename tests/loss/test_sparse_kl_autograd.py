"""What `sparse_kl` computes and keeps, and its gradients with what else PyTorch does."""

from unittest.mock import patch

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch._subclasses.fake_tensor import DataDependentOutputException
from torch.utils.checkpoint import checkpoint

from fxskip.errors import FxskipError
from fxskip.loss import sparse_kl
from fxskip.loss.operators import sparse_kl_operator
from tests.loss.device import DEVICE
from tests.loss.implementations import IMPLEMENTATIONS
from tests.loss.sparse_formulas import loss_and_gradients, relative_error
from tests.loss.sparse_inputs import COUNTS, WEIGHTS, D, N, Sparse, V, assert_close
from tests.loss.spies import Spy

pytestmark = pytest.mark.filterwarnings(
    "ignore::RuntimeWarning:triton"
)  # numpy's, where a mask discards a value


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
