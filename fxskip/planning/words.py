"""How page and text say things: names, numbers with units, what is not known."""

from __future__ import annotations

from collections.abc import Sequence

from fxskip import wiring
from fxskip.planning.gradients import GradientCosts
from fxskip.planning.plan import Plan, PlannedBlock
from fxskip.planning.window import LayerWindow
from fxskip.schedule.costs import Costs
from fxskip.schedule.roofline import Deployment

UNKNOWN = "unknown"
KINDS = {"moe": "MoE", "dense": "dense MLP"}
ADDENDS = {"routed": "routed experts", "shared": "shared experts"}


def kind(block: PlannedBlock) -> str:
    return KINDS.get(block.kind, block.kind)


def mflop(costs: Costs) -> str:
    """12345678 FLOPs a token as "12.35"; where those of some parts are not known, "12.35 + unknown"."""
    known = [part.flops_per_token for part in costs.parts if part.flops_per_token is not None]
    if not known:
        return UNKNOWN
    return f"{sum(known) / 1e6:,.2f}" + ("" if len(known) == len(costs.parts) else f" + {UNKNOWN}")


def whole(number: float | None, separator: str = "") -> str:
    """1234.6 as "1235", or "1,235" with a comma as separator."""
    return UNKNOWN if number is None else f"{number:{separator}.0f}"


def back(dropped: str) -> tuple[str, int]:
    """`routed@1` as ("routed", 1): the addend, and how many writes before the block it was made."""
    name, _, number = dropped.rpartition("@")
    return name, int(number)


def unseen(plan: Plan, number: int) -> list[str]:
    """What the sub-block at position `number` no longer sees, one phrase for each earlier sub-block."""
    block = plan.blocks[number]
    by_source: dict[int, list[str]] = {}
    for dropped in block.without:
        name, writes = back(dropped)
        by_source.setdefault(number - writes, []).append(name)
    return [
        f"{_output(plan.blocks[source], names)} of {_distance(block.layer - plan.blocks[source].layer)}"
        for source, names in sorted(by_source.items(), reverse=True)
    ]


def _output(source: PlannedBlock, names: Sequence[str]) -> str:
    if set(names) == set(source.adds):
        return kind(source)
    return " and ".join(ADDENDS.get(name, name) for name in sorted(names))


def _distance(layers: int) -> str:
    if layers < 2:
        return "the layer before" if layers else "the same layer"
    return f"the layer {layers} before"


def module_name(block: PlannedBlock) -> str:
    """`model.layers.3.mlp` as `mlp`: the path below the layer's number."""
    pieces = block.path.split(".")
    numbers = [i for i, piece in enumerate(pieces) if piece.isdigit()]
    return ".".join(pieces[numbers[0] + 1 :]) if numbers else block.path


def short_path(block_path: str) -> str:
    """`model.layers.3.mlp` as `3.mlp`."""
    pieces = block_path.split(".")
    start = next((i for i, piece in enumerate(pieces) if piece.isdigit()), 0)
    return ".".join(pieces[start:])


def span(layers: Sequence[int]) -> str:
    """[0, 1, 2, 5] as "layers 0–2, 5"."""
    return f"layer{'s' if len(layers) > 1 else ''} {wiring.span(layers, dash='–')}"


def short(number: float | None, unit: str, digits: int = 3) -> str:
    """12345678 as "12.3 M"."""
    if number is None:
        return UNKNOWN
    for factor, letter in ((1e12, "T"), (1e9, "G" if unit else "B"), (1e6, "M"), (1e3, "k")):
        if number >= 0.9995 * factor:  # so that 999,999 is 1 M and not 1e+03 k
            return f"{number / factor:#.{digits}g}".rstrip(".") + f" {letter}{unit}"
    return f"{number:.{digits}g} {unit}".strip()


def milliseconds(us: float | None) -> str:
    """1234567 as "1235 ms"."""
    if us is None:
        return UNKNOWN
    return f"{us / 1e3:.{1 if us < 1e5 else 0}f} ms"


def deployed(deployment: Deployment) -> str:
    """What estimates are for, in one line."""
    d = deployment
    assumed = " (assumed: one domain)" if d.assumed else ""
    exchange = f" ({d.exchange})" if d.exchange == "all_reduce" else ""
    instead = f" (there is no figure for {d.instead_of})" if d.instead_of else ""
    exchange += " (a token goes once to each domain)" if d.copies_per == "domain" else ""
    return (
        f"{d.hardware.name}, {d.dtype}{instead}, {d.tokens} tokens a rank, sequences of {d.context}, "
        f"experts over {d.expert} ranks{exchange}{assumed}, other matrices over {d.tensor}"
    )


def averaged(gradients: GradientCosts) -> str:
    """What is averaged in the backward pass, and beside what."""
    return (
        f"one backward pass: {short(gradients.bytes, 'B')} of gradients averaged over {gradients.ranks} ranks, "
        f"{milliseconds(gradients.est_us)} beside {milliseconds(gradients.compute_us)} of compute"
    )


def transfer_words(block: PlannedBlock) -> list[str]:
    """One phrase for each collective of a sub-block: the bytes that a rank sends, and what can run meanwhile."""
    phrases = []
    for transfer in block.transfers:
        under = block.window.dispatch_under if transfer.name == "dispatch" else block.window.combine_under
        names = list(map(short_path, under))
        if block.kind == "moe" and transfer.name == "all-reduce":
            names = ["its routed experts"]
        beside = f" beside {', '.join(names)}" if names else ""
        phrases.append(f"{transfer.name} {short(transfer.bytes, 'B')}{beside}")
    return phrases


def verdict(row: LayerWindow) -> str:
    """Whether equation (9) holds for a layer."""
    if row.margin_us is None:
        return UNKNOWN
    return f"{'fits' if row.margin_us >= 0 else 'short'} by {abs(row.margin_us):.0f} us"
