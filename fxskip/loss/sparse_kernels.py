"""Triton kernels of `sparse_kl`: from the logits of one chunk to its losses and, in place, to its gradient.

    take_support    each row's sums over the support; takes the support out of the row, puts its logits aside
    reduce_rows     one read of the rest of the row for its normaliser, a second one that writes the gradient

The support is taken out (set to -inf) because its sum and the rest's must be known apart: 1 - Q, the student's mass
off the support, is then a sum of its own and not a difference of two numbers near 1.

Names that end in 2 are base-2 logits, see row_kernels.py.
"""

# t rows of one chunk, V columns of this rank's vocabulary, K entries of a teacher row

import triton
import triton.language as tl

from fxskip.loss.row_kernels import LN_2, LOWEST, load2, row_sum2, slope, tempered2

TRUNCATED = tl.constexpr(0)
GHOST = tl.constexpr(1)
RENORMALISED = tl.constexpr(2)
SUBSET = tl.constexpr(3)

WHOLE = tl.constexpr(0)  # normaliser and gradient in one launch
SUMS = tl.constexpr(1)  # the normaliser of this rank's columns
GRADIENT = tl.constexpr(2)  # the gradient, from the normaliser of all ranks


@triton.jit
def log2_of_sum(a2, b2):
    """log2(2**a2 + 2**b2); one of them may be -inf."""
    top = tl.maximum(a2, b2)
    return top + tl.log2(tl.exp2(a2 - top) + tl.exp2(b2 - top))


@triton.jit
def coefficients(rest2, support2, cross, mass, TAIL: tl.constexpr):
    """Loss of a row and the numbers that its gradient is made of; see `tails.coefficients`."""
    all2 = log2_of_sum(rest2, support2)
    per_mass = tl.where(mass > 0.0, 1.0 / mass, 0.0)
    log_mass = tl.log(tl.where(mass > 0.0, mass, 1.0))
    if TAIL == TRUNCATED:
        return cross + mass * all2 * LN_2, all2, mass, all2, mass, mass * 0.0 + 1.0
    elif TAIL == RENORMALISED:
        loss = (cross + mass * all2 * LN_2) * per_mass - log_mass
        return loss, all2, mass * per_mass, all2, mass * per_mass, per_mass
    elif TAIL == SUBSET:
        known2 = tl.where(support2 > -float("inf"), support2, 0.0)
        loss = (cross + mass * known2 * LN_2) * per_mass - log_mass
        return loss, all2, mass * 0.0, known2, mass * per_mass, per_mass
    else:
        has_rest = rest2 > -float("inf")
        tail = tl.where(has_rest & (mass < 1.0), 1.0 - mass, 0.0)
        gap2 = tl.where(has_rest, rest2 - all2, 0.0)
        loss = cross + mass * all2 * LN_2
        loss += tl.where(tail > 0.0, tail * (tl.log(tl.where(tail > 0.0, tail, 1.0)) - gap2 * LN_2), 0.0)
        rest_factor = (mass + tail) * tl.exp2(gap2) - tail
        return loss, tl.where(has_rest, rest2, all2), rest_factor, all2, mass + tail, mass * 0.0 + 1.0


