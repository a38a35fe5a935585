"""Seeded inputs of `sparse_kl`, and the options of its calls."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from fxskip.loss import sparse_kl
from tests.loss.device import DEVICE
from tests.loss.sparse_formulas import loss_and_gradients

# N tokens, D width, V vocabulary, K entries of a token
N, D, V, K = 13, 6, 50, 5


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
