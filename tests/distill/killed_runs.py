"""Runs of `distill` that die by SIGKILL at a chosen moment: `python -m tests.distill.killed_runs FOLDER`.

Each leaves its folder FOLDER/<moment> as the kill found it. Imported once and forked for each, because the
imports take longer than the runs.
"""

import io
import os
import signal
import sys
from pathlib import Path

import torch

from fxskip.distill import Result, distill
from fxskip.distill.progress import Reporter
from tests.distill.tiny import perturbed_copy, teacher_model, windows

CONFIG = {"steps": 9, "learning_rate": 2e-3, "eval_every": 4, "save_every": 3}


def pair():
    """Dropout on: the run depends on the random state, which a checkpoint must therefore hold."""
    teacher = teacher_model(attention_dropout=0.3)
    return perturbed_copy(teacher), teacher


def run(out: Path | None) -> tuple[Result, torch.nn.Module]:
    student, teacher = pair()
    options = {"config": CONFIG, "eval_data": windows(seed=3), "progress": False}
    return distill(student, windows(7), teacher=teacher, out=out, **options), student


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_after_step_5() -> None:
    def step(self, point) -> None:
        if point.step == 5:
            die()

    Reporter.step = step


def die_while_saving_step_6() -> None:
    whole_save = torch.save

    def half_save(state, file) -> None:
        buffer = io.BytesIO()
        whole_save(state, buffer)
        if state["state"]["step"] < 6:
            file.write(buffer.getvalue())
        else:
            file.write(buffer.getvalue()[: buffer.tell() // 2])
            file.flush()
            die()

    torch.save = half_save


def die_before_the_results() -> None:
    # By its name in sys.modules: `fxskip.distill.distill` is the function, which hides the module.
    sys.modules["fxskip.distill.distill"].plot_curves = lambda *arguments: die()


MOMENTS = {
    "after_step_5": die_after_step_5,
    "while_saving_step_6": die_while_saving_step_6,
    "before_the_results": die_before_the_results,
}


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    for name, arrange in MOMENTS.items():
        child = os.fork()
        if child == 0:
            arrange()
            run(folder / name)
            os._exit(0)  # not reached
        _, status = os.waitpid(child, 0)
        if not (os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL):
            sys.exit(f"the run {name} was not killed: status {status}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