@triton.jit
def take_support(
    z_ptr, stride_z, bias_ptr, ids_ptr, logp_ptr, counts_ptr, taken2_ptr, merged_ptr, sums_ptr,
    first_column, K, scale, softcap, per_temperature,
    V: tl.constexpr, CAPACITY: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_J: tl.constexpr,
    COMPARE: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_COUNTS: tl.constexpr,
):  # fmt: skip
    """One program a row. Writes taken2 [t, K], merged [t, K] (-1 where there is nothing to do) and sums [t, 3]:
    log2 of the support's sum, sum p (log p - logit) over this rank's columns, and sum p over all.

    CAPACITY is K rounded up, so that few values of K need a compilation of their own. Without COMPARE no id comes
    twice in a row, but for -1, which is nothing; with it every entry is compared with every other, K * K of them.
    """
    row = tl.program_id(0).to(tl.int64)
    z_row = z_ptr + row * stride_z
    count = K
    if HAS_COUNTS:
        count = tl.load(counts_ptr + row)
    mass = 0.0
    cross = 0.0
    top2 = LOWEST
    total = 0.0
    for start in range(0, CAPACITY, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        given = (k < count) & (k < K)
        ids = tl.load(ids_ptr + row * K + k, mask=given, other=-1)
        p = tl.exp(tl.load(logp_ptr + row * K + k, mask=given, other=-float("inf")).to(tl.float32))
        mass += tl.sum(p, 0)
        column = ids - first_column
        here = given & (column >= 0) & (column < V)
        if COMPARE:
            # Equal ids are one token: the first stands for all, with the sum of their probabilities. Compared in
            # narrow blocks, for registers; the loads of a row are as few as possible, for latency.
            merged = tl.zeros([BLOCK_K], tl.float32)
            earlier = tl.zeros([BLOCK_K], tl.int32)
            for other_start in range(0, CAPACITY, BLOCK_J):
                j = other_start + tl.arange(0, BLOCK_J)
                other_given = (j < count) & (j < K)
                others = tl.load(ids_ptr + row * K + j, mask=other_given, other=-1)
                other_p = tl.exp(
                    tl.load(logp_ptr + row * K + j, mask=other_given, other=-float("inf")).to(tl.float32)
                )
                same = ids[:, None].to(tl.int32) == others[None, :].to(tl.int32)
                merged += tl.sum(tl.where(same, other_p[None, :], 0.0), 1)
                earlier += tl.sum((same & (j[None, :] < k[:, None])).to(tl.int32), 1)
            first = here & (earlier == 0)
        else:
            merged = p
            first = here
        raw = tl.load(z_row + column, mask=first, other=0.0).to(tl.float32)
        bias = 0.0
        if HAS_BIAS:
            bias = tl.load(bias_ptr + column, mask=first, other=0.0).to(tl.float32)
        x2 = tempered2(raw, bias, scale, softcap, per_temperature, HAS_BIAS, HAS_SOFTCAP)
        log_merged = tl.log(tl.where(merged > 0.0, merged, 1.0))
        cross += tl.sum(tl.where(first & (merged > 0.0), merged * (log_merged - x2 * LN_2), 0.0), 0)
        first2 = tl.where(first, x2, -float("inf"))
        new_top2 = tl.maximum(top2, tl.max(first2, 0))
        total = total * tl.exp2(top2 - new_top2) + tl.sum(tl.exp2(first2 - new_top2), 0)
        top2 = new_top2
        tl.store(taken2_ptr + row * K + k, x2, mask=k < K)
        tl.store(merged_ptr + row * K + k, tl.where(first, merged, -1.0), mask=k < K)
    tl.store(sums_ptr + row * 3, top2 + tl.log2(total))
    tl.store(sums_ptr + row * 3 + 1, cross)
    tl.store(sums_ptr + row * 3 + 2, mass)
    tl.debug_barrier()  # every thread has read the logits before one overwrites them
    for start in range(0, CAPACITY, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        column = tl.load(ids_ptr + row * K + k, mask=(k < count) & (k < K), other=-1) - first_column
        nothing = tl.full([BLOCK_K], -float("inf"), tl.float32).to(z_ptr.dtype.element_ty)
        tl.store(z_row + column, nothing, mask=(k < count) & (k < K) & (column >= 0) & (column < V))


@triton.jit
def write_block(
    z_row, d_row, bias_ptr, start, factor, reference2, scale, softcap, per_temperature,
    V: tl.constexpr, BLOCK: tl.constexpr, MASKED: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
):  # fmt: skip
    column = start + tl.arange(0, BLOCK)
    x2 = load2(z_row, bias_ptr, column, scale, softcap, per_temperature, V, MASKED, HAS_BIAS, HAS_SOFTCAP)
    gradient = factor * tl.exp2(x2 - reference2) * slope(x2, scale, softcap, per_temperature, HAS_SOFTCAP)
    if z_row.dtype.element_ty != d_row.dtype.element_ty:
        # float32 logits become bfloat16 gradients in the front half of their row: this block writes at half its
        # offset, over columns that are read already, or are being read now.
        tl.debug_barrier()
    if MASKED:
        tl.store(d_row + column, gradient.to(d_row.dtype.element_ty), mask=column < V)
    else:
        tl.store(d_row + column, gradient.to(d_row.dtype.element_ty))


@triton.jit
def reduce_rows(
    z_ptr, stride_z, d_ptr, stride_d, bias_ptr, ids_ptr, taken2_ptr, merged_ptr, sums_ptr, rest2_ptr, share_ptr,
    loss_ptr, first_column, K, scale, softcap, per_temperature,
    V: tl.constexpr, CAPACITY: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK: tl.constexpr, TAIL: tl.constexpr,
    STAGE: tl.constexpr, WITH_GRADIENT: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
):  # fmt: skip
    """One program a row. d is the same memory as z, seen in the dtype of the gradient.

    STAGE SUMS writes rest2 [t] and stops; GRADIENT reads rest2 and sums, by then those of all ranks; WHOLE does
    both. The loss [t] and the gradient are multiplied by share [t].
    """
    row = tl.program_id(0).to(tl.int64)
    z_row = z_ptr + row * stride_z
    d_row = d_ptr + row * stride_d
    if STAGE == GRADIENT:
        rest2 = tl.load(rest2_ptr + row)
    else:
        rest2 = row_sum2(z_row, bias_ptr, scale, softcap, per_temperature, V, BLOCK, HAS_BIAS, HAS_SOFTCAP)
    if STAGE == SUMS:
        tl.store(rest2_ptr + row, rest2)
    else:
        share = tl.load(share_ptr + row)
        support2 = tl.load(sums_ptr + row * 3)
        cross = tl.load(sums_ptr + row * 3 + 1)
        mass = tl.load(sums_ptr + row * 3 + 2)
        loss, reference2, factor, known2, known_factor, p_factor = coefficients(
            rest2, support2, cross, mass, TAIL
        )
        tl.store(loss_ptr + row, loss * share)
        if WITH_GRADIENT:
            STEP: tl.constexpr = 4 * BLOCK
            WHOLE_STEPS: tl.constexpr = V // STEP * STEP
            for start in range(0, WHOLE_STEPS, STEP):
                write_block(
                    z_row, d_row, bias_ptr, start, factor * share, reference2, scale, softcap, per_temperature,
                    V, STEP, False, HAS_BIAS, HAS_SOFTCAP,
                )  # fmt: skip
            if WHOLE_STEPS < V:
                write_block(
                    z_row, d_row, bias_ptr, WHOLE_STEPS, factor * share, reference2, scale, softcap,
                    per_temperature, V, STEP, True, HAS_BIAS, HAS_SOFTCAP,
                )  # fmt: skip
            tl.debug_barrier()  # the row is written before its support is written over it
            for k_start in range(0, CAPACITY, BLOCK_K):
                k = k_start + tl.arange(0, BLOCK_K)
                merged = tl.load(merged_ptr + row * K + k, mask=k < K, other=-1.0)
                x2 = tl.load(taken2_ptr + row * K + k, mask=merged >= 0.0, other=-float("inf"))
                column = tl.load(ids_ptr + row * K + k, mask=merged >= 0.0, other=0) - first_column
                gradient = known_factor * tl.exp2(x2 - known2) - merged * p_factor
                gradient *= share * slope(x2, scale, softcap, per_temperature, HAS_SOFTCAP)
                tl.store(d_row + column, gradient.to(d_row.dtype.element_ty), mask=merged >= 0.0)
