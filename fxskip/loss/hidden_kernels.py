"""Triton kernel of `hidden_kl`: from the logits of student and teacher to losses and, in place, to the gradient."""

# t rows of one chunk, V vocabulary

import triton
import triton.language as tl

from fxskip.loss.row_kernels import LN_2, load2, row_sum2, slope

FORWARD = tl.constexpr(0)
REVERSE = tl.constexpr(1)
MIXED = tl.constexpr(2)

WHOLE = tl.constexpr(0)  # everything in one launch
# Normalisers of this rank's columns; but for MIXED also their divergences, each by its own.
SUMS = tl.constexpr(1)
PARTS = tl.constexpr(2)  # MIXED: this rank's parts of the divergences, from the normalisers of all ranks
GRADIENT = tl.constexpr(3)  # loss and gradient, from normalisers and divergences of all ranks


@triton.jit
def gaps2(logq2, logp2, q, p, beta, KIND: tl.constexpr):
    """What the sums of a divergence weigh with p, and with q: log-ratios in base 2, 0 where their weight is 0 (and not
    where it is NaN)."""
    if KIND == FORWARD:
        return tl.where(p == 0.0, 0.0, logp2 - logq2), tl.zeros_like(q)
    elif KIND == REVERSE:
        return tl.zeros_like(q), tl.where(q == 0.0, 0.0, logq2 - logp2)
    else:
        mixture = beta * p + (1.0 - beta) * q
        logm2 = tl.log2(tl.where(mixture == 0.0, 1.0, mixture))
        return tl.where(p == 0.0, 0.0, logp2 - logm2), tl.where(q == 0.0, 0.0, logq2 - logm2)


@triton.jit
def pair_block(
    z_row, y_row, d_row, z_bias_ptr, y_bias_ptr, start, z_sum2, y_sum2, q_divergence2, beta, share,
    scale, softcap, per_temperature, V: tl.constexpr, BLOCK: tl.constexpr, MASKED: tl.constexpr,
    KIND: tl.constexpr, WRITE: tl.constexpr, HAS_Z_BIAS: tl.constexpr, HAS_Y_BIAS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
):  # fmt: skip
    """The block's parts of sum p gap_p and sum q gap_q; with WRITE its gradient is stored."""
    column = start + tl.arange(0, BLOCK)
    x2 = load2(z_row, z_bias_ptr, column, scale, softcap, per_temperature, V, MASKED, HAS_Z_BIAS, HAS_SOFTCAP)
    y2 = load2(y_row, y_bias_ptr, column, scale, softcap, per_temperature, V, MASKED, HAS_Y_BIAS, HAS_SOFTCAP)
    q = tl.exp2(x2 - z_sum2)
    p = tl.exp2(y2 - y_sum2)
    p_gap2, q_gap2 = gaps2(x2 - z_sum2, y2 - y_sum2, q, p, beta, KIND)
    if WRITE:
        if KIND == FORWARD:
            gradient = q - p
        elif KIND == REVERSE:
            gradient = q * (q_gap2 - q_divergence2) * LN_2
        else:
            gradient = (1.0 - beta) * q * (q_gap2 - q_divergence2) * LN_2
        gradient *= share * slope(x2, scale, softcap, per_temperature, HAS_SOFTCAP)
        if z_row.dtype.element_ty != d_row.dtype.element_ty:
            tl.debug_barrier()  # as in sparse_kernels.write_block: narrower gradients over the logits of their row
        if MASKED:
            tl.store(d_row + column, gradient.to(d_row.dtype.element_ty), mask=column < V)
        else:
            tl.store(d_row + column, gradient.to(d_row.dtype.element_ty))
    return p * p_gap2, q * q_gap2


