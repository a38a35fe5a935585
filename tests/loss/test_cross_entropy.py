import pytest
import torch

from fxskip.errors import FxskipError
from fxskip.loss import cross_entropy
from tests.loss.device import DEVICE
from tests.loss.formulas import logits


def seeded(tokens=11, width=5, vocabulary=9, dtype=torch.float32):
    generator = torch.Generator(DEVICE).manual_seed(0)
    hidden = torch.randn(tokens, width, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    weight = (
        torch.randn(vocabulary, width, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    )
    labels = torch.randint(vocabulary, (tokens,), generator=generator)
    labels[3] = -100
    return hidden, weight, labels


@pytest.mark.parametrize("weighted", [False, True], ids=["", "weighted"])
def test_equals_the_formula(weighted):
    hidden, weight, labels = seeded()
    token_weight = torch.linspace(0.0, 2.0, 11) if weighted else torch.ones(11)
    options = {"token_weight": token_weight} if weighted else {}
    loss = cross_entropy(hidden, weight, labels, chunk_tokens=4, softcap=3.0, **options)

    q = logits(hidden, weight, softcap=3.0).softmax(-1)
    kept = [n for n in range(11) if labels[n] != -100]
    expected = -sum(token_weight[n] * q[n, labels[n]].log() for n in kept) / token_weight[kept].sum()
    torch.testing.assert_close(loss.double(), expected, rtol=1e-6, atol=1e-6)
    right = torch.autograd.grad(expected, [hidden, weight])
    torch.testing.assert_close(torch.autograd.grad(loss, [hidden, weight]), right, rtol=1e-5, atol=1e-6)


def test_gradcheck():
    hidden, weight, labels = seeded(4, 3, 5, torch.float64)
    assert torch.autograd.gradcheck(
        lambda h, w: cross_entropy(h, w, labels, chunk_tokens=3), (hidden, weight)
    )


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (torch.zeros(10, dtype=torch.int64), r"labels is torch.int64 \[10\]"),
        (torch.zeros(11), r"labels is torch.float32 \[11\]"),
        (torch.full((11,), 9), r"labels\[0\] is 9"),
        (torch.full((11,), -1), r"labels\[0\] is -1"),
    ],
)
def test_bad_labels_are_named(labels, message):
    hidden, weight, _ = seeded()
    with pytest.raises(FxskipError, match=message):
        cross_entropy(hidden, weight, labels.to(DEVICE))


def test_compiled_with_its_checks():
    hidden, weight = torch.randn(5, 4), torch.randn(7, 4, requires_grad=True)
    labels = torch.tensor([0, -100, 6, 3, 2])
    compiled = torch.compile(cross_entropy, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(hidden, weight, labels), cross_entropy(hidden, weight, labels))
    with pytest.raises(FxskipError, match=r"cross_entropy: labels\[2\] is 7"):
        compiled(hidden, weight, labels.masked_fill(labels == 6, 7))
