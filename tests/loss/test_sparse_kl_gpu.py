"""The compiled kernels in bfloat16 are as near to float64 as plain PyTorch, and their options do what they say."""

from itertools import combinations

import pytest
import torch

from fxskip.loss import hidden_kl, sparse_kl
from fxskip.loss.gradient_rules import SCALE_BLOCK, scaled
from fxskip.loss.products import multiply_into
from fxskip.loss.tails import TAILS
from tests.loss.device import on_device
from tests.loss.formulas import kl, logits
from tests.loss.sparse_formulas import loss_and_gradients, relative_error, seeded_teacher

pytestmark = [
    pytest.mark.gpu(1),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
# Of plain PyTorch, which the kernels are compared with: the result and the gradient by the logits are rounded.
PLAIN_ERROR = {torch.float32: 1e-5, torch.bfloat16: 4e-3}
TOKENS, WIDTH, VOCABULARY, ENTRIES = 500, 128, 5003, 100  # the vocabulary is a multiple of nothing


def seeded(dtype=torch.bfloat16, vocabulary=VOCABULARY):
    generator = torch.Generator("cuda").manual_seed(0)

    def randn(*shape):
        return torch.randn(shape, generator=generator, device="cuda").to(dtype)

    return [
        leaf.requires_grad_()
        for leaf in (randn(TOKENS, WIDTH), randn(vocabulary, WIDTH) / 8, randn(vocabulary))
    ]


OPTIONS = {
    "plain": {},
    "after the product": {"scale": 0.7, "softcap": 20.0, "temperature": 1.5},
    "counts": {"counts": torch.arange(TOKENS) % (ENTRIES + 1)},
    "weights": {"token_weight": (torch.arange(TOKENS) % 3).float()},
    "padded": {"vocabulary": 5000},
}


@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_as_near_to_float64_as_plain_torch(tail, dtype, options):
    leaves = seeded(dtype)
    ids, logp = seeded_teacher(TOKENS, 5000, ENTRIES, device="cuda")
    options = {
        key: value.cuda() if isinstance(value, torch.Tensor) else value for key, value in options.items()
    }
    right = loss_and_gradients(tail, leaves, ids, logp, **options)

    def errors(**more):
        loss = sparse_kl(
            *leaves[:2], ids, logp, bias=leaves[2], tail=tail, chunk_tokens=192, **options, **more
        )
        got = [loss.detach(), *torch.autograd.grad(loss, leaves)]
        return [relative_error(a, b) for a, b in zip(got, right, strict=True)]

    plain = errors(implementation="torch")
    # Plain PyTorch does not round its logits: logits of a size of 1.4 in bfloat16 add 7e-4 to these gradients.
    margin = 1e-6 if dtype == torch.float32 else 2e-3
    for name, kernel_error, plain_error in zip(
        ("loss", "d hidden", "d weight", "d bias"), errors(implementation="triton"), plain, strict=True
    ):
        assert plain_error <= PLAIN_ERROR[dtype], (name, plain_error)
        assert kernel_error <= 1.2 * plain_error + margin, (name, kernel_error, plain_error)


@pytest.mark.parametrize("vocabulary", [32768, 40000], ids=["whole steps", "steps and a rest"])
@pytest.mark.parametrize("logits_dtype", [None, torch.float32])
def test_vocabularies_that_are_read_in_vectors(vocabulary, logits_dtype):
    leaves = seeded(vocabulary=vocabulary)[:2]
    ids, logp = seeded_teacher(TOKENS, vocabulary, ENTRIES, device="cuda")
    right = loss_and_gradients("truncated", leaves, ids, logp)

    def errors(**more):
        loss = sparse_kl(*leaves, ids, logp, chunk_tokens=192, **more)
        got = [loss.detach(), *torch.autograd.grad(loss, leaves)]
        return [relative_error(a, b) for a, b in zip(got, right, strict=True)]

    plain = errors(implementation="torch")
    kernels = errors(implementation="triton", logits_dtype=logits_dtype)
    margin = 2e-3 if logits_dtype is None else 5e-4  # of rounding the logits
    for name, kernel_error, plain_error in zip(("loss", "d hidden", "d weight"), kernels, plain, strict=True):
        assert kernel_error <= 1.2 * plain_error + margin, (name, kernel_error, plain_error)


@pytest.mark.parametrize("tail", TAILS)
def test_float32_logits_near_the_teacher(tail):
    leaves = seeded()[:2]
    z = leaves[0].detach().double() @ leaves[1].detach().double().T
    logp, ids = (z + 0.01 * torch.randn_like(z)).log_softmax(dim=-1).topk(ENTRIES)
    logp = logp.float()
    right = loss_and_gradients(tail, leaves, ids, logp)

    def errors(**more):
        loss = sparse_kl(*leaves, ids, logp, tail=tail, chunk_tokens=192, **more)
        return [
            relative_error(a, b) for a, b in zip(torch.autograd.grad(loss, leaves), right[1:], strict=True)
        ]

    plain = errors(implementation="torch")
    kernels = errors(implementation="triton", logits_dtype=torch.float32)
    for kernel_error, plain_error in zip(kernels, plain, strict=True):
        assert kernel_error <= 2 * plain_error


def test_equal_bits_and_no_growth_with_the_number_of_chunks():
    leaves = seeded()[:2]
    ids, logp = seeded_teacher(TOKENS, VOCABULARY, ENTRIES, device="cuda")
    right = loss_and_gradients("truncated", leaves, ids, logp)[2]
    for chunk_tokens in (TOKENS, 1):
        runs = []
        for _ in range(2):
            loss = sparse_kl(*leaves, ids, logp, chunk_tokens=chunk_tokens, accumulate=1)
            runs.append(torch.autograd.grad(loss, leaves))
        assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))
        # Roundings of logits, of their gradient, of the result.
        assert relative_error(runs[0][1], right) < 3e-3


