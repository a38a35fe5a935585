"""Which parameters of a rewired model train, sub-block by sub-block."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from fxskip.planning.words import short_path
from fxskip.wiring import SubBlock

STACK_DIMENSIONS = 3
"""Dimensions of a parameter that holds a matrix for each expert: [experts, out, in]."""


@dataclass(frozen=True)
class TrainableBlock:
    """The parameters of one sub-block, or of all that lies outside of them. Counts are of numbers, not of tensors."""

    name: str
    """`0.mlp (moe)`, or `elsewhere` for embeddings, norms and head."""
    trainable: int
    frozen: int
    parameters: tuple[str, ...]
    """Names of those that train, below the sub-block's path; those of `elsewhere` are whole."""
    frozen_experts: tuple[str, ...]
    """Names, in the model, of fused expert parameters that stay frozen."""


@dataclass(frozen=True)
class Trainable:
    """The result of `fxskip.trainable`; printed, one line a sub-block."""

    blocks: tuple[TrainableBlock, ...]

    @property
    def parameters(self) -> int:
        """How many numbers train."""
        return sum(block.trainable for block in self.blocks)

    @property
    def frozen_experts(self) -> tuple[str, ...]:
        """Names of the fused expert parameters that stay frozen while other parameters train."""
        return (
            tuple(name for block in self.blocks for name in block.frozen_experts) if self.parameters else ()
        )

    def __str__(self) -> str:
        total = self.parameters + sum(block.frozen for block in self.blocks)
        lines = [f"{self.parameters:,} of {total:,} parameters train"]
        for block in self.blocks:
            names = ", ".join(block.parameters) or "nothing"
            lines.append(
                f"  {block.name:<24} {block.trainable:>12,} train, {block.frozen:>14,} frozen: {names}"
            )
        if self.frozen_experts:
            lines.append(
                f"{len(self.frozen_experts)} fused expert parameters stay frozen ({self.frozen_experts[0]}, ...): "
                "LoRA's target_modules reach modules that are linear layers, and these are bare parameters"
            )
        return "\n".join(lines)


def trainable_parameters(model: nn.Module, blocks: Sequence[SubBlock]) -> Trainable:
    """Read off `requires_grad` of every parameter of `model`, which has the sub-blocks `blocks`."""
    named = dict(model.named_parameters())
    rows = []
    for block in blocks:
        own = {name: p for name, p in named.items() if name.startswith(f"{block.path}.")}
        rows.append(_row(f"{short_path(block.path)} ({block.kind})", block, own))
        for name in own:
            del named[name]
    return Trainable((*rows, _row("elsewhere", None, named)))


def _row(name: str, block: SubBlock | None, named: dict[str, nn.Parameter]) -> TrainableBlock:
    path = f"{block.path}." if block else ""
    training = {key: p for key, p in named.items() if p.requires_grad}
    experts = [key for key, p in named.items() if p.ndim == STACK_DIMENSIONS and not p.requires_grad]
    return TrainableBlock(
        name,
        trainable=sum(p.numel() for p in training.values()),
        frozen=sum(p.numel() for p in named.values()) - sum(p.numel() for p in training.values()),
        parameters=tuple(key.removeprefix(path) for key in training),
        frozen_experts=tuple(experts) if block and block.kind == "moe" else (),
    )
