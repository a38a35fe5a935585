import pytest
import torch
from torch.utils.checkpoint import checkpoint

from fxskip.errors import FxskipError
from fxskip.loss import feature_loss
from tests.loss.device import DEVICE, on_device
from tests.loss.spies import Ledger

WEIGHTS = torch.tensor([0.0, 2.0, 0.5, 1.0, 0.0, 3.0, 1.0])


def seeded(dtype=torch.float32):
    generator = torch.Generator(DEVICE).manual_seed(0)
    x, y = torch.randn(2, 7, 5, generator=generator, dtype=torch.float64).to(dtype).unbind()
    return x.clone().requires_grad_(), y.clone()


def formula(kind, x, y):
    if kind == "mse":
        return (x - y).square().mean(-1)
    return 1 - torch.nn.functional.cosine_similarity(x, y, dim=-1)


@pytest.mark.parametrize("kind", ["mse", "cosine"])
@pytest.mark.parametrize("options", [{}, {"token_weight": WEIGHTS}, {"denominator": 3.0}], ids=str)
def test_equals_the_formula(kind, options):
    x, y = seeded(torch.float64)
    options = on_device(options)
    loss = feature_loss(x, y, kind=kind, chunk_tokens=3, **options)
    weight = options.get("token_weight", torch.ones(7)).double()
    expected = (formula(kind, x, y) * weight).sum() / options.get("denominator", weight.sum())
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(
        *(torch.autograd.grad(value, x) for value in (loss, expected)), rtol=1e-10, atol=1e-12
    )


@pytest.mark.parametrize("kind", ["mse", "cosine"])
def test_low_precision_is_rounded_once(kind):
    x, y = seeded(torch.bfloat16)
    wide = x.detach().double().requires_grad_()
    (right,) = torch.autograd.grad(formula(kind, wide, y.double()).mean(), wide)
    (got,) = torch.autograd.grad(feature_loss(x, y, kind=kind), x)
    assert (got.double() - right).norm() < 2e-3 * right.norm()


@pytest.mark.parametrize("kind", ["mse", "cosine"])
def test_without_gradients_none_is_formed(kind):
    x, y = torch.randn(2, 50, 64).unbind()
    x = x.requires_grad_()
    with torch.no_grad(), Ledger(x, y) as ledger:
        loss = feature_loss(x, y, kind=kind, chunk_tokens=1)
    torch.testing.assert_close(loss, formula(kind, x, y).mean())
    assert ledger.peak < x.nbytes


def test_states_of_zero_and_masked_rows_add_nothing_wrong():
    x, y = seeded()
    with torch.no_grad():
        x[0] = torch.nan  # its weight is 0
        x[1] = 0.0
    loss = feature_loss(x, y, kind="cosine", **on_device({"token_weight": WEIGHTS}))
    loss.backward()
    assert loss.isfinite()
    assert not x.grad[0].any()
    assert not x.grad[1].any()
    assert x.grad[2].any()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"teacher_hidden": torch.zeros(7, 4)}, r"student_hidden is \[7, 5\], teacher_hidden \[7, 4\]"),
        ({"kind": "l1"}, "kind is 'l1'"),
        ({"token_weight": torch.full((7,), -1.0)}, r"token_weight\[0\] is -1.0"),
        ({"chunk_tokens": 0}, "chunk_tokens is 0"),
    ],
    ids=lambda value: "" if isinstance(value, str) else next(iter(value)),
)
def test_a_bad_argument_is_named(change, message):
    x, y = seeded()
    with pytest.raises(FxskipError, match=message):
        feature_loss(**on_device({"student_hidden": x, "teacher_hidden": y} | change))


@pytest.mark.parametrize("kind", ["mse", "cosine"])
def test_compiled_checkpointed_and_backward_twice(kind):
    x, y = seeded()

    def loss(x):
        return 3.0 * feature_loss(x, y, kind=kind, chunk_tokens=2)

    (right,) = torch.autograd.grad(3.0 * formula(kind, x, y).mean(), x)
    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    for value in (compiled(x), checkpoint(loss, x, use_reentrant=False), loss(x)):
        first = torch.autograd.grad(value, x, retain_graph=True)
        torch.testing.assert_close(first[0], right, rtol=1e-5, atol=1e-7)
    assert torch.equal(first[0], torch.autograd.grad(value, x)[0])
