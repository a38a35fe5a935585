"""The training loop. All that it knows at a step is in `State`, so that a checkpoint of it is complete."""

import math
import time
import warnings
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from fxskip.distill.config import DistillConfig
from fxskip.distill.data import IGNORED, Batch, Windows
from fxskip.distill.evaluate import Metrics, evaluate_parts
from fxskip.distill.hidden_mse import hidden_mse, recorded_streams
from fxskip.distill.parts import Parts
from fxskip.distill.progress import Reporter
from fxskip.distill.result import CurvePoint, Evaluation
from fxskip.distill.run_folder import RunFolder
from fxskip.errors import CheckpointError, FxskipError
from fxskip.loss import cross_entropy, hidden_kl
from fxskip.loss.products import accumulation_dtype


@dataclass
class State:
    """Where the run is; position in the data, learning rate and best evaluation follow from it."""

    step: int = 0
    tokens: int = 0
    stopped_early: bool = False
    seconds: float = 0.0
    curve: list[CurvePoint] = field(default_factory=list)
    evaluations: list[Evaluation] = field(default_factory=list)


@dataclass
class Trainer:
    config: DistillConfig
    student: Parts
    teacher: Parts | None
    windows: Windows
    eval_windows: Windows | None
    folder: RunFolder | None
    reporter: Reporter
    state: State = field(default_factory=State)

    def __post_init__(self) -> None:
        model = self.student.model
        self.kept_in_eval = {m for m in model.modules() if not m.training} if model.training else set()
        self.trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        if not self.trained:
            raise FxskipError(
                "distill", "no parameter of the student requires a gradient", hint="student.requires_grad_()"
            )
        narrow = {str(p.dtype) for p in self.trained.values() if p.dtype in (torch.bfloat16, torch.float16)}
        if narrow:
            warnings.warn(
                f"distill: trained parameters are {', '.join(sorted(narrow))}: steps smaller than their "
                "rounding are lost; load the student with dtype=torch.float32",
                stacklevel=4,
            )
        self.optimizer = torch.optim.AdamW(
            self.trained.values(), lr=0.0, betas=self.config.betas, weight_decay=self.config.weight_decay
        )

    def run(self) -> None:
        """From the current state to the last step, or to where early stopping ends it."""
        started = time.perf_counter() - self.state.seconds
        if self.state.step == 0 and not self.state.evaluations:
            self.evaluate()
        while not self.is_finished():
            self.train_step()
            last = self.state.step == self.config.steps
            if last or self.state.step % self.config.eval_every == 0:
                self.evaluate()
                self.state.stopped_early = not last and self.is_stalled()
            self.state.seconds = time.perf_counter() - started
            save_now = self.is_finished() or self.state.step % self.config.save_every == 0
            if self.folder is not None and save_now:
                self.folder.save(self.checkpoint())
        self.state.seconds = time.perf_counter() - started

    def is_finished(self) -> bool:
        return self.state.stopped_early or self.state.step >= self.config.steps

    def train_step(self) -> None:
        config, state = self.config, self.state
        rate = learning_rate(state.step, config)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        batch = self.windows.shuffled(state.step, config.batch_size, config.seed, self.student.device)
        self.train_mode()
        objective, hidden = self.losses(batch)
        loss = objective if hidden is None else objective + config.hidden_weight * hidden
        self.require_finite("loss", loss.item())
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        norm = float(nn.utils.clip_grad_norm_(self.trained.values(), config.clip_norm))
        self.require_finite("norm of the gradient", norm)
        self.optimizer.step()
        state.step += 1
        state.tokens += batch.tokens
        losses = loss.item(), objective.item(), None if hidden is None else hidden.item()
        state.curve.append(CurvePoint(state.step, state.tokens, *losses, rate, norm))
        self.reporter.step(state.curve[-1])

    def train_mode(self) -> None:
        """Training mode; but what the caller had in eval mode inside a model in training mode stays so."""
        for module in self.student.model.modules():
            module.training = module not in self.kept_in_eval

    def losses(self, batch: Batch) -> tuple[Tensor, Tensor | None]:
        """The objective, and the hidden-state loss if it has a weight."""
        config, student = self.config, self.student
        targets = batch.targets_BL.flatten()
        if config.objective == "cross_entropy":
            hidden, _ = forward(student, batch, with_streams=False)
            loss = cross_entropy(
                hidden, student.weight_VD, targets, bias=student.bias_V, chunk_tokens=config.chunk_tokens
            )
            return loss, None
        assert self.teacher is not None
        teacher = self.teacher
        with_streams = config.hidden_weight > 0
        with torch.no_grad():
            teacher_hidden, teacher_streams = forward(teacher, batch, with_streams=with_streams)
        hidden, streams = forward(student, batch, with_streams=with_streams)
        kl = hidden_kl(
            hidden,
            student.weight_VD,
            teacher_hidden,
            teacher.weight_VD,
            temperature=config.temperature,
            token_weight=(targets != IGNORED).float(),
            chunk_tokens=config.chunk_tokens,
            student_bias=student.bias_V,
            teacher_bias=teacher.bias_V,
            # The student starts as a rewired copy: their logits differ by little more than bfloat16 resolves.
            logits_dtype=accumulation_dtype(hidden.dtype),
        )
        return kl, hidden_mse(streams, teacher_streams, batch.attention_mask_BL) if with_streams else None

    def require_finite(self, what: str, value: float) -> None:
        if math.isfinite(value):
            return
        kept = "no checkpoint was written"
        if self.folder is not None and self.folder.checkpoint.exists():
            kept = f"the last checkpoint is whole: {self.folder.checkpoint}"
        raise FxskipError(
            "distill",
            f"step {self.state.step + 1}: the {what} is {value}",
            where=f"learning rate {learning_rate(self.state.step, self.config):.2e}; {kept}",
            hint=f"a learning_rate below {self.config.learning_rate:g}, or find the batch that causes it",
        )

    def evaluate(self) -> None:
        if self.eval_windows is None:
            return
        size, chunk = self.config.batch_size, self.config.chunk_tokens
        metrics = evaluate_parts(self.student, self.teacher, self.eval_windows, size, chunk)
        self.state.evaluations.append(Evaluation(self.state.step, metrics))
        self.reporter.evaluation(self.state.step, metrics)

    def is_stalled(self) -> bool:
        """The last `patience` evaluations brought no improvement over the best one before them."""
        stopping = self.config.early_stopping
        if stopping is None or not self.state.evaluations:
            return False
        values = [getattr(point.metrics, stopping.metric) for point in self.state.evaluations]
        if stopping.metric == "agreement":
            values = [-value for value in values]
        best, stalled = values[0], 0
        for value in values[1:]:
            improved = value < best - stopping.min_delta
            best, stalled = (value, 0) if improved else (best, stalled + 1)
        return stalled >= stopping.patience

    def checkpoint(self) -> dict[str, Any]:
        """Everything that the rest of the run depends on, as tensors and plain values."""
        device = self.student.device
        accelerator = None if device.type == "cpu" else torch.get_device_module(device)
        return {
            "trained": {name: parameter.detach() for name, parameter in self.trained.items()},
            "buffers": dict(self.student.model.named_buffers()),
            "optimizer": self.optimizer.state_dict(),
            "rng": torch.get_rng_state(),
            "device_rng": accelerator.get_rng_state(device) if accelerator else None,
            "state": asdict(self.state),
        }

    def resume(self, kept: dict[str, Any]) -> None:
        """Go on where `checkpoint` was taken."""
        device = self.student.device
        load_tensors(self.student, kept)
        self.optimizer.load_state_dict(kept["optimizer"])
        torch.set_rng_state(kept["rng"])
        if kept["device_rng"] is not None:
            torch.get_device_module(device).set_rng_state(kept["device_rng"], device)
        fields = kept["state"]
        curve = [CurvePoint(**point) for point in fields.pop("curve")]
        evaluations = [Evaluation(e["step"], Metrics(**e["metrics"])) for e in fields.pop("evaluations")]
        self.state = State(**fields, curve=curve, evaluations=evaluations)


