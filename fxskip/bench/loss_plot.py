"""The figure of `fxskip bench loss --ranks`: tokens a second and memory by number of tokens."""

import json
from pathlib import Path
from typing import Any

from fxskip.bench.loss_inputs import FLOOR
from fxskip.errors import FxskipError

SAME = ("vocabulary", "ranks", "gpu", "width", "dtype")  # what reports of one figure have in common


def plot(reports: list[Path], out: Path) -> None:
    """Draws the rows of `reports`, of one machine, into `out`, whose ending names the format (.svg, .png, .pdf)."""
    from matplotlib.figure import Figure

    contents = [read(report) for report in reports]
    machines = {tuple(found.get(key) for key in SAME) for found in contents}
    if len(machines) > 1:
        raise FxskipError(
            "bench plot",
            f"the reports are not of one machine and vocabulary: {sorted(map(str, machines))}",
            hint="draw each by itself",
        )
    measured = [row for found in contents for row in found["rows"] if "median_ms" in row]
    measured.sort(key=lambda row: row["tokens"])
    figure = Figure(figsize=(10, 4), layout="constrained")
    speed, memory = figure.subplots(1, 2)
    for variant in dict.fromkeys(row["variant"] for row in measured):
        # A variant that ran out of memory ends where it did.
        rows = [row for row in measured if row["variant"] == variant]
        tokens = [row["tokens"] / 1024 for row in rows]
        speeds = [row["tokens"] / row["median_ms"] for row in rows]
        (line,) = speed.plot(tokens, speeds, marker="o", label=variant)
        # The floor has all its memory before it starts; without a GPU there is none to know.
        if variant != FLOOR and all(row["peak_gib"] is not None for row in rows):
            memory.plot(tokens, [row["peak_gib"] for row in rows], marker="o", color=line.get_color())
    for axes in (speed, memory):
        axes.set_xlabel("tokens of the batch / 1024")
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter("{x:.0f}")
        axes.grid(visible=True, alpha=0.3)
    speed.set_ylabel("thousand tokens a second")
    speed.set_ylim(bottom=0)
    memory.set_ylabel("peak above the inputs, GiB a rank")
    memory.set_yscale("log", base=2)
    memory.yaxis.set_major_formatter("{x:.0f}")
    speed.legend(fontsize="small")
    figure.suptitle(title(contents[0]))
    figure.savefig(out)


def read(report: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(report.read_text())
    if "rows" not in found:
        raise FxskipError(
            "bench plot",
            f"{report} has no rows over tokens",
            hint="it must be from fxskip bench loss --ranks 2",
        )
    if not any("median_ms" in row for row in found["rows"]):
        raise FxskipError(
            "bench plot",
            f"{report}: none of its {len(found['rows'])} rows has a measurement",
            hint="the rows say why; measure again with fxskip bench loss --ranks 2",
        )
    return found


def title(found: dict[str, Any]) -> str:
    parts = [f"V={found['vocabulary']} over {found['ranks']} x {found.get('gpu', 'CPU')}"]
    parts += [f"d={found['width']}"] if "width" in found else []
    parts += [found["dtype"]] if "dtype" in found else []
    parts += ["tiny: times mean nothing"] if found.get("tiny") else []
    return ", ".join(parts)
