"""The goals of the loss: time against the bare matrix products, memory, errors."""

from collections.abc import Mapping
from functools import partial
from itertools import product
from typing import Any

from fxskip.bench.goals import Goal, Report
from fxskip.bench.loss_errors import GRADIENT_BOUND
from fxskip.bench.loss_inputs import FLOOR, FOUR_FLOOR, HALF_MASKED, LEAN

# d hidden in bytes, and a hundredth for the few numbers that a loss keeps of a token.
SLOPE_MARGIN = 1.01


def value(part: str, name: str, key: str, report: Report) -> float | None:
    """Of the measurement of a variant; None if it has none."""
    found: Mapping[str, float] = report[part].get("times", {}).get("variants", {}).get(name, {})
    return found.get(key)


def time_ratio(part: str, name: str, base: str, report: Report) -> float | None:
    mine, other = (value(part, one, "median_ms", report) for one in (name, base))
    return None if mine is None or other is None else mine / other


def slope_ratio(small: str, large: str, name: str, report: Report) -> float | None:
    """Growth of the peak over tokens, in d hidden's bytes of a token."""
    peaks = [value(part, name, "peak_gib", report) for part in (small, large)]
    if peaks[0] is None or peaks[1] is None:
        return None
    times = [report[part]["times"] for part in (small, large)]
    tokens = times[1]["tokens"] - times[0]["tokens"]
    of_d_hidden: int = tokens * times[0]["bytes_of_a_state"]
    return (peaks[1] - peaks[0]) * 2**30 / of_d_hidden


def faster(part: str, name: str, base: str, bound: float) -> Goal:
    return Goal(f"{part}, {name}: time over {base}", (part,), partial(time_ratio, part, name, base), bound)


def smaller(part: str, name: str, bound: float) -> Goal:
    what = f"{part}, {name}: GiB above the inputs"
    return Goal(what, (part,), partial(value, part, name, "peak_gib"), bound, decimals=2)


def cases(report: Report) -> list[Mapping[str, Any]] | None:
    """Rows of the part `errors`; None where one has no result."""
    rows = report["errors"]
    return rows if isinstance(rows, list) and not any("failed" in row for row in rows) else None


def outside(report: Report) -> float | None:
    found = cases(report)
    return None if found is None else sum(not row["within_bounds"] for row in found)


def unequal(report: Report) -> float | None:
    found = cases(report)
    return None if found is None else sum(not row.get("equal_bits", True) for row in found)


def most_chunks(report: Report) -> float | None:
    found = cases(report)
    if found is None:
        return None
    errors: list[float] = [error for row in found for error in row.get("by_chunks", {}).values()]
    return max(errors)


ONE_GPU: list[Goal] = [
    Goal("errors: cases further from float64 than allowed", ("errors",), outside, 0),
    Goal("errors: cases whose second run has other bits", ("errors",), unequal, 0),
    Goal("errors: d weight over up to 512 chunks", ("errors",), most_chunks, GRADIENT_BOUND),
    faster("v65536-32k", "sparse_kl", FLOOR, 1.05),
    smaller("v65536-32k", "sparse_kl", 2.25),
    faster("v65536-32k", LEAN, FLOOR, 1.08),
    smaller("v65536-32k", LEAN, 1.75),
    faster("v65536-32k", HALF_MASKED, "sparse_kl", 0.55),
    faster("v131072-32k", "sparse_kl", FLOOR, 1.06),
    faster("v131072-256k", "sparse_kl", FLOOR, 1.06),
    Goal(
        "v131072: bytes a token, 64K to 256K tokens, over those of d hidden",
        ("v131072-64k", "v131072-256k"),
        partial(slope_ratio, "v131072-64k", "v131072-256k", "sparse_kl"),
        SLOPE_MARGIN,
    ),
    faster("v32000-4k", "sparse_kl", "dense_sparse_kl", 1.0),
    faster("online-v131072-32k", "hidden_kl", FOUR_FLOOR, 1.10),
]


def row_value(tokens: int, name: str, key: str, report: Report) -> float | None:
    rows = [row for row in report["rows"] if (row["tokens"], row["variant"]) == (tokens, name)]
    found: Mapping[str, float] = rows[0] if rows else {}
    return found.get(key)


def two_ranks() -> list[Goal]:
    """Of V=131072 over two GPUs. They need the rows of a number of tokens; a rank's memory includes its inputs."""
    bounds = {
        "iterations_a_second": {32768: 10.0, 262144: 1.25},
        "gib_with_inputs": {32768: 3.2, 262144: 7.0},
    }
    return [
        Goal(
            f"{tokens // 1024}K tokens, two ranks, sparse_kl: {key.replace('_', ' ')}",
            (str(tokens),),
            partial(row_value, tokens, "sparse_kl", key),
            bounds[key][tokens],
            at_least=key == "iterations_a_second",
        )
        for key, tokens in product(bounds, (32768, 262144))
    ]
