"""What a distillation leaves: figures, curves, and where they came from."""

import json
import os
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

import torch
import transformers

from fxskip.distill.evaluate import Metrics
from fxskip.version import __version__


@dataclass(frozen=True)
class CurvePoint:
    """One optimizer step. `step` and `tokens` count what was done when it ended; losses are of its batch.

    loss           objective + hidden_weight * hidden_mse
    objective      the KL or the cross-entropy, nats a token
    hidden_mse     None when hidden_weight is 0
    grad_norm      before clipping
    """

    step: int
    tokens: int
    loss: float
    objective: float
    hidden_mse: float | None
    learning_rate: float
    grad_norm: float


@dataclass(frozen=True)
class Evaluation:
    """Metrics on the evaluation data after `step` optimizer steps; step 0 is the untrained student."""

    step: int
    metrics: Metrics


@dataclass(frozen=True)
class Result:
    """A finished distillation. `tokens` are those the student was trained on, padding not counted.

    `metrics` are those of the final weights; None without eval_data. `out` is the folder with the checkpoint,
    results.json and curves.png; None when none was given.
    """

    metrics: Metrics | None
    steps: int
    tokens: int
    curve: tuple[CurvePoint, ...]
    evaluations: tuple[Evaluation, ...]
    stopped_early: bool
    wall_seconds: float
    out: Path | None = None

    def to_dict(self) -> dict[str, Any]:
        fields = asdict(self)
        return fields | {"out": None if self.out is None else str(self.out)}

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=2)

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any], out: Path) -> Self:
        """The inverse of `to_dict`; `out` is where the folder is now, it may have been moved."""
        metrics = fields["metrics"]
        return cls(
            metrics=None if metrics is None else Metrics(**metrics),
            steps=fields["steps"],
            tokens=fields["tokens"],
            curve=tuple(CurvePoint(**point) for point in fields["curve"]),
            evaluations=tuple(
                Evaluation(point["step"], Metrics(**point["metrics"])) for point in fields["evaluations"]
            ),
            stopped_early=fields["stopped_early"],
            wall_seconds=fields["wall_seconds"],
            out=out,
        )


def versions() -> dict[str, str]:
    """Of Python and of the packages that the numbers depend on."""
    return {
        "python": platform.python_version(),
        "fxskip": __version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def hardware(device: torch.device) -> dict[str, Any]:
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else str(device),
        "machine": platform.machine(),
        "system": platform.system(),
        "cpus": os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
    }
