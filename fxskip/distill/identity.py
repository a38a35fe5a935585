"""What a run is: everything that its result depends on, small enough to be kept beside its checkpoint."""

import hashlib
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from fxskip.distill.config import DistillConfig
from fxskip.distill.data import Windows
from fxskip.distill.parts import Parts

SAMPLES_PER_TENSOR = 4096


def identity(
    config: DistillConfig,
    student: Parts,
    teacher: Parts | None,
    windows: Windows,
    eval_windows: Windows | None,
) -> dict[str, Any]:
    """Flat and JSON-ready. Called before the first step: of the student it has the starting weights."""
    found: dict[str, Any] = {f"config.{key}": value for key, value in config.model_dump(mode="json").items()}
    found |= {"data": windows.digest, "eval_data": None if eval_windows is None else eval_windows.digest}
    for name, parts in (("student", student), ("teacher", teacher)):
        if parts is None:
            found |= {f"{name}.weights": None, f"{name}.output": None}
        else:
            found |= {f"{name}.weights": digest_of_weights(parts.model), f"{name}.output": list(parts.probe)}
    return found


def digest_of_weights(model: PreTrainedModel) -> str:
    """sha256 over names, shapes, dtypes, requires_grad and up to 4096 evenly spaced values of each tensor.

    A sample, because a teacher may be hundreds of gigabytes; a training step or another seed changes it in
    nearly every value.
    """
    sha = hashlib.sha256()
    tensors = [*model.named_parameters(), *model.named_buffers()]
    for name, tensor in tensors:
        sha.update(f"{name} {list(tensor.shape)} {tensor.dtype} {tensor.requires_grad}\n".encode())
        sha.update(sampled_bytes(tensor.detach()))
    return sha.hexdigest()


def sampled_bytes(tensor: Tensor) -> bytes:
    flat = tensor.flatten()
    stride = max(1, -(-flat.numel() // SAMPLES_PER_TENSOR))
    # As raw bytes: numpy knows no bfloat16.
    return flat[::stride].contiguous().cpu().view(torch.uint8).numpy().tobytes()


def differences(kept: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """One line for each part in which the two runs differ."""
    return [
        f"{key}: {short(kept.get(key))} there, {short(now.get(key))} now"
        for key in sorted({*kept, *now})
        if not is_same(kept.get(key), now.get(key))
    ]


def is_same(kept: Any, now: Any) -> bool:
    """Outputs are compared loosely: another number of threads or GPU moves the last digits."""
    if isinstance(kept, list) and isinstance(now, list):
        return len(kept) == len(now) and all(
            math.isclose(a, b, rel_tol=0.03, abs_tol=0.03) for a, b in zip(kept, now, strict=True)
        )
    return bool(kept == now)


def short(value: Any) -> str:
    if isinstance(value, list):
        return "[" + ", ".join(f"{number:.3g}" for number in value) + "]"
    text = repr(value) if not isinstance(value, str) else value
    return text if len(text) <= 40 else text[:12] + "…"
