"""curves.png: loss and evaluations over the steps of a run."""

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from fxskip.distill.files import write_whole
from fxskip.distill.result import Result


def plot_curves(result: Result, objective: str, path: Path) -> None:
    """One panel for the training losses, one for each evaluated metric; written whole or not at all."""
    panels = [name for name in ("kl", "cross_entropy", "agreement") if evaluated(result, name)]
    # Figure and canvas by hand: pyplot would keep the figure and touch the caller's backend.
    figure = Figure(figsize=(4.5 * (1 + len(panels)), 3.5), layout="constrained")
    canvas = FigureCanvasAgg(figure)
    axes = figure.subplots(1, 1 + len(panels), squeeze=False)[0]
    plot_training(axes[0], result, objective)
    for axis, name in zip(axes[1:], panels, strict=True):
        points = evaluated(result, name)
        axis.plot([step for step, _ in points], [value for _, value in points], marker="o")
        axis.set(title=f"evaluation: {name}", xlabel="step")
        axis.grid(alpha=0.3)
    write_whole(path, lambda file: canvas.print_png(file))


def plot_training(axis: Axes, result: Result, objective: str) -> None:
    steps = [point.step for point in result.curve]
    axis.plot(steps, [point.objective for point in result.curve], label=objective)
    hidden = [point.hidden_mse for point in result.curve if point.hidden_mse is not None]
    if hidden:  # one a step, or none at all
        axis.plot(steps, hidden, label="hidden_mse")
    if all(point.objective > 0 for point in result.curve):
        axis.set_yscale("log")
    axis.set(title="training", xlabel="step")
    axis.legend()
    axis.grid(alpha=0.3)


def evaluated(result: Result, name: str) -> list[tuple[int, float]]:
    found = [(point.step, getattr(point.metrics, name)) for point in result.evaluations]
    return [(step, value) for step, value in found if value is not None]
