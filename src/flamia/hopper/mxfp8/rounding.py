"""Rounding on the route `mxfp8`: numbers to E4M3, and the weights P and U that exist only inside the kernels.

Rounded weights, like rounded tensors, are E4M3 numbers times powers of two, which BF16 holds exactly.
flamia/reference/weights.py has the same names for what is folded into what.
"""

from __future__ import annotations

import triton
import triton.language as tl

LARGEST = tl.constexpr(3.3895313892515355e38)  # of BF16: numbers between it and float32's would be stored as infinite


@triton.jit
def scale_exponent(amax):
    """The smallest e >= -127 with amax <= 448 * 2^e, for float32 amax > 0: from its bits, so no logarithm can be off."""
    bits = amax.to(tl.int32, bitcast=True)
    return tl.maximum((bits >> 23) - 135 + tl.where((bits & 0x7FFFFF) > 0x600000, 1, 0), -127)


@triton.jit
def power(e):
    """2^e as float32, -127 <= e <= 127. -127 is subnormal."""
    return tl.where(e < -126, 0x00400000, (e + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def e4m3(x):
    """x (float32) rounded to E4M3: nearest, ties to even, saturating, NaN stays. By arithmetic, as flamia/formats.py does: where
    a kernel packs E4M3 numbers and unpacks the same ones, the assembler of Triton 3.6 may read them from a register that
    nobody wrote."""
    x = tl.minimum(tl.maximum(x, -448.0, propagate_nan=tl.PropagateNan.ALL), 448.0, propagate_nan=tl.PropagateNan.ALL)
    spacing = tl.maximum((x.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True), 0.015625)
    magic = spacing * 1572864.0  # 1.5 * 2^20: three bits behind the first
    return (x + magic) - magic


@triton.jit
def scale_of(amax):
    """(2^e, 2^-e) of the E4M3 scale that holds amax; 1 for a zero."""
    e = tl.where(amax > 0, scale_exponent(amax), 0)
    return power(e), power(-e)


@triton.jit
def inverse_of(factor):
    """1 / factor of a power of two, 0 for 0."""
    return tl.where(factor > 0, 1.0 / factor, 0.0)


@triton.jit
def unfolded(scale, factor):
    """scale / factor, finite: where it would not be, what it multiplies has rounded to zero."""
    return tl.minimum(scale * inverse_of(factor), LARGEST)


@triton.jit
def by_line(x, factor):
    """Weights rounded with one scale for each row, after the other operand's scales, a factor for each column, are folded in:
    what is rounded is x * factor; what comes back is that over factor, to meet the operand's rounded values."""
    y = x * factor[None, :]
    scale, inverse = scale_of(tl.max(tl.abs(y), 1, keep_dims=True))
    return (e4m3(y * inverse) * unfolded(scale, factor[None, :])).to(tl.bfloat16)


@triton.jit
def by_constant(x, BOOST: tl.constexpr):
    """Weights rounded in units of 1 / BOOST."""
    return (e4m3(x * BOOST) * (1.0 / BOOST)).to(tl.bfloat16)


@triton.jit
def by_square(x):
    """Weights rounded with one scale for 32 x 32 of them."""
    rows: tl.constexpr = x.shape[0] // 32
    columns: tl.constexpr = x.shape[1] // 32
    tiles = tl.reshape(x, [rows, 32, columns, 32])
    scale, inverse = scale_of(tl.max(tl.max(tl.abs(tiles), 3, keep_dims=True), 1, keep_dims=True))
    return tl.reshape(e4m3(tiles * inverse) * scale, x.shape).to(tl.bfloat16)


@triton.jit
def gradient_weights(u, FACTOR, r, EDGE: tl.constexpr, STRICT: tl.constexpr):
    """U as dQ and dK read it: 16 bits at the mask's edge, else by lines (`strict`; r: where the factors are) or squares."""
    if EDGE:
        w = u.to(tl.bfloat16)
    elif STRICT:
        w = by_line(u, tl.load(FACTOR + r))
    else:
        w = by_square(u)
    return w