@pytest.mark.parametrize("add", [False, True])
def test_products_of_a_rank_that_holds_no_columns(add):
    gradient, states = torch.empty(5, 0, device="cuda").bfloat16(), torch.ones(5, 8, device="cuda").bfloat16()
    d_weight = torch.empty(0, 8, device="cuda")
    multiply_into(d_weight, gradient.T, states, add=add)
    d_hidden = torch.full((5, 8), torch.nan, device="cuda").bfloat16()
    multiply_into(d_hidden, gradient, states[:0])
    assert not d_hidden.any()


FURTHER = OPTIONS | {
    "scale": {"scale": 0.7},
    "softcap": {"softcap": 20.0},
    "temperature": {"temperature": 1.5},
    "denominator": {"denominator": 29.0},
}
PAIRS = list(combinations([name for name in FURTHER if name not in ("plain", "after the product")], 2))


def assert_within_rounding(got, plain, right, rounded):
    """No further from `right` than plain PyTorch and the formula with bfloat16 logits together, and a fifth."""
    names = ("loss", "d hidden", "d weight", "d bias")
    for name, *values in zip(names, got, plain, right, rounded, strict=True):
        kernels, other, exact, of_rounding = values
        allowed = 1.2 * (relative_error(other, exact) + relative_error(of_rounding, exact)) + 2e-6
        assert relative_error(kernels, exact) <= allowed, name


@pytest.mark.parametrize(("one", "other"), PAIRS, ids="+".join)
def test_pairs_of_options_in_bfloat16(one, other):
    options = on_device(FURTHER[one] | FURTHER[other])
    leaves = seeded()
    ids, logp = seeded_teacher(TOKENS, 5000, ENTRIES, device="cuda")

    def outcome(tail, implementation):
        loss = sparse_kl(
            *leaves[:2], ids, logp, bias=leaves[2], tail=tail, chunk_tokens=192, implementation=implementation,
            **options,
        )  # fmt: skip
        return [loss.detach(), *torch.autograd.grad(loss, leaves)]

    for tail in TAILS:
        right, rounded = (
            loss_and_gradients(tail, leaves, ids, logp, rounded_to=dtype, **options)
            for dtype in (None, torch.bfloat16)
        )
        assert_within_rounding(outcome(tail, "triton"), outcome(tail, "torch"), right, rounded)


@pytest.mark.parametrize("logits_dtype", [None, torch.float32])
@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_hidden_kl_is_as_near_to_float64_as_plain_torch(beta, logits_dtype):
    leaves = seeded()
    constants = torch.randn_like(leaves[0]), leaves[1].detach()
    teacher_bias = leaves[2].detach().flip(0)

    def expected(rounded_to):
        wide = [leaf.detach().double().requires_grad_() for leaf in leaves]
        teacher = logits(*constants, teacher_bias, rounded_to=rounded_to)
        loss = kl(logits(*wide, rounded_to=rounded_to), teacher, beta=beta)
        return [loss.detach(), *torch.autograd.grad(loss, wide)]

    def outcome(**more):
        biases = {"student_bias": leaves[2], "teacher_bias": teacher_bias}
        loss = hidden_kl(*leaves[:2], *constants, beta=beta, chunk_tokens=192, **biases, **more)
        return [loss.detach(), *torch.autograd.grad(loss, leaves)]

    right = expected(None)
    rounded = right if logits_dtype == torch.float32 else expected(torch.bfloat16)
    kernels = outcome(implementation="triton", logits_dtype=logits_dtype)
    assert_within_rounding(kernels, outcome(implementation="torch"), right, rounded)


@pytest.mark.parametrize("loss", [sparse_kl, hidden_kl], ids=["sparse_kl", "hidden_kl"])
def test_the_device_is_not_waited_for(loss):
    hidden, weight, bias = seeded()
    teacher = seeded_teacher(TOKENS, VOCABULARY, ENTRIES, device="cuda")
    options = {"bias": bias, "counts": torch.arange(TOKENS, device="cuda") % ENTRIES, "softcap": 20.0}
    if loss is hidden_kl:
        teacher, options = (torch.randn_like(hidden), weight.detach()), {"student_bias": bias, "beta": 0.5}

    def step():
        loss(hidden, weight, *teacher, chunk_tokens=192, validate=False, **options).backward()

    step()  # compiles
    hidden.grad = weight.grad = bias.grad = None
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(leaf.grad.isfinite().all() for leaf in (hidden, weight, bias))


@pytest.mark.parametrize("in_place", [False, True], ids=["copy", "in place"])
@pytest.mark.parametrize(
    ("source", "target"),
    [
        (torch.float32, torch.float32),
        (torch.float32, torch.bfloat16),
        (torch.float32, torch.float16),
        (torch.bfloat16, torch.bfloat16),
        (torch.bfloat16, torch.float32),
        (torch.float64, torch.float64),
        (torch.float64, torch.float32),
    ],
)
def test_gradients_are_scaled_and_rounded_once(source, target, in_place):
    count = SCALE_BLOCK + 37  # a whole program and a part
    gradient = torch.randn(count, device="cuda").to(source)
    wide = torch.promote_types(source, torch.float32)
    factor = torch.tensor(0.3, device="cuda", dtype=wide)
    before = gradient.clone()
    got = scaled(gradient, factor, target, in_place=in_place)
    assert got.dtype == target
    assert torch.equal(got, (before.to(wide) * factor).to(target))
    if in_place and source == target:
        assert got.data_ptr() == gradient.data_ptr()
    else:
        assert torch.equal(gradient, before)
