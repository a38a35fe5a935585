"""Triton kernels of the index work of routed experts: a stable counting sort, and rows gathered, weighed and added.

    count_blocks    how many pairs of each block each expert has
    place_pairs     the row of each pair, from the running sums of those counts
    order_runs      the same for rows that arrived as runs, [rank][expert], which are sorted already
    gather_rows     a row of the source for each row of the target
    add_choices     the rows of a token, weighed or not, added in the order of its choices
    weigh_back      gradients of the rows and of the weights of `add_choices`

No kernel uses atomic additions whose order would show: the histogram of a block adds whole numbers. Sizes are
compile-time constants where a loop needs them; those that change from step to step are not specialised, or each
step would compile. Each program of the last three has one row, token or pair.
"""

# T tokens, K choices of each, R rows, D width, E experts

import triton
import triton.language as tl


# Debug mode keeps the assertion, which says of an index that is no expert what PyTorch's scatter would.
@triton.jit(debug=True, do_not_specialize=["pairs", "blocks"])
def count_blocks(
    index_ptr, table_ptr, pairs, blocks,
    E: tl.constexpr, BINS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """table[e, b]: how many of the pairs of block b are for expert e."""
    block = tl.program_id(0)
    at = block * BLOCK + tl.arange(0, BLOCK)
    inside = at < pairs
    experts = tl.load(index_ptr + at, mask=inside, other=0)
    tl.device_assert((experts >= 0) & (experts < E), "an index of routed experts is no expert")
    counts = tl.histogram(experts.to(tl.int32), BINS, mask=inside)
    bins = tl.arange(0, BINS)
    tl.store(table_ptr + bins * blocks + block, counts, mask=bins < E)


@triton.jit(do_not_specialize=["pairs", "blocks"])
def place_pairs(
    index_ptr, ends_ptr, pair_of_row_ptr, row_of_pair_ptr, counts_ptr, pairs, blocks,
    E: tl.constexpr, BINS: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """A pair's row: after all pairs of earlier experts, those of its expert in earlier blocks, and those in its own.

    ends   running sums of `count_blocks`' table, each with its own entry
    """
    block = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    at = block * BLOCK + lane
    inside = at < pairs
    expert = tl.load(index_ptr + at, mask=inside, other=0).to(tl.int32)
    row = tl.zeros([BLOCK], tl.int32)
    for start in range(0, BLOCK, STEP):
        other = start + tl.arange(0, STEP)
        others = tl.load(index_ptr + block * BLOCK + other, mask=block * BLOCK + other < pairs, other=-1)
        is_before = (others.to(tl.int32)[None, :] == expert[:, None]) & (other[None, :] < lane[:, None])
        row += tl.sum(is_before.to(tl.int32), 1)
    slot = expert * blocks + block
    row += tl.load(ends_ptr + slot - 1, mask=inside & (slot > 0), other=0)
    tl.store(row_of_pair_ptr + at, row.to(tl.int64), mask=inside)
    tl.store(pair_of_row_ptr + row, at.to(tl.int64), mask=inside)
    if block == 0:
        bins = tl.arange(0, BINS)
        end = tl.load(ends_ptr + (bins + 1) * blocks - 1, mask=bins < E, other=0)
        begin = tl.load(ends_ptr + bins * blocks - 1, mask=(bins > 0) & (bins < E), other=0)
        tl.store(counts_ptr + bins, (end - begin).to(tl.int64), mask=bins < E)


@triton.jit(do_not_specialize=["stride"])
def order_runs(
    table_ptr, stride, from_ptr, to_ptr, ends_ptr,
    RANKS: tl.constexpr, E: tl.constexpr, RUNS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Rows lie as runs [rank][expert] and shall lie as [expert][rank]. A program writes every n-th block of one run.

    table   [RANKS, E] rows of each run
    from    where a row of the new order was;  to   where a row goes;  ends   [E] where each expert's rows end
    RUNS    RANKS E, or the next power of two
    """
    run, part = tl.program_id(0), tl.program_id(1)
    rank, expert = run // E, run % E
    runs = tl.arange(0, RUNS)
    ranks, experts = runs // E, runs % E
    lengths = tl.load(table_ptr + ranks * stride + experts, mask=runs < RANKS * E, other=0)
    old = tl.sum(tl.where(runs < run, lengths, 0), 0)
    new = tl.sum(tl.where((experts < expert) | ((experts == expert) & (ranks < rank)), lengths, 0), 0)
    length = tl.sum(tl.where(runs == run, lengths, 0), 0)
    if (rank == RANKS - 1) & (part == 0):
        tl.store(ends_ptr + expert, (new + length).to(tl.int32))
    start = part * BLOCK
    while start < length:
        at = start + tl.arange(0, BLOCK)
        tl.store(from_ptr + new + at, old + at, mask=at < length)
        tl.store(to_ptr + old + at, new + at, mask=at < length)
        start += tl.num_programs(1) * BLOCK


@triton.jit
def gather_rows(
    source_ptr, pair_of_row_ptr, target_ptr, K: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr
):
    """target[r] = source[token of the pair in row r]"""
    row = tl.program_id(0).to(tl.int64)
    token = tl.load(pair_of_row_ptr + row) // K
    for start in range(0, D, BLOCK):
        column = start + tl.arange(0, BLOCK)
        values = tl.load(source_ptr + token * D + column, mask=column < D)
        tl.store(target_ptr + row * D + column, values, mask=column < D)


@triton.jit
def add_choices(
    rows_ptr, row_of_pair_ptr, weights_ptr, target_ptr,
    K: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr,
    IS_WEIGHED: tl.constexpr, PRODUCT: tl.constexpr, SUM: tl.constexpr,
):  # fmt: skip
    """target[t] = the sum of a token's rows, each times its weight; a pair without a row adds nothing.

    Products are rounded to PRODUCT, sums are taken in SUM.
    """
    token = tl.program_id(0).to(tl.int64)
    for start in range(0, D, BLOCK):
        column = start + tl.arange(0, BLOCK)
        total = tl.zeros([BLOCK], SUM)
        for choice in range(K):
            row = tl.load(row_of_pair_ptr + token * K + choice)
            value = tl.load(rows_ptr + row * D + column, mask=(column < D) & (row >= 0), other=0.0).to(SUM)
            if IS_WEIGHED:
                weight = tl.load(weights_ptr + token * K + choice).to(SUM)
                value = (value * weight).to(PRODUCT).to(SUM)
            total += value
        tl.store(target_ptr + token * D + column, total.to(target_ptr.dtype.element_ty), mask=column < D)


@triton.jit
def weigh_back(
    gradient_ptr, rows_ptr, row_of_pair_ptr, weights_ptr, d_rows_ptr, d_weights_ptr,
    K: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr,
    FOR_ROWS: tl.constexpr, FOR_WEIGHTS: tl.constexpr, PRODUCT: tl.constexpr, SUM: tl.constexpr,
):  # fmt: skip
    """d rows[r] = weight * gradient[t], d weight = rows[r] . gradient[t], of the pair that the program has."""
    pair = tl.program_id(0).to(tl.int64)
    token = pair // K
    row = tl.load(row_of_pair_ptr + pair)
    dot = tl.zeros([BLOCK], SUM)
    for start in range(0, D, BLOCK):
        column = start + tl.arange(0, BLOCK)
        is_there = (column < D) & (row >= 0)
        gradient = tl.load(gradient_ptr + token * D + column, mask=is_there, other=0.0).to(SUM)
        if FOR_ROWS:
            weight = tl.load(weights_ptr + pair).to(SUM)
            product = (gradient * weight).to(PRODUCT)
            tl.store(d_rows_ptr + row * D + column, product.to(d_rows_ptr.dtype.element_ty), mask=is_there)
        if FOR_WEIGHTS:
            value = tl.load(rows_ptr + row * D + column, mask=is_there, other=0.0).to(SUM)
            dot += (gradient * value).to(PRODUCT).to(SUM)
    if FOR_WEIGHTS:
        tl.store(d_weights_ptr + pair, tl.sum(dot, 0).to(d_weights_ptr.dtype.element_ty))
