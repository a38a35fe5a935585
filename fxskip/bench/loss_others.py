"""The nearest losses of PyTorch and of other libraries, where they are installed, on the same inputs."""

from collections.abc import Callable

import torch
from torch import Tensor

from fxskip.bench.loss_inputs import Inputs
from fxskip.loss.sparse_baselines import dense_sparse_kl


def compiled_dense(inputs: Inputs) -> Callable[[], None]:
    """PyTorch's nearest: all logits at once, what surrounds the products fused by torch.compile."""
    # Without a GPU there may be no compiler for Inductor either, and its code for a CPU is not what is compared.
    backend = "inductor" if inputs.hidden.is_cuda else "aot_eager"
    return inputs.step(torch.compile(dense_sparse_kl, dynamic=False, backend=backend))


def torch_cross_entropy(inputs: Inputs) -> Callable[[], None]:
    """PyTorch's own loss without a logits tensor, of one label a token: it has none for a distribution."""

    def work() -> None:
        # Not in torch 2.11: measured where it is.
        from torch.nn import LinearCrossEntropyOptions  # type: ignore[attr-defined, unused-ignore]
        from torch.nn.functional import linear_cross_entropy  # type: ignore[attr-defined, unused-ignore]

        inputs.hidden.grad = inputs.weight.grad = None
        labels = inputs.ids[:, 0]
        linear_cross_entropy(
            inputs.hidden, inputs.weight, labels, options=LinearCrossEntropyOptions()
        ).backward()
        inputs.hidden.grad = inputs.weight.grad = None

    return work


def liger_kl(inputs: Inputs, *, accumulate_in: torch.dtype | None = None) -> Callable[[], None]:
    """Liger's KL to a [N, V] target: the sparse teacher written out, in bfloat16 to save memory."""
    target: list[Tensor] = []

    def work() -> None:
        from liger_kernel.ops import LigerFusedLinearKLDivFunction

        if not target:
            dense = torch.zeros(
                len(inputs.hidden), len(inputs.weight), device=inputs.hidden.device, dtype=torch.bfloat16
            )
            target.append(dense.scatter_(1, inputs.ids, inputs.logp.exp().bfloat16()))
        inputs.hidden.grad = inputs.weight.grad = None
        LigerFusedLinearKLDivFunction.apply(
            inputs.hidden, inputs.weight, target[0], None, "batchmean", -100, 1.0, 1e-10, accumulate_in
        ).backward()
        inputs.hidden.grad = inputs.weight.grad = None

    return work


def liger_jsd(inputs: Inputs, teacher_hidden: Tensor) -> Callable[[], None]:
    """Liger's forward KL to an online teacher (its generalised JSD with beta 0)."""

    def work() -> None:
        from liger_kernel.ops import LigerFusedLinearJSDFunction

        inputs.hidden.grad = inputs.weight.grad = None
        LigerFusedLinearJSDFunction.apply(
            inputs.hidden, inputs.weight, teacher_hidden, inputs.weight.detach(), None, 0.0
        ).backward()
        inputs.hidden.grad = inputs.weight.grad = None

    return work
