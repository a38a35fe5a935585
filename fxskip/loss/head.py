"""From the last hidden state to log-probabilities: the only part of a model that the losses recompute."""

# t tokens of one chunk, D width, V vocabulary

from dataclasses import dataclass

import torch
from torch import Tensor

from fxskip.loss.products import gemm_operand, wide_matmul


@dataclass(frozen=True)
class Head:
    """log_softmax(softcap(scale * (hidden W^T + bias)) / temperature), in this order.

    `weight_VD` is already a GEMM operand for the dtype of the hidden states (see `gemm_operand`): converted
    once, not once a chunk.
    """

    weight_VD: Tensor
    bias_V: Tensor | None
    scale: float
    softcap: float | None
    temperature: float

    def logits(self, hidden_tD: Tensor) -> Tensor:
        """[t, V] logits before the softcap, in the accumulation dtype."""
        return self.scaled(wide_matmul(gemm_operand(hidden_tD), self.weight_VD.T))

    def scaled(self, product_tV: Tensor) -> Tensor:
        """scale * (product + bias): the logits before the softcap."""
        if self.bias_V is not None:
            product_tV = product_tV + self.bias_V.to(product_tV.dtype)
        return product_tV if self.scale == 1.0 else product_tV * self.scale

    def tempered(self, logits_tV: Tensor) -> Tensor:
        """What enters the softmax, given the logits before the softcap."""
        if self.softcap is not None:
            logits_tV = self.softcap * torch.tanh(logits_tV / self.softcap)
        return logits_tV if self.temperature == 1.0 else logits_tV / self.temperature

    def log_probs(self, logits_tV: Tensor) -> Tensor:
        return torch.log_softmax(self.tempered(logits_tV), dim=-1)

    def slope(self, logits_tV: Tensor) -> Tensor | float:
        """Derivative of what enters the softmax by hidden W^T + bias, given the logits before the softcap."""
        factor = self.scale / self.temperature
        if self.softcap is None:
            return factor
        return (1.0 - torch.tanh(logits_tV / self.softcap).square()) * factor
