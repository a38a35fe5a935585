"""What the kernels of all losses do with one row of logits. Each program of a kernel has one row.

Logits are multiplied by log2(e) once, since a GPU has an instruction for 2**x and none for e**x; names that end in
2 are such base-2 values. Sizes are compile-time constants, which the interpreter needs for its loops.
"""

# V columns of a row

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
# Below any logit, and finite: a difference of two of them is 0 and not NaN.
LOWEST = tl.constexpr(-3.0e38)


MINIMAL_BLOCK = 128


def block_for(columns: int, block: int) -> int:
    """Columns of one load, of which four make a step: at most `block`, and no step is much longer than the row."""
    return min(block, max(MINIMAL_BLOCK, int(triton.next_power_of_2(columns)) // 4))


@triton.jit
def tanh(x):
    """Within 4 units in the last place of float32: a product of exponentials alone loses the small values."""
    x_squared = x * x
    # Least squares of (tanh(x) / x - 1) / x**2 in x**2 over |x| <= 0.6, relative error of tanh 8.5e-8.
    series = -0.00627639 * x_squared + 0.02111621
    series = series * x_squared - 0.05387514
    series = series * x_squared + 0.13332924
    series = series * x_squared - 0.3333333
    power = tl.exp2(tl.abs(x) * (-2.0 * LOG2_E))
    size = (1.0 - power) / (1.0 + power)
    return tl.where(tl.abs(x) < 0.6, x + x * x_squared * series, tl.where(x < 0.0, -size, size))


@triton.jit
def tempered2(raw, bias, scale, softcap, per_temperature, HAS_BIAS: tl.constexpr, HAS_SOFTCAP: tl.constexpr):
    """What enters the softmax, times log2(e), from a product of the head."""
    if HAS_BIAS:
        logit = (raw + bias) * scale
    else:
        logit = raw * scale
    if HAS_SOFTCAP:
        # -inf marks the support, which is not here; tanh would turn it into a logit.
        logit = tl.where(raw == -float("inf"), raw, softcap * tanh(logit / softcap))
    return logit * (per_temperature * LOG2_E)


@triton.jit
def slope(x2, scale, softcap, per_temperature, HAS_SOFTCAP: tl.constexpr):
    """Derivative of what enters the softmax by the product of the head, given `x2` of `tempered2`."""
    result = scale * per_temperature
    if HAS_SOFTCAP:
        capped = tl.where(x2 == -float("inf"), 0.0, x2) * (LN_2 / (per_temperature * softcap))
        result = result * (1.0 - capped * capped)
    return result


@triton.jit
def load2(
    z_row, bias_ptr, column, scale, softcap, per_temperature,
    V: tl.constexpr, MASKED: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
):  # fmt: skip
    bias = 0.0
    if MASKED:
        raw = tl.load(z_row + column, mask=column < V, other=-float("inf")).to(tl.float32)
        if HAS_BIAS:
            bias = tl.load(bias_ptr + column, mask=column < V, other=0.0).to(tl.float32)
    else:
        raw = tl.load(z_row + column).to(tl.float32)
        if HAS_BIAS:
            bias = tl.load(bias_ptr + column).to(tl.float32)
    return tempered2(raw, bias, scale, softcap, per_temperature, HAS_BIAS, HAS_SOFTCAP)


@triton.jit
def sum_four(
    top2, total, z_row, bias_ptr, start, scale, softcap, per_temperature,
    V: tl.constexpr, BLOCK: tl.constexpr, MASKED: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
):  # fmt: skip
    """Adds four blocks to a running sum of powers, with one rescaling: exponentials are what limits this loop."""
    column = start + tl.arange(0, BLOCK)
    a = load2(z_row, bias_ptr, column, scale, softcap, per_temperature, V, MASKED, HAS_BIAS, HAS_SOFTCAP)
    column += BLOCK
    b = load2(z_row, bias_ptr, column, scale, softcap, per_temperature, V, MASKED, HAS_BIAS, HAS_SOFTCAP)
    column += BLOCK
    c = load2(z_row, bias_ptr, column, scale, softcap, per_temperature, V, MASKED, HAS_BIAS, HAS_SOFTCAP)
    column += BLOCK
    d = load2(z_row, bias_ptr, column, scale, softcap, per_temperature, V, MASKED, HAS_BIAS, HAS_SOFTCAP)
    new_top2 = tl.maximum(tl.maximum(tl.maximum(a, b), tl.maximum(c, d)), top2)
    total = total * tl.exp2(top2 - new_top2)
    total += (tl.exp2(a - new_top2) + tl.exp2(b - new_top2)) + (tl.exp2(c - new_top2) + tl.exp2(d - new_top2))
    return new_top2, total


@triton.jit
def row_sum2(
    z_row, bias_ptr, scale, softcap, per_temperature,
    V: tl.constexpr, BLOCK: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
):  # fmt: skip
    """log2 of the sum of 2**logit over a row; the maximum is kept a lane, so that the row is reduced once."""
    top2 = tl.full([BLOCK], LOWEST, tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    WHOLE_STEPS: tl.constexpr = V // (4 * BLOCK) * (4 * BLOCK)
    for start in range(0, WHOLE_STEPS, 4 * BLOCK):
        top2, total = sum_four(
            top2, total, z_row, bias_ptr, start, scale, softcap, per_temperature,
            V, BLOCK, False, HAS_BIAS, HAS_SOFTCAP,
        )  # fmt: skip
    if WHOLE_STEPS < V:
        top2, total = sum_four(
            top2, total, z_row, bias_ptr, WHOLE_STEPS, scale, softcap, per_temperature,
            V, BLOCK, True, HAS_BIAS, HAS_SOFTCAP,
        )  # fmt: skip
    top = tl.max(top2, 0)
    return top + tl.log2(tl.sum(total * tl.exp2(top2 - top), 0))


@triton.jit
def scale_into(source_ptr, target_ptr, factor_ptr, size, BLOCK: tl.constexpr):
    """target = source * factor, one rounding; `factor` is read on the device."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    product = tl.load(source_ptr + at, mask=at < size).to(tl.float32) * tl.load(factor_ptr).to(tl.float32)
    tl.store(target_ptr + at, product.to(target_ptr.dtype.element_ty), mask=at < size)
