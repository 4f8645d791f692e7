"""What the three attention kernels of the route `mxfp8` share: which steps read which table, masks, and rounded weights.

A pair of blocks of 128 positions is *full* where every query sees every key, and then a product reads tensors and weights
rounded to E4M3; the other pairs are *edge* pairs, which `strict` computes from the tensors as given, in 16 bits. `fast` has
one table for both. Rounded weights, like rounded tensors, are E4M3 numbers times powers of two, which BF16 holds exactly: all
products are BF16 ones with FP32 sums, what an MXFP8 machine computes, without an accumulator that loses mass.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .encode import LARGEST, e4m3, power, scale_exponent


@triton.jit
def full_keys(position, first, end, left, right, LEFT: tl.constexpr, RIGHT: tl.constexpr):
    """Of the key blocks first .. end those that a block of queries at `position` sees whole (packing.py, full_blocks)."""
    full_first = first
    full_end = end
    if RIGHT:
        full_end = tl.minimum(tl.maximum(tl.maximum(position + right + 1, 0) // 128, first), end)
    if LEFT:
        full_first = tl.minimum(tl.maximum((tl.maximum(position + 127 - left, 0) + 127) // 128, first), full_end)
    return full_first, full_end


@triton.jit
def seen(query, key, keys, left, right, LEFT: tl.constexpr, RIGHT: tl.constexpr):
    """Which pairs of positions are visible; `query` and `key`, and so what comes back, broadcast against each other."""
    visible = key < keys
    if RIGHT:
        visible = visible & (key <= query + right)
    if LEFT:
        visible = visible & (key >= query - left)
    return visible


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
def by_line(x, factor, AXIS: tl.constexpr):
    """Weights rounded with one scale for each line along AXIS, after the other operand's scales are folded in: what is
    rounded is x * factor; what comes back is that over factor, to meet the operand's rounded values."""
    y = x * factor
    scale, inverse = scale_of(tl.max(tl.abs(y), AXIS, keep_dims=True))
    return (e4m3(y * inverse) * unfolded(scale, factor)).to(tl.bfloat16)


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
