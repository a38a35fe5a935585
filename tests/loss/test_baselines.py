"""The four forms of the KL give one number, and hold what they say they hold."""

import pytest
import torch

from fxskip.errors import FxskipError
from fxskip.loss import dense_kl, forward_chunked_kl, full_chunked_kl, hidden_kl
from tests.loss.formulas import Case
from tests.loss.spies import Spy

FORMS = {
    dense_kl: {},
    forward_chunked_kl: {"chunk_tokens": 4},
    full_chunked_kl: {"chunk_tokens": 4},
    hidden_kl: {"chunk_tokens": 4},
}
BY_NAME = {"argnames": "form", "argvalues": list(FORMS), "ids": lambda form: form.__name__}


@pytest.mark.parametrize(**BY_NAME)
@pytest.mark.parametrize("weighted", [False, True], ids=["", "weighted"])
def test_equals_the_formula(form, weighted):
    case = Case(bias=True)
    options = {"temperature": 1.5, "softcap": 3.0, "scale": 0.5}
    options |= (
        {"token_weight": torch.tensor([0.0, 2.0, 0.5] * 4 + [0.0]), "denominator": 5.0} if weighted else {}
    )
    loss = form(*case.arguments, **case.biases, **options, **FORMS[form])
    got = [loss.detach(), *torch.autograd.grad(loss, case.student)]
    for value, expected in zip(got, case.expected(**options), strict=True):
        torch.testing.assert_close(value.double(), expected.double(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(**BY_NAME)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_only_the_dense_form_makes_a_tensor_of_tokens_by_vocabulary(form, dtype):
    tokens, vocabulary = 64, 128
    case = Case(tokens=tokens, vocabulary=vocabulary, dtype=dtype)
    weight = torch.tensor([1.0, 0.0] * (tokens // 2))
    with Spy() as spy:
        form(*case.arguments, **FORMS[form]).backward()
        if form is not dense_kl:  # its blocks hold the counted rows only, so half the size here
            form(*case.arguments, token_weight=weight, **FORMS[form]).backward()
    if form is dense_kl:
        assert spy.elements >= tokens * vocabulary
    else:
        assert spy.elements <= vocabulary * 8  # the teacher's weight; one or two chunks of four are no larger


@pytest.mark.parametrize(**BY_NAME)
def test_nan_in_a_masked_row_stays_there(form):
    case = Case()
    weight = torch.ones(13)
    weight[4] = 0.0
    expected = case.expected(token_weight=weight)
    with torch.no_grad():
        case.student_hidden[4] = torch.nan
    loss = form(*case.arguments, token_weight=weight, **FORMS[form])
    got = [loss.detach(), *torch.autograd.grad(loss, case.student)]
    for value, right in zip(got, expected, strict=True):
        torch.testing.assert_close(value.double(), right.double(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(**BY_NAME)
def test_without_a_counted_token_loss_and_gradients_are_zero(form):
    case = Case()
    loss = form(*case.arguments, token_weight=torch.zeros(13), **FORMS[form])
    loss.backward()
    assert loss.item() == 0.0
    assert not any(leaf.grad.any() for leaf in case.student)


def test_dense_has_a_second_derivative_and_no_chunks():
    case = Case(tokens=2, width=3, vocabulary=4, dtype=torch.float64)
    constants = case.teacher_hidden, case.teacher_weight
    assert torch.autograd.gradgradcheck(lambda h, w: dense_kl(h, w, *constants), case.student)
    with pytest.raises(FxskipError, match="dense_kl: chunk_tokens is given"):
        dense_kl(*case.arguments, chunk_tokens=4)


@pytest.mark.parametrize(**BY_NAME)
def test_an_unknown_argument_is_refused(form):
    with pytest.raises((FxskipError, TypeError), match="tempreature"):
        form(*Case().arguments, tempreature=9.0)
