"""What the losses must give, from their definition: float64, dense, autograd, one line a step."""

import torch
from torch import Tensor

from tests.loss.device import DEVICE


def logits(hidden, weight, bias=None, scale=1.0, softcap=None, temperature=1.0, rounded_to=None) -> Tensor:
    """`rounded_to`: what rounding the product to this dtype does, as if it had the derivative 1."""
    z = hidden.double() @ weight.double().T
    if rounded_to is not None:
        z = z + (z.to(rounded_to).double() - z).detach()
    z = z if bias is None else z + bias.double()
    z = z * scale
    z = z if softcap is None else softcap * torch.tanh(z / softcap)
    return z / temperature


def kl(
    student_logits: Tensor, teacher_logits: Tensor, token_weight=None, denominator=None, beta=0.0
) -> Tensor:
    """beta as in TRL's GKD and Liger's JSD: 0 KL(p || q), 1 KL(q || p), between them towards the mixture."""
    q, p = student_logits.softmax(-1), teacher_logits.softmax(-1)

    def one(a, b):
        return torch.where(a > 0, a * (a.log() - b.log()), 0.0).sum(-1)

    m = beta * p + (1 - beta) * q
    per_token = {0.0: one(p, q), 1.0: one(q, p)}.get(beta, beta * one(p, m) + (1 - beta) * one(q, m))
    token_weight = torch.ones_like(per_token) if token_weight is None else token_weight.double()
    return (per_token * token_weight).sum() / (token_weight.sum() if denominator is None else denominator)


class Case:
    """Seeded student and teacher of different widths; `student` lists what a gradient is wanted for."""

    def __init__(self, *, tokens=13, width=6, vocabulary=17, dtype=torch.float32, bias=False, seed=0):
        generator = torch.Generator(DEVICE).manual_seed(seed)

        def draw(*shape):
            return torch.randn(shape, generator=generator, dtype=torch.float64, device=DEVICE).to(dtype)

        self.student_hidden, self.student_weight = draw(tokens, width), draw(vocabulary, width)
        self.teacher_hidden, self.teacher_weight = draw(tokens, width + 2), draw(vocabulary, width + 2)
        self.biases = {name: draw(vocabulary) for name in ("student_bias", "teacher_bias") if bias}
        self.student = [self.student_hidden, self.student_weight]
        self.student += [self.biases["student_bias"]] if bias else []
        for leaf in self.student:
            leaf.requires_grad_()

    @property
    def arguments(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.student_hidden, self.student_weight, self.teacher_hidden, self.teacher_weight

    def expected(
        self, *, token_weight=None, denominator=None, beta=0.0, vocabulary=None, **after_gemm
    ) -> list[Tensor]:
        """The loss in float64, then its gradients by `self.student`."""
        leaves = [leaf.detach().double().requires_grad_() for leaf in self.student]
        student = logits(*leaves, **after_gemm)[:, :vocabulary]
        bias = self.biases.get("teacher_bias")
        teacher = logits(self.teacher_hidden, self.teacher_weight, bias, **after_gemm)[:, :vocabulary]
        loss = kl(student, teacher, token_weight, denominator, beta)
        return [loss.detach(), *torch.autograd.grad(loss, leaves)]
