"""`distill`: bring a rewired student back to its original's distribution."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from os import PathLike
from typing import Any

import torch
from transformers import PreTrainedModel

from fxskip.distill.config import ConfigSource, DistillConfig, load_config
from fxskip.distill.curves import plot_curves
from fxskip.distill.data import as_windows
from fxskip.distill.evaluate import split_pair
from fxskip.distill.files import write_text
from fxskip.distill.identity import identity
from fxskip.distill.parts import Parts, modes_restored
from fxskip.distill.progress import Reporter
from fxskip.distill.result import Result, hardware, versions
from fxskip.distill.run_folder import RunFolder
from fxskip.distill.trainer import Trainer, load_tensors
from fxskip.errors import FxskipError


def distill(
    student: PreTrainedModel,
    data: Any,
    *,
    teacher: PreTrainedModel | None,
    config: ConfigSource = None,
    out: str | PathLike[str] | None = None,
    eval_data: Any = None,
    progress: bool = True,
) -> Result:
    """Train `student` in place to give what `teacher` gives, and return the figures.

    student    a causal LM of transformers whose logits are head(decoder(ids)); its parameters with
               requires_grad are trained. Its train/eval modes are as before afterwards
    data       integer tensor [windows, length], or a sequence of dicts with input_ids (see `as_windows`). The
               loss counts every position that predicts a token whose label is not -100
    teacher    the original, frozen and left as it is. None only for objective cross_entropy
    config     a DistillConfig, a mapping, a YAML file or the name of a recipe; None is the recipe fcsd
    out        folder for checkpoints, results.json and curves.png. If it holds this very run, the run goes on
               from its last checkpoint and ends with the same bits as one that was never interrupted (on the
               same machine, with the same number of threads, and unless the recipe says deterministic: false);
               a finished one is only read. The folder of another run is refused
    eval_data  as `data`; evaluated before the first step, every `eval_every` steps and after the last one
    progress   a bar on a terminal, about ten log lines on stderr elsewhere

    The caller's random state is left alone. A loss or gradient that is not finite ends the run with an error.
    """
    recipe = load_config(config)
    parts, teacher_parts = checked_models(recipe, student, teacher)
    windows = as_windows("distill", "data", data, parts.vocabulary)
    eval_windows = (
        None if eval_data is None else as_windows("distill", "eval_data", eval_data, parts.vocabulary)
    )
    require_metric(recipe, has_teacher=teacher is not None, has_eval_data=eval_data is not None)
    reporter = Reporter(recipe.steps, recipe.objective, enabled=progress)
    folder = None
    if out is not None:
        folder = RunFolder.open(out, identity(recipe, parts, teacher_parts, windows, eval_windows))
        if (finished := folder.finished()) is not None:
            load_tensors(parts, folder.load())
            reporter.note(f"{folder.path} is finished after {finished.steps} steps; nothing to do")
            return finished
    trainer = Trainer(recipe, parts, teacher_parts, windows, eval_windows, folder, reporter)
    models = [student] if teacher is None else [student, teacher]
    with (
        modes_restored(*models),
        own_random_state(parts.device, recipe.seed),
        deterministic_kernels(recipe.deterministic),
        reporter,
    ):
        for model in models:
            model.eval()
        if folder is not None and folder.has_checkpoint:
            trainer.resume(folder.load())
            reporter.note(f"continuing {folder.path} after step {trainer.state.step}")
        try:
            trainer.run()
        finally:
            trainer.optimizer.zero_grad(set_to_none=True)
    return finish(trainer)


def checked_models(config: DistillConfig, student: Any, teacher: Any) -> tuple[Parts, Parts | None]:
    if teacher is None and config.objective == "kl":
        raise TypeError("distill: teacher is None, and objective kl needs one; give the original model")
    if teacher is not None and not isinstance(teacher, PreTrainedModel):
        raise TypeError(
            f"distill: teacher is a {type(teacher).__name__}; only a model of transformers (PreTrainedModel) "
            "can teach today, not a path, a cache of its outputs or a function"
        )
    parts, teacher_parts = split_pair("distill", student, teacher)
    if teacher is not None:
        addresses = {p.data_ptr() for p in teacher.parameters() if p.numel()}
        shared = [
            name for name, p in student.named_parameters() if p.requires_grad and p.data_ptr() in addresses
        ]
        if shared:
            raise FxskipError(
                "distill",
                f"student and teacher share {len(shared)} parameters, so training would change the teacher",
                where=shared[0],
                hint="make the student with inplace=False, or the teacher with copy.deepcopy",
            )
    return parts, teacher_parts


def require_metric(config: DistillConfig, *, has_teacher: bool, has_eval_data: bool) -> None:
    stopping = config.early_stopping
    if stopping is None:
        return
    if not has_eval_data:
        raise FxskipError(
            "distill", "early_stopping is set, but there is no eval_data", hint="give eval_data"
        )
    if not has_teacher and stopping.metric != "cross_entropy":
        raise FxskipError(
            "distill",
            f"early_stopping looks at {stopping.metric}, which needs a teacher",
            hint="give a teacher, or write metric: cross_entropy",
        )


@contextmanager
def deterministic_kernels(wanted: bool) -> Iterator[None]:
    """Without them two threads that add up gradients of the same expert's tokens may do so in either order.

    An operation that has no deterministic kernel warns and runs as it is. The caller's settings come back.
    """
    was_on = torch.are_deterministic_algorithms_enabled()
    warned_only = torch.is_deterministic_algorithms_warn_only_enabled()
    filled = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    if wanted:
        torch.use_deterministic_algorithms(True, warn_only=not was_on or warned_only)
        if not was_on:
            # Filling every new tensor is a debugging aid that comes with the mode; it costs time.
            torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(was_on, warn_only=warned_only)
        torch.utils.deterministic.fill_uninitialized_memory = filled  # type: ignore[attr-defined]


@contextmanager
def own_random_state(device: torch.device, seed: int) -> Iterator[None]:
    """Dropout draws from `seed`, and the caller's generators go on afterwards as if nothing had happened."""
    if device.type == "cpu":
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            yield
        return
    accelerator = torch.get_device_module(device)
    with torch.random.fork_rng(devices=[device], device_type=device.type), accelerator.device(device):
        # torch.manual_seed would reseed every device, and only this one is restored.
        torch.default_generator.manual_seed(seed)
        accelerator.manual_seed(seed)
        yield


def finish(trainer: Trainer) -> Result:
    """The result, written to the folder if there is one; results.json last, as the sign that all is there."""
    state, folder = trainer.state, trainer.folder
    result = Result(
        metrics=state.evaluations[-1].metrics if state.evaluations else None,
        steps=state.step,
        tokens=state.tokens,
        curve=tuple(state.curve),
        evaluations=tuple(state.evaluations),
        stopped_early=state.stopped_early,
        wall_seconds=state.seconds,
        out=None if folder is None else folder.path,
    )
    if folder is not None:
        plot_curves(result, trainer.config.objective, folder.curves)
        report = {
            "config": trainer.config.model_dump(mode="json"),
            "versions": versions(),
            "hardware": hardware(trainer.student.device),
            **result.to_dict(),
        }
        write_text(folder.results, json.dumps(report, indent=2))
    return result