@triton.jit
def pass_over_row(
    z_row, y_row, d_row, z_bias_ptr, y_bias_ptr, z_sum2, y_sum2, q_divergence2, beta, share,
    scale, softcap, per_temperature, V: tl.constexpr, BLOCK: tl.constexpr, KIND: tl.constexpr,
    WRITE: tl.constexpr, HAS_Z_BIAS: tl.constexpr, HAS_Y_BIAS: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
):  # fmt: skip
    """sum p gap_p and sum q gap_q of the row, in base 2."""
    p_total = tl.zeros([BLOCK], tl.float32)
    q_total = tl.zeros([BLOCK], tl.float32)
    WHOLE_STEPS: tl.constexpr = V // BLOCK * BLOCK
    for start in range(0, WHOLE_STEPS, BLOCK):
        p_part, q_part = pair_block(
            z_row, y_row, d_row, z_bias_ptr, y_bias_ptr, start, z_sum2, y_sum2, q_divergence2, beta, share,
            scale, softcap, per_temperature, V, BLOCK, False, KIND, WRITE, HAS_Z_BIAS, HAS_Y_BIAS, HAS_SOFTCAP,
        )  # fmt: skip
        p_total += p_part
        q_total += q_part
    if WHOLE_STEPS < V:
        p_part, q_part = pair_block(
            z_row, y_row, d_row, z_bias_ptr, y_bias_ptr, WHOLE_STEPS, z_sum2, y_sum2, q_divergence2, beta, share,
            scale, softcap, per_temperature, V, BLOCK, True, KIND, WRITE, HAS_Z_BIAS, HAS_Y_BIAS, HAS_SOFTCAP,
        )  # fmt: skip
        p_total += p_part
        q_total += q_part
    return tl.sum(p_total, 0), tl.sum(q_total, 0)


@triton.jit
def compare_rows(
    z_ptr, stride_z, y_ptr, stride_y, d_ptr, stride_d, z_bias_ptr, y_bias_ptr, sums_ptr, share_ptr, loss_ptr, beta,
    scale, softcap, per_temperature, V: tl.constexpr, BLOCK: tl.constexpr, KIND: tl.constexpr, STAGE: tl.constexpr,
    WITH_GRADIENT: tl.constexpr, HAS_Z_BIAS: tl.constexpr, HAS_Y_BIAS: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
):  # fmt: skip
    """One program a row: z student, y teacher, d the gradient by z, the same memory as z. Loss [t] times share [t].

    sums [t, 4] is what stages hand on, in base 2: normalisers of z and y, sum p gap_p, sum q gap_q. The gradient of
    forward KL needs the two normalisers only and is written in the second pass over the row; the others need a
    divergence of the whole row first, and a third.
    """
    row = tl.program_id(0).to(tl.int64)
    z_row = z_ptr + row * stride_z
    y_row = y_ptr + row * stride_y
    d_row = d_ptr + row * stride_d
    sums = sums_ptr + row * 4
    if STAGE == WHOLE or STAGE == SUMS:  # noqa: SIM109 # Triton has no `in`
        z_sum2 = row_sum2(
            z_row, z_bias_ptr, scale, softcap, per_temperature, V, BLOCK, HAS_Z_BIAS, HAS_SOFTCAP
        )
        y_sum2 = row_sum2(
            y_row, y_bias_ptr, scale, softcap, per_temperature, V, BLOCK, HAS_Y_BIAS, HAS_SOFTCAP
        )
    else:
        z_sum2 = tl.load(sums)
        y_sum2 = tl.load(sums + 1)
    share = tl.load(share_ptr + row)
    WRITE_NOW: tl.constexpr = WITH_GRADIENT and KIND == FORWARD and STAGE == WHOLE
    if STAGE == GRADIENT or (STAGE == SUMS and KIND == MIXED):
        p_divergence2 = tl.load(sums + 2)
        q_divergence2 = tl.load(sums + 3)
    else:
        p_divergence2, q_divergence2 = pass_over_row(
            z_row, y_row, d_row, z_bias_ptr, y_bias_ptr, z_sum2, y_sum2, 0.0, beta, share,
            scale, softcap, per_temperature, V, 2 * BLOCK, KIND, WRITE_NOW, HAS_Z_BIAS, HAS_Y_BIAS, HAS_SOFTCAP,
        )  # fmt: skip
    if STAGE == SUMS or STAGE == PARTS:  # noqa: SIM109
        tl.store(sums, z_sum2)
        tl.store(sums + 1, y_sum2)
        tl.store(sums + 2, p_divergence2)
        tl.store(sums + 3, q_divergence2)
    else:
        if KIND == MIXED:
            loss2 = beta * p_divergence2 + (1.0 - beta) * q_divergence2
        else:
            loss2 = p_divergence2 + q_divergence2  # one of them is 0
        tl.store(loss_ptr + row, loss2 * LN_2 * share)
        if WITH_GRADIENT and not WRITE_NOW:
            pass_over_row(
                z_row, y_row, d_row, z_bias_ptr, y_bias_ptr, z_sum2, y_sum2, q_divergence2, beta, share,
                scale, softcap, per_temperature, V, 2 * BLOCK, KIND, True, HAS_Z_BIAS, HAS_Y_BIAS, HAS_SOFTCAP,
            )  # fmt: skip
