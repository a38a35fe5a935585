"""What a run shows while it trains: a bar on a terminal, about ten lines in a log."""

from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from fxskip.distill.evaluate import Metrics
from fxskip.distill.result import CurvePoint

LINES_PER_RUN = 10


class Reporter:
    """Writes to stderr, so that stdout stays free for what a command prints as its result."""

    def __init__(self, steps: int, objective: str, *, enabled: bool) -> None:
        self.steps, self.objective = steps, objective
        self.console = Console(stderr=True, quiet=not enabled, highlight=False, soft_wrap=True)
        self.bar: Progress | None = None
        if enabled and self.console.is_terminal:
            columns = (TextColumn("distill"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
            self.bar = Progress(*columns, TextColumn("{task.description}"), console=self.console)
            self.task = self.bar.add_task("", total=steps)

    def __enter__(self) -> Self:
        if self.bar is not None:
            self.bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.bar is not None:
            self.bar.stop()

    def note(self, text: str) -> None:
        self.console.print(f"distill: {text}")

    def step(self, point: CurvePoint) -> None:
        hidden = "" if point.hidden_mse is None else f"  hidden_mse {point.hidden_mse:.4f}"
        text = f"{self.objective} {point.objective:.4f}{hidden}  grad {point.grad_norm:.2f}"
        if self.bar is not None:
            self.bar.update(self.task, completed=point.step, description=text)
        elif point.step % max(1, self.steps // LINES_PER_RUN) == 0 or point.step == self.steps:
            self.note(f"step {point.step}/{self.steps}  {text}  lr {point.learning_rate:.2e}")

    def evaluation(self, step: int, metrics: Metrics) -> None:
        text = f"step {step}/{self.steps}  evaluation: cross-entropy {metrics.cross_entropy:.4f}"
        if metrics.kl is not None and metrics.agreement is not None:
            text += f"  KL {metrics.kl:.4f}  agreement {100 * metrics.agreement:.1f} %"
        self.note(text)
