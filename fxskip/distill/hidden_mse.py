"""The hidden-state loss: how far the student's residual stream is from the teacher's, layer by layer."""

# B windows, L length, D width

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fxskip.errors import FxskipError


@contextmanager
def recorded_streams(layers: Iterable[nn.Module]) -> Iterator[list[Tensor]]:
    """The residual stream after each layer, in order, for the forward that runs inside the `with`.

    A rewired layer returns a tuple of streams and the full one comes first; other layers return a tensor, or
    a tuple that starts with it. The hooks are gone when the backward runs, so that a gradient checkpoint
    which calls a layer again records nothing.
    """
    streams: list[Tensor] = []

    def record(layer: nn.Module, arguments: Any, output: Any) -> None:
        stream = output[0] if isinstance(output, tuple | list) else output
        if not isinstance(stream, Tensor):
            raise FxskipError(
                "hidden_mse",
                f"a decoder layer returns a {type(stream).__name__}",
                where=type(layer).__name__,
                hint="set hidden_weight: 0",
            )
        streams.append(stream)

    handles = [layer.register_forward_hook(record) for layer in layers]
    try:
        yield streams
    finally:
        for handle in handles:
            handle.remove()


def hidden_mse(
    student: Sequence[Tensor], teacher: Sequence[Tensor], attention_mask_BL: Tensor | None
) -> Tensor:
    """Mean over layers of mean |x_s - x_t|^2 / mean x_t^2 over all tokens that are not padding; float32."""
    if len(student) != len(teacher):
        raise FxskipError(
            "hidden_mse",
            f"the student ran {len(student)} layers, the teacher {len(teacher)}",
            hint="set hidden_weight: 0, or distil from a teacher of the same depth",
        )
    if torch.is_grad_enabled() and not student[-1].requires_grad:
        raise FxskipError(
            "hidden_mse",
            "no gradient reaches the student's last layer",
            hint="train a parameter of the decoder, use gradient checkpointing with use_reentrant=False, "
            "or set hidden_weight: 0",
        )
    per_layer = [
        relative_error(layer, ours, theirs, attention_mask_BL)
        for layer, (ours, theirs) in enumerate(zip(student, teacher, strict=True))
    ]
    return torch.stack(per_layer).mean()


def relative_error(
    layer: int, student_BLD: Tensor, teacher_BLD: Tensor, attention_mask_BL: Tensor | None
) -> Tensor:
    if student_BLD.shape != teacher_BLD.shape:
        raise FxskipError(
            "hidden_mse",
            f"the student's stream is {list(student_BLD.shape)}, the teacher's {list(teacher_BLD.shape)}",
            where=f"layer {layer}",
            hint="set hidden_weight: 0, or distil from a teacher of the same width",
        )
    if attention_mask_BL is not None:
        # Chosen, not multiplied by 0: what a model computes at a padded position may be NaN.
        kept = attention_mask_BL.bool()
        student_BLD, teacher_BLD = student_BLD[kept], teacher_BLD[kept]
    teacher = teacher_BLD.float()
    return (student_BLD.float() - teacher).square().mean() / teacher.square().mean()
