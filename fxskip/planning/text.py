"""A plan as text: one row a sub-block; layers that repeat are told once."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from fxskip.planning.fold import Fold, fold
from fxskip.planning.plan import Plan, PlannedBlock, Window
from fxskip.planning.words import mflop, short_path, span
from fxskip.schedule.costs import CONTEXT

WIDTH = 140


def text(plan: Plan) -> str:
    """Title, table and legend; the same text in every run."""
    console = Console(width=WIDTH, color_system=None, force_terminal=False)
    with console.capture() as capture:
        console.print(_table(plan))
    lines = [_title(plan), *(line.rstrip() for line in capture.get().splitlines()), _legend()]
    return "\n".join(lines)


def _title(plan: Plan) -> str:
    streams = "1 stream" if plan.streams == 1 else f"{plan.streams} streams"
    return (
        f"{plan.model} under {plan.spec}: {plan.rewired} of {len(plan.blocks)} sub-blocks rewired, "
        f"{streams} between layers, wiring {plan.wiring_hash[:12]}"
    )


def _table(plan: Plan) -> Table:
    table = Table(box=None, pad_edge=False, header_style="")
    for name in ("layer", "kind", "module"):
        table.add_column(name)
    table.add_column("reads", max_width=44)
    for name in ("params", "MFLOP/token"):
        table.add_column(name, justify="right")
    table.add_column("can run beside its communication", max_width=46)
    for found in fold(plan):
        for block in plan.blocks:
            if block.layer in found.drawn_layers:
                _add_row(table, block)
        if found.times > found.drawn:
            table.add_row("...", "", _repeats(found))
    return table


def _add_row(table: Table, block: PlannedBlock) -> None:
    table.add_row(
        str(block.layer),
        block.kind,
        block.path,
        f"{block.reads} ({block.refused})" if block.refused else block.reads,
        f"{block.costs.parameters / 1e6:.2f} M",
        mflop(block.costs.flops_per_token),
        _window(block.window, sends_tokens=block.kind == "moe"),
    )


def _repeats(found: Fold) -> str:
    rest = range(found.drawn_layers.stop, found.layers.stop)
    like = found.drawn_layers[-found.period :]
    return f"{span(rest)}: as {span(like)}" + (" in turn" if found.period > 1 else "")


def _window(window: Window, *, sends_tokens: bool) -> str:
    parts = []
    if sends_tokens and window.dispatch_under:
        parts.append(f"dispatch: {', '.join(map(short_path, window.dispatch_under))}")
    if window.combine_under:
        name = "combine" if sends_tokens else "all-reduce"
        parts.append(f"{name}: {', '.join(map(short_path, window.combine_under))}")
    return "; ".join(parts) or "-"


def _legend() -> str:
    return (
        f"FLOPs are counted from shapes, forward only, attention at {CONTEXT} tokens of causal context; not timed.\n"
        "dispatch, combine: a MoE block's tokens on their way to the experts and back, under expert parallelism;\n"
        "all-reduce: the end of a block under tensor parallelism. Named is what does not have to wait for it."
    )
