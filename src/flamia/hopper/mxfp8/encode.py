"""The encoders of the route `mxfp8`: rounded values, 16-bit copies, factors and marks, in document-padded rows.

Of every tensor the attention kernels read, head-major, rows padded as in hopper/schedule.py:

    rounded  BF16: what the E4M3 code of an element and its scale stand for, exact in BF16
    given    BF16: the tensor as it is, for pairs of blocks at the mask's edge (`strict` alone has such)
    factor   2^e, float32, per row: the scale of a token or of 32 tokens; 0 where the whole group is zero, since an
             exponent of nothing must win no maximum and multiplies zeros
    mark     1, or NaN for a token that is not finite: what a score is multiplied by, so that exactly the rows that see
             such a token turn into NaN; its rows above are zero

flamia/quantize.py is the specification; scales and values are its bits.
"""

from __future__ import annotations

import triton
import triton.language as tl

from flamia import quantize

from .rounding import LARGEST, e4m3, power, scale_exponent
from .steps import full_keys

GROUP = tl.constexpr(quantize.GROUP)


@triton.jit
def _rows(X, row, r, valid, head, stride_t, stride_h, D: tl.constexpr):
    at = (row + r).to(tl.int64)[:, None] * stride_t + tl.cast(head, tl.int64) * stride_h + tl.arange(0, D)[None, :]
    return tl.load(X + at, mask=(r < valid)[:, None], other=0.0)


@triton.jit
def _encode(x, BLOCK: tl.constexpr):
    """(rounded, given, factor, mark) of the rows of a group."""
    x = x.to(tl.float32)
    bad = tl.max((tl.abs(x) <= LARGEST).to(tl.int32) ^ 1, 1) > 0
    x = tl.where(bad[:, None], 0.0, x)
    amax = tl.max(tl.abs(x), 1)
    if BLOCK:  # one scale for all
        amax = tl.broadcast_to(tl.max(amax, 0, keep_dims=True), amax.shape)
    e = tl.where(amax == 0, 0, scale_exponent(amax))
    factor = tl.where(amax == 0, 0.0, power(e))
    rounded = e4m3(x * power(-e)[:, None]) * factor[:, None]
    # rounding may take the largest finite numbers to 2^128; 0 * infinity would cross the mask
    rounded = tl.minimum(tl.maximum(rounded, -LARGEST), LARGEST)
    return rounded, x, factor, tl.where(bad, float("nan"), 1.0)


@triton.jit
def _store(X, FACTOR, MARK, r, x, factor, mark, D: tl.constexpr):
    tl.store(X + r[:, None] * D + tl.arange(0, D)[None, :], x.to(tl.bfloat16))
    tl.store(FACTOR + r, factor)
    tl.store(MARK + r, mark)


@triton.jit
def encode_kernel(X, ROUNDED, GIVEN, FACTOR, MARK, BLOCKS, COUNTS, SIDE: tl.constexpr, stride_t, stride_h, pad_rows,
                  BLOCK: tl.constexpr, STRICT: tl.constexpr, D: tl.constexpr):  # fmt: skip
    """One group of 32 rows, a quarter of a block, of one head."""
    b, head = tl.program_id(0) // 4, tl.program_id(1)
    if b < tl.load(COUNTS + SIDE):
        record = BLOCKS + b * 16
        r = tl.program_id(0) % 4 * GROUP + tl.arange(0, GROUP)
        x = _rows(X, tl.load(record), r, tl.load(record + 1), head, stride_t, stride_h, D)
        rounded, x, factor, mark = _encode(x, BLOCK)
        at = tl.cast(head, tl.int64) * pad_rows + b * 128 + r
        _store(ROUNDED, FACTOR, MARK, at, rounded, factor, mark, D)
        if STRICT:
            tl.store(GIVEN + at[:, None] * D + tl.arange(0, D)[None, :], x.to(tl.bfloat16))


@triton.jit(do_not_specialize=["lse_stride", "dlse_stride_h", "dlse_stride_t", "left", "right"])
def encode_gradient_kernel(G, O, LSE, DLSE, ROUNDED, FACTOR, MARK, LSE2, DELTA, BLOCKS, COUNTS, g_stride_t,
                           g_stride_h, o_stride_t, o_stride_h, lse_stride, dlse_stride_h, dlse_stride_t, pad_rows, left,
                           right, BLOCK: tl.constexpr, STRICT: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr,
                           HAS_DLSE: tl.constexpr, D: tl.constexpr):  # fmt: skip
    """dO, and what belongs to a row of it: the mark also says whether dLSE is finite; LSE in powers of two, +inf where a
    row sees nothing; D = rowsum(G O) - dLSE. There is one reading of dO: its rounded one, or, in `strict`, dO as given for a
    block of queries that has no full pair whatever its document's length: nothing would be gained by rounding."""
    b, head = tl.program_id(0) // 4, tl.program_id(1)
    if b < tl.load(COUNTS):
        r = tl.program_id(0) % 4 * GROUP + tl.arange(0, GROUP)
        record = BLOCKS + b * 16
        row, valid, position = tl.load(record), tl.load(record + 1), tl.load(record + 3)
        g, x, factor, mark = _encode(_rows(G, row, r, valid, head, g_stride_t, g_stride_h, D), BLOCK)
        if STRICT:  # pairs by positions alone, as if the document had no end
            first, end = full_keys(position, tl.maximum(position - left, 0) // 128, 1 << 24, left, right, LEFT, RIGHT)
            if end <= first:
                g = x
        o = _rows(O, row, r, valid, head, o_stride_t, o_stride_h, D).to(tl.float32)
        delta = tl.sum(g * o, 1)
        lse = tl.load(LSE + tl.cast(head, tl.int64) * lse_stride + row + r, mask=r < valid, other=float("-inf"))
        lse2 = tl.where(lse == float("-inf"), float("inf"), lse * 1.4426950408889634)
        if HAS_DLSE:
            at = tl.cast(head, tl.int64) * dlse_stride_h + (row + r).to(tl.int64) * dlse_stride_t
            dlse = tl.load(DLSE + at, mask=r < valid, other=0.0)
            delta -= dlse
            mark = tl.where(tl.abs(dlse) <= LARGEST, mark, float("nan"))
        at = tl.cast(head, tl.int64) * pad_rows + b * 128 + r
        _store(ROUNDED, FACTOR, MARK, at, g, factor, mark, D)
        tl.store(LSE2 + at, lse2)
        tl.store(DELTA + at, delta)
