"""A plan as text: totals, one row a sub-block, equation (9) a layer; layers that repeat are told once."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from fxskip.planning.fold import Fold, fold
from fxskip.planning.plan import Plan, PlannedBlock
from fxskip.planning.window import LayerWindow
from fxskip.planning.words import (
    averaged,
    deployed,
    mflop,
    milliseconds,
    short,
    span,
    transfer_words,
    verdict,
    whole,
)

WIDTH = 150
_WINDOW = (
    "window: T_dispatch + T_combine <= T_layer - (T_routed + T_gate), equation (9) of the FarSkip paper; "
    "estimated us on one rank"
)


def text(plan: Plan) -> str:
    """Title, totals, tables and legend; the same text in every run."""
    folds = fold(plan)
    parts = [_title(plan), *_totals(plan), "", *_printed(_table(plan, folds))]
    if plan.layers:
        parts += ["", _WINDOW, *_printed(_window_table(plan, folds))]
    return "\n".join([*parts, "", _legend(plan)])


def _printed(table: Table) -> list[str]:
    console = Console(width=WIDTH, color_system=None, force_terminal=False)
    with console.capture() as capture:
        console.print(table)
    return [line.rstrip() for line in capture.get().splitlines()]


def _title(plan: Plan) -> str:
    streams = "1 stream" if plan.streams == 1 else f"{plan.streams} streams"
    return (
        f"{plan.model} under {plan.spec}: {plan.rewired} of {len(plan.blocks)} sub-blocks rewired, "
        f"{streams} between layers, wiring {plan.wiring_hash[:12]}"
    )


def _totals(plan: Plan) -> list[str]:
    outside, forward = short(plan.outside_parameters, ""), plan.forward
    flops = f"{short(plan.flops_per_token, 'FLOP')} a token, head included"
    if plan.head_parameters is None:
        flops = f"{short(plan.block_flops_per_token, 'FLOP')} a token in sub-blocks; the head is unknown"
    lines = [
        f"parameters  {short(plan.parameters, '', 4)}, of which {outside} outside of sub-blocks; "
        f"{short(plan.active_parameters, '', 4)} active for a token",
        f"forward     {flops}",
        f"estimated   {deployed(plan.deployment)}",
        f"            one forward pass: {milliseconds(forward.compute_us)} of compute",
    ]
    if forward.communication_us != 0:
        before, after = milliseconds(forward.exposed_before_us), milliseconds(forward.exposed_after_us)
        lines[-1] += (
            f", {milliseconds(forward.communication_us)} of communication, of which nothing can hide "
            f"{before} before and {after} after"
        )
    if plan.gradients is not None:
        lines.append(f"            {averaged(plan.gradients)}")
    return lines


def _table(plan: Plan, folds: list[Fold]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="")
    for name in ("layer", "kind", "module"):
        table.add_column(name, no_wrap=True)  # other columns give way
    table.add_column("reads", max_width=34)
    for name in ("params", "MFLOP/token", "weights", "activ.", "est. us"):
        table.add_column(name, justify="right")
    table.add_column("a rank sends, beside", max_width=44)
    for found in folds:
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
        short(block.costs.parameters, ""),
        mflop(block.costs),
        short(block.weight_bytes, "B"),
        short(block.activation_bytes, "B"),
        whole(block.est_us),
        "; ".join(transfer_words(block)) or "-",
    )


def _repeats(found: Fold) -> str:
    rest = range(found.drawn_layers.stop, found.layers.stop)
    like = found.drawn_layers[-found.period :]
    return f"{span(rest)}: as {span(like)}" + (" in turn" if found.period > 1 else "")


def _window_table(plan: Plan, folds: list[Fold]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="")
    table.add_column("layer")
    for name in ("dispatch", "combine", "layer", "routed", "gate"):
        table.add_column(name, justify="right")
    for name in ("left side", "right side"):
        table.add_column(name, justify="right")
    table.add_column("verdict")
    table.add_column("exposed before", justify="right")
    table.add_column("exposed after", justify="right")
    rows = {row.layer: row for row in plan.layers}
    for found in folds:
        for layer in found.drawn_layers:
            if layer in rows:
                _add_window(table, rows[layer])
        if found.times > found.drawn and rows.keys() & set(found.layers):
            table.add_row("...", *[""] * 7, _repeats(found))
    return table


def _add_window(table: Table, row: LayerWindow) -> None:
    numbers = (row.dispatch_us, row.combine_us, row.layer_us, row.routed_us, row.gate_us)
    sides = (row.exchange_us, row.room_us)
    table.add_row(
        str(row.layer),
        *map(whole, (*numbers, *sides)),
        verdict(row),
        *map(whole, (row.exposed_before_us, row.exposed_after_us)),
    )


def _legend(plan: Plan) -> str:
    lines = [
        "FLOPs and bytes are counted from shapes, forward only, attention causal; weights and activ(ations) are what",
        "one rank reads and writes. Times are estimated from them by a roofline, all experts equally loaded, without",
        "contention; nothing was timed. beside: what does not have to wait for it; a MoE's shared experts never do.",
    ]
    if plan.layers:
        lines.append(
            "exposed: what no compute can hide, each piece of compute used once; before: in the original wiring."
        )
    if plan.forward.compute_us is None:
        lines.append("unknown: the graph does not show it, or it depends on something that it does not show.")
    return "\n".join(lines)
