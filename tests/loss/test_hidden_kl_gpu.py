"""The products that only CUDA has: bfloat16 operands, float32 sums."""

import pytest
import torch

from fxskip.loss import dense_kl, hidden_kl
from tests.loss.formulas import Case
from tests.loss.spies import Spy
from tests.loss.test_baselines import BY_NAME, FORMS

pytestmark = [
    pytest.mark.gpu(1),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def on_gpu(case: Case) -> Case:
    case.student_hidden, case.student_weight, case.teacher_hidden, case.teacher_weight = (
        tensor.detach().cuda().requires_grad_(tensor.requires_grad) for tensor in case.arguments
    )
    case.student = [case.student_hidden, case.student_weight]
    return case


@pytest.mark.parametrize(**BY_NAME)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_equals_the_formula(form, dtype):
    case = on_gpu(Case(tokens=200, width=64, vocabulary=1001, dtype=dtype))
    options = FORMS[form] and {"chunk_tokens": 64}
    if form is hidden_kl:
        options |= {"logits_dtype": torch.float32}
    loss = form(*case.arguments, temperature=1.5, **options)
    expected, *gradients = case.expected(temperature=1.5)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss.double(), expected, rtol=1e-4, atol=1e-6)
    # bfloat16: the gradient of the logits is rounded once before the product, the result once after it.
    # forward_chunked_kl also adds up d weight in bfloat16, over four chunks.
    error = 1e-5 if dtype == torch.float32 else 6e-3
    for got, right in zip(torch.autograd.grad(loss, case.student), gradients, strict=True):
        assert (got.double() - right).norm() < error * right.norm()


def test_no_tensor_of_tokens_by_vocabulary_and_no_float32_copy_of_a_bfloat16_weight():
    case = on_gpu(Case(tokens=256, width=64, vocabulary=1024, dtype=torch.bfloat16))
    case.student_weight.requires_grad_(False)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with Spy() as spy:
        hidden_kl(*case.arguments, chunk_tokens=16).backward()
    assert spy.elements <= 1024 * 66  # the teacher's weight, transposed
    peak = torch.cuda.max_memory_allocated() - before
    assert peak < 1024 * 64 * 4  # less than one float32 copy of a weight


def test_the_dense_form_is_exact_too_where_student_and_teacher_agree():
    case = on_gpu(Case(tokens=64, width=64, vocabulary=501, dtype=torch.bfloat16))
    case.teacher_hidden, case.teacher_weight = case.student_hidden.detach(), case.student_weight.detach()
    assert dense_kl(*case.arguments).item() == pytest.approx(0.0, abs=1e-6)
    assert hidden_kl(*case.arguments).item() == pytest.approx(0.0, abs=1e-6)
