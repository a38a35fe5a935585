"""What training needs and the model does not have: dropout, expert balance, and full-precision weights.

DeepSeek-V3 has no dropout, because its text is never seen twice. 2.5 million tokens are seen some twenty
times here, so without dropout the model learns them by heart. All of it hangs on hooks, which no file keeps:
the saved model is the stock class.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.hooks import RemovableHandle
from transformers import DeepseekV3ForCausalLM


def add_dropout(model: DeepseekV3ForCausalLM, probability: float) -> list[RemovableHandle]:
    """Dropout on the embedding and on what each attention and each MLP adds to the stream, while training."""

    def drop(module: nn.Module, _inputs: object, output: Any) -> Any:
        if not module.training:
            return output
        if isinstance(output, tuple):  # attention: its output, then its weights
            return (F.dropout(output[0], probability), *output[1:])
        return F.dropout(output, probability)

    places = [model.model.embed_tokens]
    for layer in model.model.layers:
        places += [layer.self_attn, layer.mlp]
    return [place.register_forward_hook(drop) for place in places]


class LoadBalance:
    """Balance without a loss, as DeepSeek-V3 does it, and the count of tokens that it is based on.

    Each router adds a bias to its scores when it chooses experts, not when it weighs them. After a step the
    bias of an expert that got more than the mean goes down by `speed`, that of any other goes up.
    """

    def __init__(self, model: DeepseekV3ForCausalLM, speed: float) -> None:
        self.speed = speed
        self.gates = {name: module for name, module in model.named_modules() if is_router(module)}
        self.counts = {
            name: torch.zeros_like(gate.e_score_correction_bias) for name, gate in self.gates.items()
        }
        self.handles = [
            gate.register_forward_hook(self.counter(self.counts[name])) for name, gate in self.gates.items()
        ]

    @staticmethod
    def counter(counts: Tensor) -> Any:
        def count(_gate: nn.Module, _inputs: object, output: tuple[Tensor, Tensor, Tensor]) -> None:
            chosen = output[2].flatten()  # router logits, weights, experts
            # Not bincount: on a GPU it would wait for the result to know its own length.
            counts.scatter_add_(0, chosen, torch.ones_like(chosen, dtype=counts.dtype))

        return count

    @torch.no_grad()
    def step(self) -> None:
        """Move the biases once and forget the counts."""
        for name, gate in self.gates.items():
            counts = self.counts[name]
            gate.e_score_correction_bias.add_(torch.sign(counts.mean() - counts), alpha=self.speed)
        self.forget()

    def forget(self) -> None:
        for counts in self.counts.values():
            counts.zero_()

    def loads(self) -> dict[str, list[float]]:
        """For each router what each expert got, as a multiple of the fair share."""
        return {
            name: [round(share, 3) for share in (counts / counts.mean()).tolist()]
            for name, counts in self.counts.items()
        }


def is_router(module: nn.Module) -> bool:
    return hasattr(module, "e_score_correction_bias")


class MasterWeights:
    """float32 copies of the weights, which the optimizer moves; the model computes with rounded ones.

    A step of the size 1e-3 times a weight is lost in bf16, which keeps 8 bits. Autocast would leave the
    weights in float32 too, but the grouped expert kernels do not take part in it.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        names = [name for name, _ in model.named_parameters()]
        self.masters = [parameter.detach().clone().float() for parameter in model.parameters()]
        # Routers stay in float32, as in DeepSeek-V3: near a tie, rounding would choose the expert.
        for module in model.modules():
            if not is_router(module):
                for parameter in module.parameters(recurse=False):
                    parameter.data = parameter.data.to(dtype)
        self.working: list[Tensor] = list(model.parameters())
        self.named = dict(zip(names, self.masters, strict=True))

    def take_gradients(self) -> None:
        """Move the gradients from the model to the masters."""
        for master, parameter in zip(self.masters, self.working, strict=True):
            if parameter.grad is None:
                raise RuntimeError(f"a parameter of shape {tuple(parameter.shape)} got no gradient")
            master.grad = parameter.grad.float()
            parameter.grad = None

    @torch.no_grad()
    def publish(self) -> None:
        """Round the masters into the model."""
        torch._foreach_copy_(self.working, self.masters)
