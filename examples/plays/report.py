"""What a run of the demo found: a table on the terminal, a page, and a file for scripts."""

from __future__ import annotations

import base64
import json
import math
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from yardstick import Figures

from fxskip.distill import DistillConfig, Result
from fxskip.distill.result import hardware, versions
from fxskip.planning import Plan, document, element, legend, wiring_section

NAMES = {
    "original": "original",
    "rewired": "rewired, untrained",
    "distilled": "rewired, distilled",
}
COLUMNS = ("", "cross-entropy", "KL to the original", "top-1 agreement", "CE gap closed", "KL gap closed")


@dataclass(frozen=True)
class Outcome:
    """`figures` and `samples` are those of original, rewired and distilled."""

    plan: Plan
    config: DistillConfig
    figures: dict[str, Figures]
    samples: dict[str, str]
    distillation: Result
    reloads_alike: bool
    seconds: float

    @property
    def kl_closed(self) -> float:
        """Part of the KL that the rewiring cost and the distillation gave back."""
        return closed(self.figures["distilled"].kl, self.figures["rewired"].kl, 0.0)

    @property
    def cross_entropy_closed(self) -> float:
        found = [self.figures[name].cross_entropy for name in ("distilled", "rewired", "original")]
        return closed(*found)


def closed(now: float, worst: float, best: float) -> float:
    """1 where `now` is as good as `best`, 0 where it is still `worst`; NaN where there was nothing to close."""
    return (worst - now) / (worst - best) if worst > best else math.nan


def print_table(outcome: Outcome) -> None:
    """The figures as one table, then what each model writes."""
    console = Console(width=None if Console().is_terminal else 110, highlight=False)
    table = Table(title="The whole held-out text, nats a token", title_justify="left")
    for column in COLUMNS:
        table.add_column(column, justify="left" if not column else "right")
    for row in rows(outcome):
        table.add_row(*row)
    console.print(table)
    for name, text in outcome.samples.items():
        console.print(f"\n{NAMES[name]}:", style="bold")
        console.print(Padding(text, (0, 4)), markup=False)
    console.print()


def rows(outcome: Outcome) -> list[tuple[str, ...]]:
    """The cells of the table, one row a model."""
    gaps = {"distilled": (f"{100 * outcome.cross_entropy_closed:.1f} %", f"{100 * outcome.kl_closed:.1f} %")}
    return [
        (
            NAMES[name],
            f"{figures.cross_entropy:.4f}",
            f"{figures.kl:.4f}",
            f"{100 * figures.agreement:.1f} %",
            *gaps.get(name, ("", "")),
        )
        for name, figures in outcome.figures.items()
    ]


def write_report(outcome: Outcome, folder: Path, shortfalls: Sequence[str]) -> None:
    """`report.html`, which needs no other file, and `results.json`."""
    (folder / "report.html").write_text(page(outcome, folder, shortfalls), encoding="utf-8")
    facts = {
        "passed": not shortfalls,
        "shortfalls": list(shortfalls),
        "figures": {name: asdict(figures) for name, figures in outcome.figures.items()},
        "kl_closed": outcome.kl_closed,
        "cross_entropy_closed": outcome.cross_entropy_closed,
        "reloads_alike": outcome.reloads_alike,
        "samples": outcome.samples,
        "config": outcome.config.model_dump(mode="json"),
        "tokens": outcome.distillation.tokens,
        "seconds": {"all": outcome.seconds, "distillation": outcome.distillation.wall_seconds},
        "wiring_hash": outcome.plan.wiring_hash,
        "machine": hardware(torch.device("cpu")),
        "versions": versions(),
    }
    (folder / "results.json").write_text(json.dumps(facts, indent=2), encoding="utf-8")


def page(outcome: Outcome, folder: Path, shortfalls: Sequence[str]) -> str:
    verdict = "Not good enough: " + "; ".join(shortfalls) + "." if shortfalls else (
        f"Rewired with {outcome.plan.spec}, the model lost some of its quality. {outcome.distillation.tokens:,} tokens "
        f"of distillation gave back {outcome.kl_closed:.0%} of the KL and {outcome.cross_entropy_closed:.0%} of the "
        "cross-entropy. The saved student gives the same logits in a new process, to the last bit."
    )  # fmt: skip
    return document(
        "The demo: a small DeepSeek-V3 on plays",
        element("h1", "A small DeepSeek-V3, rewired and distilled"),
        element("p", verdict, class_="lead"),
        element("section", element("h2", "Held-out text"), figures_table(outcome)),
        element("section", element("h2", "What the models write"), *samples(outcome)),
        wiring_section(outcome.plan),
        element("section", element("h2", "Training"), curves(folder / "distill" / "curves.png")),
        element("section", element("h2", "Conditions"), conditions(outcome)),
    )


def figures_table(outcome: Outcome) -> ET.Element:
    head = [element("th", name, scope="col", class_="number" if name else "name") for name in COLUMNS]
    body = [
        element("tr", *(cell(name, text) for name, text in zip(COLUMNS, row, strict=True)))
        for row in rows(outcome)
    ]
    caption = element(
        "caption",
        "Three plays and a book that no model was trained on; cross-entropy and KL in nats a token. Top-1 agreement "
        "is how often the model prefers the token that the original prefers.",
    )
    return element("table", caption, element("thead", element("tr", *head)), element("tbody", *body))


def cell(column: str, text: str) -> ET.Element:
    return element("td", text, class_="number" if column else "name", data_name=column)


def samples(outcome: Outcome) -> list[ET.Element]:
    return [
        element("figure", element("figcaption", NAMES[name]), element("pre", text))
        for name, text in outcome.samples.items()
    ]


def curves(picture: Path) -> ET.Element:
    data = base64.b64encode(picture.read_bytes()).decode()
    what = (
        "Curves over the optimizer steps: the training loss, and the metrics on a small part of the val split"
    )
    return element("img", src=f"data:image/png;base64,{data}", alt=what)


def conditions(outcome: Outcome) -> ET.Element:
    config, machine = outcome.config, hardware(torch.device("cpu"))
    facts = {
        "Recipe": f"{config.objective}, hidden-state weight {config.hidden_weight:g}, peak rate "
        f"{config.learning_rate:g}, {config.steps} steps of {config.batch_size} windows, seed {config.seed}",
        "Seconds": f"{outcome.seconds:.0f} in all, {outcome.distillation.wall_seconds:.0f} of them distillation",
        "Machine": ", ".join(f"{name} {value}" for name, value in machine.items()),
        "Versions": ", ".join(f"{name} {value}" for name, value in versions().items()),
        "Wiring": outcome.plan.wiring_hash,
    }
    return legend(facts)
