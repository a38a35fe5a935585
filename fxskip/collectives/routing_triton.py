"""Launches the kernels of routing_kernels.py."""

# T tokens, K choices of each, R rows, D width, E experts

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fxskip.collectives import routing_kernels as kernels

DTYPES = {
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
    torch.float32: tl.float32,
    torch.float64: tl.float64,
}


Like = tuple[torch.Size, torch.dtype]
"""Shape and type of a tensor whose values are not kept."""


@dataclass(frozen=True)
class Tuning:
    """Launch parameters: `block` pairs a program of the sort, each compared with `step` at a time; `columns` of a row
    a load; `parts` programs a run of rows."""

    block: int = 256
    step: int = 32
    columns: int = 1024
    parts: int = 4
    warps: int = 4


def sort_pairs(index: Tensor, experts: int, tuning: Tuning = Tuning()) -> tuple[Tensor, Tensor, Tensor]:
    """Pair of each row, row of each pair, both [T K], and rows of each expert [E], all int64. Three kernels.

    index   [T, K] int32 or int64
    """
    index = index.contiguous()
    pairs = index.numel()
    blocks = triton.cdiv(pairs, tuning.block)
    table = torch.empty(experts, blocks, dtype=torch.int32, device=index.device)
    pair_of_row, row_of_pair = torch.empty(2, pairs, dtype=torch.int64, device=index.device).unbind()
    counts = torch.empty(experts, dtype=torch.int64, device=index.device)
    if pairs == 0:
        return pair_of_row, row_of_pair, counts.zero_()
    bins = {"E": experts, "BINS": triton.next_power_of_2(experts), "BLOCK": tuning.block}
    kernels.count_blocks[(blocks,)](index, table, pairs, blocks, **bins, num_warps=tuning.warps)
    ends = table.flatten().cumsum(0, dtype=torch.int32)
    kernels.place_pairs[(blocks,)](
        index, ends, pair_of_row, row_of_pair, counts, pairs, blocks,
        **bins, STEP=tuning.step, num_warps=tuning.warps,
    )  # fmt: skip
    return pair_of_row, row_of_pair, counts


def order_runs(lengths: Tensor, rows: int, tuning: Tuning = Tuning()) -> tuple[Tensor, Tensor, Tensor]:
    """Where each row of the order [expert][rank] was, where each goes, both [R] int64, and where each expert's rows
    end, [E] int32.

    lengths   [ranks, E] int64, rows of each run; their sum is `rows`
    """
    ranks, experts = lengths.shape
    lengths = lengths if lengths.stride(1) == 1 else lengths.contiguous()
    came_from, goes_to = torch.empty(2, rows, dtype=torch.int64, device=lengths.device).unbind()
    ends = torch.empty(experts, dtype=torch.int32, device=lengths.device)
    kernels.order_runs[(ranks * experts, tuning.parts)](
        lengths, lengths.stride(0), came_from, goes_to, ends, RANKS=ranks, E=experts,
        RUNS=triton.next_power_of_2(ranks * experts), BLOCK=tuning.block, num_warps=tuning.warps,
    )  # fmt: skip
    return came_from, goes_to, ends


def gather_rows(source: Tensor, pair_of_row: Tensor, choices: int, tuning: Tuning = Tuning()) -> Tensor:
    """[R, D]: for each row the token [D] of its pair."""
    rows, width = len(pair_of_row), source.shape[1]
    target = source.new_empty(rows, width)
    if target.numel():
        kernels.gather_rows[(rows,)](
            source.contiguous(), pair_of_row, target, K=choices, **_columns(width, tuning)
        )
    return target


def add_choices(
    rows: Tensor,
    row_of_pair: Tensor,
    weights: Tensor | None,
    choices: int,
    dtype: torch.dtype,
    tuning: Tuning = Tuning(),
) -> Tensor:
    """[T, D] in `dtype`: the rows of each token, times the weights [T, K] if there are any, added in order."""
    tokens, width = len(row_of_pair) // choices, rows.shape[1]
    target = rows.new_empty(tokens, width, dtype=dtype)
    if target.numel():
        kernels.add_choices[(tokens,)](
            rows.contiguous(), row_of_pair, _or(weights, rows).contiguous(), target,
            K=choices, IS_WEIGHED=weights is not None, **_types(rows.dtype, _or(weights, rows).dtype),
            **_columns(width, tuning),
        )  # fmt: skip
    return target


def weigh_back(
    gradient: Tensor,
    rows: Tensor | None,
    row_of_pair: Tensor,
    weights: Tensor | None,
    rows_like: Like,
    weights_like: Like,
    tuning: Tuning = Tuning(),
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of the rows (needs `weights`) and of the weights (needs `rows`); None for one that is not asked for.

    gradient       [T, D]
    rows_like      [R, D] and weights_like [T, K], with their types: of the two whether or not they are there
    """
    shape, dtype = weights_like
    d_rows = None if weights is None else gradient.new_empty(rows_like[0], dtype=rows_like[1])
    d_weights = None if rows is None else gradient.new_empty(shape, dtype=dtype)
    if shape.numel() == 0:
        return d_rows, d_weights
    kernels.weigh_back[(shape.numel(),)](
        gradient.contiguous(), _or(rows, gradient).contiguous(), row_of_pair, _or(weights, gradient).contiguous(),
        _or(d_rows, gradient), _or(d_weights, gradient), K=shape[1], FOR_ROWS=d_rows is not None,
        FOR_WEIGHTS=d_weights is not None, **_types(rows_like[1], dtype), **_columns(gradient.shape[1], tuning),
    )  # fmt: skip
    return d_rows, d_weights


def _or(tensor: Tensor | None, other: Tensor) -> Tensor:
    """A pointer for the kernel, which leaves it alone where there is no tensor."""
    return other if tensor is None else tensor


def _types(rows: torch.dtype, weights: torch.dtype) -> dict[str, Any]:
    """What products are rounded to, as PyTorch would, and what sums are taken in."""
    product = torch.promote_types(rows, weights)
    is_wide = product == torch.float64
    # Product and sum are not fused into one rounding: a GPU gives the bits of the reference then.
    return {
        "PRODUCT": DTYPES[product],
        "SUM": tl.float64 if is_wide else tl.float32,
        "enable_fp_fusion": False,
    }


def _columns(width: int, tuning: Tuning) -> dict[str, Any]:
    return {
        "D": width,
        "BLOCK": min(tuning.columns, int(triton.next_power_of_2(width))),
        "num_warps": tuning.warps,
    }
