"""The float64 formulas that the benchmark's errors are taken against give what the tests' own do."""

from dataclasses import replace

import torch

from fxskip.bench.loss_cases import cases
from fxskip.bench.loss_errors import relative_errors
from fxskip.bench.loss_inputs import tiny
from fxskip.loss import sparse_kl
from tests.loss import formulas, sparse_formulas

SETTING = replace(tiny(), shrink=40, width=32, entries=20)


def expected(case):
    options = dict(case.options)
    if case.loss is sparse_kl:
        return sparse_formulas.loss_and_gradients(
            options.pop("tail", "truncated"), case.leaves, *case.teacher, **options
        )
    beta, teacher_bias = options.pop("beta"), options.pop("teacher_bias", None)
    token_weight = options.pop("token_weight", None)
    leaves = [leaf.detach().double().requires_grad_() for leaf in case.leaves]
    student = formulas.logits(*leaves, **options)
    teacher = formulas.logits(*case.teacher, teacher_bias, **options)
    loss = formulas.kl(student, teacher, token_weight, beta=beta)
    return [loss.detach(), *torch.autograd.grad(loss, leaves)]


def test_every_case():
    for case in cases(SETTING):
        right = case.right(None)
        assert max(relative_errors(expected(case), right)) < 1e-9, case.name
        # Rounding changes something, but where both models are rounded alike.
        rounded = max(relative_errors(case.right(torch.bfloat16).values, right))
        assert 0.0 < rounded < 5.0 or case.name.startswith("hidden_kl") and "equal" in case.name, case.name