def forward(parts: Parts, batch: Batch, *, with_streams: bool) -> tuple[Tensor, list[Tensor]]:
    """Last hidden states [B * L, D], and the residual stream after each layer if they are wanted."""
    with recorded_streams(parts.layers if with_streams else []) as streams:
        hidden = parts.hidden(batch).flatten(0, 1)
    return hidden, streams


def load_tensors(student: Parts, kept: dict[str, Any]) -> None:
    """Write a checkpoint's parameters and buffers into the student."""
    model = student.model
    for key, current in (
        ("trained", dict(model.named_parameters())),
        ("buffers", dict(model.named_buffers())),
    ):
        missing = kept[key].keys() - current.keys()
        if missing:
            raise CheckpointError(
                "distill",
                f"the checkpoint has {key} that the student lacks: {', '.join(sorted(missing)[:5])}",
                hint="continue with the student that the run was started with",
            )
        with torch.no_grad():
            for name, value in kept[key].items():
                current[name].copy_(value)


def learning_rate(step: int, config: DistillConfig) -> float:
    """Of optimizer step `step` (from 0): a linear rise to the peak, then half a cosine down to 0.

    A function of the step and nothing else: there is no scheduler whose state could be lost.
    """
    warmup = round(config.warmup_fraction * config.steps)
    if step < warmup:
        return config.learning_rate * (step + 1) / warmup
    done = (step - warmup) / (config.steps - warmup)
    return config.learning_rate * 0.5 * (1.0 + math.cos(math.pi * done))
