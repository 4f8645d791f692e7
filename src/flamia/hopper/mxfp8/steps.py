"""What the three attention kernels of the route `mxfp8` share: which steps read which table, and masks.

A pair of blocks of 128 positions is *full* where every query sees every key, and then a product reads tensors and weights
rounded to E4M3; the other pairs are *edge* pairs, which `strict` computes from the tensors as given, in 16 bits. `fast` has
one table for both. All products are BF16 ones with FP32 sums: what an MXFP8 machine computes, without an accumulator that
loses mass.
"""

from __future__ import annotations

import triton
import triton.language as tl


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
