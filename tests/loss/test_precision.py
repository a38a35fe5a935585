"""What the error of d weight is made of, and that the number of chunks is no part of it."""

import pytest
import torch

from fxskip.loss import operators, sparse_kl
from tests.loss.device import DEVICE
from tests.loss.implementations import NEEDS_TRITON
from tests.loss.sparse_formulas import loss_and_gradients, relative_error

# Rounding numbers to bfloat16 is a relative error of 1.66e-3 in the norm: 2**-9 / sqrt(3) of a number's power of two.
ROUNDED_ONCE, ROUNDED_TWICE = 1.75e-3, 2.5e-3


def seeded(tokens, width=32, vocabulary=300, entries=20, spread=1 / 8):
    generator = torch.Generator(DEVICE).manual_seed(0)
    hidden = torch.randn(tokens, width, generator=generator).bfloat16()
    weight = (spread * torch.randn(vocabulary, width, generator=generator)).bfloat16()
    ids = torch.rand(tokens, vocabulary, generator=generator).topk(entries).indices
    logp = (2 * torch.randn(tokens, entries, generator=generator)).log_softmax(-1) - 0.05
    return hidden, weight, ids, logp


def weight_error(inputs, dtype=torch.bfloat16, **options):
    hidden, weight, *teacher = inputs
    right = loss_and_gradients("truncated", [hidden, weight], *teacher)[2]
    leaf = weight.to(dtype).requires_grad_()
    loss = sparse_kl(hidden, leaf, *teacher, accumulate=1, **options)
    (got,) = torch.autograd.grad(loss, leaf)
    assert got.dtype == dtype
    return relative_error(got, right)


def test_512_chunks_of_bfloat16_products(monkeypatch):
    # The operands that CUDA has; on a CPU they are widened, and the gradient by the logits is never rounded.
    monkeypatch.setattr(operators, "gemm_operand", lambda matrix: matrix.bfloat16())
    inputs = seeded(1024)
    one, many = (weight_error(inputs, chunk_tokens=chunk) for chunk in (1024, 2))
    assert one <= ROUNDED_TWICE
    assert many <= ROUNDED_TWICE
    assert many == pytest.approx(one, rel=1e-3)
    # Its two parts: a float32 weight has the first only, the gradient by the logits before the product.
    assert 1e-3 < weight_error(inputs, torch.float32, chunk_tokens=2) <= ROUNDED_ONCE


@NEEDS_TRITON
@pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")
def test_many_chunks_of_the_kernels(monkeypatch):
    if not torch.cuda.is_available():
        round_as_a_gpu(monkeypatch)
    inputs = seeded(32)
    options = {"implementation": "triton", "logits_dtype": torch.float32}
    one, many = (weight_error(inputs, chunk_tokens=chunk, **options) for chunk in (32, 1))
    assert one <= ROUNDED_TWICE
    assert many <= ROUNDED_TWICE
    assert many == pytest.approx(one, rel=1e-3)
    assert 1e-3 < weight_error(inputs, torch.float32, chunk_tokens=32, **options) <= ROUNDED_ONCE
    # bfloat16 logits, of a size of about 0.7, add an error of their own: in q, not one of chunks.
    low = weight_error(inputs, chunk_tokens=32, implementation="triton")
    assert one < low <= ROUNDED_TWICE + 1e-3


@pytest.mark.gpu(1)
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("logits_dtype", [torch.bfloat16, torch.float32], ids=["bfloat16", "float32"])
def test_512_chunks_on_a_gpu(logits_dtype):
    # Logits of a size of 0.45: rounding them adds less than the two roundings of the gradient leave room for.
    inputs = seeded(4096, width=512, vocabulary=8003, entries=100, spread=0.02)
    options = {"implementation": "triton", "logits_dtype": logits_dtype}
    one, many = (weight_error(inputs, chunk_tokens=chunk, **options) for chunk in (4096, 8))
    assert one <= ROUNDED_TWICE
    assert many <= ROUNDED_TWICE
    assert many == pytest.approx(one, rel=1e-2)


def round_as_a_gpu(monkeypatch):
    """Triton's interpreter cuts float32 off to bfloat16, twice the error of rounding it to the nearest."""
    from triton import language as tl
    from triton.runtime import interpreter

    cut = interpreter._convert_float

    def rounded(values, source, target, mode):
        if (source, target) != (tl.float32, tl.bfloat16):
            return cut(values, source, target, mode)
        return torch.from_numpy(values.copy()).bfloat16().view(torch.uint16).numpy()

    monkeypatch.setattr(interpreter, "_convert_float", rounded)
