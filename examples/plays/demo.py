"""The main job on real text: rewire the bundled model, distil it for two minutes, and see what came back.

    python examples/plays/demo.py                                  # what `make demo` runs
    python examples/plays/demo.py --lr 0 --out out/lr-0            # control: nothing is learned
    python examples/plays/demo.py --objective cross_entropy --out out/sft    # control: the text without the teacher

Everything is measured on the whole held-out text. Exits with 1 unless the distillation closes at least 35% of the
KL and 50% of the cross-entropy that the rewiring cost, and the saved model gives the same logits in a new process.
A run that was interrupted continues; a finished one starts anew.
"""

from __future__ import annotations

import argparse
import math
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from corpus import token_windows
from evaluate import MODEL_DIR, spread
from reload_check import write_down
from report import Outcome, print_table, write_report
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    set_seed,
)
from transformers.utils import logging
from yardstick import Yardstick

import fxskip
from fxskip.distill import DistillConfig, Result, distill

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
SPEC = ROOT / "specs" / "farskip.yaml"

WINDOW_TOKENS = 256
KL_GATE, CROSS_ENTROPY_GATE = 0.35, 0.50
PROMPT = "KING RICHARD:\nMy lord, what news"


@dataclass(frozen=True)
class Settings:
    """What a run may vary. The defaults are the demo; a part of the held-out text is for quick tests only."""

    out: Path = ROOT / "out" / "plays"
    steps: int = 150
    objective: str = "kl"
    learning_rate: float = 8e-4
    hidden_weight: float = 10.0
    seed: int = 0
    held_out_windows: int | None = None

    def config(self) -> DistillConfig:
        return DistillConfig(
            objective=self.objective,
            learning_rate=self.learning_rate,
            # Plain training on the text has no teacher, so no hidden states to be near to.
            hidden_weight=self.hidden_weight if self.objective == "kl" else 0.0,
            steps=self.steps,
            seed=self.seed,
        )


def run(settings: Settings) -> Outcome:
    """Everything but the verdict. Writes the student, the distiller's files and nothing else."""
    start = time.perf_counter()
    logging.disable_progress_bar()  # of the weights: it flashes by and hides what matters
    tokenizer = AutoTokenizer.from_pretrained(MODEL_DIR)
    original = AutoModelForCausalLM.from_pretrained(MODEL_DIR, dtype=torch.float32).eval()
    plan = fxskip.plan(original, SPEC)
    print(plan, flush=True)
    student = fxskip.transform(original, SPEC)

    yardstick = Yardstick(original, spread(token_windows(tokenizer, "held_out"), settings.held_out_windows))
    figures = {"original": yardstick.measure(original, "original")}
    samples = {"original": sample(original, tokenizer)}
    figures["rewired"] = yardstick.measure(student, "rewired")
    samples["rewired"] = sample(student, tokenizer)
    result = distilled(student, original, tokenizer, settings)
    figures["distilled"] = yardstick.measure(student, "rewired and distilled")
    samples["distilled"] = sample(student, tokenizer)

    reloads = reloads_alike(student, tokenizer, settings.out)
    return Outcome(plan, settings.config(), figures, samples, result, reloads, time.perf_counter() - start)


def distilled(
    student: PreTrainedModel,
    original: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    settings: Settings,
) -> Result:
    """Train `student` on a fixed number of tokens; the curve is measured on a small part of the val split."""
    folder = settings.out / "distill"
    if (folder / "results.json").exists():  # else the finished run would only be read
        shutil.rmtree(folder)
    return distill(
        student,
        token_windows(tokenizer, "train", WINDOW_TOKENS),
        teacher=original if settings.objective == "kl" else None,
        config=settings.config(),
        out=folder,
        eval_data=spread(token_windows(tokenizer, "val", WINDOW_TOKENS), 16),
    )


def sample(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> str:
    """A few lines after `PROMPT`, drawn with the same random numbers for every model."""
    set_seed(1)
    inputs = tokenizer(PROMPT, return_tensors="pt")
    ids = model.generate(**inputs, max_new_tokens=80, do_sample=True, temperature=0.7, top_k=40)
    return str(tokenizer.decode(ids[0], skip_special_tokens=True))


def reloads_alike(student: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, out: Path) -> bool:
    """Save the student, and let a new process load it and compare its logits to the last bit."""
    folder, logits = out / "student", out / "logits.safetensors"
    student.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    write_down(student, token_windows(tokenizer, "val")[:2], logits)
    check = [sys.executable, str(HERE / "reload_check.py"), str(folder), str(logits)]
    return subprocess.run(check, check=False).returncode == 0


def shortfalls(outcome: Outcome) -> list[str]:
    """What keeps the run from being a success; empty if nothing does."""
    found = []
    for name, closed, gate in (
        ("KL", outcome.kl_closed, KL_GATE),
        ("cross-entropy", outcome.cross_entropy_closed, CROSS_ENTROPY_GATE),
    ):
        if math.isnan(closed):
            found.append(f"the rewired model has no worse {name} than the original: was it rewired?")
        elif closed < gate:
            found.append(
                f"closed {100 * closed:.1f}% of the {name} that the rewiring cost; {gate:.0%} are needed"
            )
    if not outcome.reloads_alike:
        found.append("the saved student does not give the same logits in a new process")
    return found


def parse(arguments: Sequence[str] | None = None) -> Settings:
    usual = Settings()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=usual.out, help="folder for everything that is written")
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--steps", type=int, default=usual.steps, help="optimizer steps of 4 x 256 tokens")
    length.add_argument("--tokens", type=int, help="the same as tokens, rounded down to whole steps")
    parser.add_argument("--objective", choices=("kl", "cross_entropy"), default=usual.objective)
    parser.add_argument("--lr", type=float, default=usual.learning_rate, help="peak learning rate")
    parser.add_argument(
        "--hidden-weight", type=float, default=usual.hidden_weight, help="of the hidden-state loss"
    )
    parser.add_argument("--seed", type=int, default=usual.seed, help="of the order of the text")
    chosen = parser.parse_args(arguments)
    steps = chosen.steps if chosen.tokens is None else chosen.tokens // (4 * WINDOW_TOKENS)
    return Settings(chosen.out, steps, chosen.objective, chosen.lr, chosen.hidden_weight, chosen.seed)


def main() -> None:
    settings = parse()
    outcome = run(settings)
    found = shortfalls(outcome)
    print_table(outcome)
    write_report(outcome, settings.out, found)
    print(f"report: {settings.out / 'report.html'}   student: {settings.out / 'student'}")
    if found:
        sys.exit("demo: " + "\n      ".join(found))


if __name__ == "__main__":
    main()
