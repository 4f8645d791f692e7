"""The encoders: one read of the 16-bit tensors, everything the attention kernels want of them written once.

Scales are powers of two, one per token and head, from that token alone: the smallest 2^e with amax <= 448 * 2^e and e a
multiple of four (flamia/quantize.py, "coarse": neighbours then mostly have the same). The amax is taken on bit patterns:
bfloat16 numbers of one sign order like integers, so the maximum is exact, and infinity and NaN are simply the largest
patterns (a floating-point maximum would drop a NaN).

What is written, all head-major and document-padded (schedule.py):
    E4M3 codes of Q, K, V and dO
    V decoded, in BF16 (exact): what O = P V reads, so that O and E = dO V^T read the same V
    dO's *codes* as BF16 numbers: dV = P^T G reads them, and 2^e(G) is folded into P as an exponent
    a row factor 2^e(Q) * |softmax scale| * log2(e) per query, 2^e(K) * sign(softmax scale) per key, 2^e(V) per key
    for every 32 tokens of K the factor that all of them have, or 0 where they differ
    LSE in powers of two less e(G), and D / 2^e(G), per query

A token that is not finite has its codes zeroed (0 * NaN would cross the mask) and its factor set to NaN, so that exactly
the scores that can see it become NaN: the mask is a select, and comes after the factor. No kernel branches on it. The
products over tokens also read K and Q as given, straight from the packed buffer; a flag makes them take cleaned copies,
written only when the flag is up.
"""

from __future__ import annotations

import triton
import triton.language as tl

from flamia.quantize import GROUP

ROWS = GROUP  # tokens of one program, which looks whether they have one scale
LARGEST = tl.constexpr(3.3895313892515355e38)  # of BF16


@triton.jit
def _exponent(amax_bits):
    """The ceil rule on bfloat16 magnitude bits: smallest e >= -124 with amax <= 448 * 2^e and e a multiple of four, 0 for a
    zero."""
    bits = amax_bits << 16
    e = (bits >> 23) - 135 + tl.where((bits & 0x7FFFFF) > 0x600000, 1, 0)
    return tl.where(amax_bits == 0, 0, ((tl.maximum(e, -127) + 3) >> 2) << 2)


@triton.jit
def _power(e):
    """2^e as float32, -126 <= e <= 127."""
    return ((e + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _common(e, amax, bad, factor):
    """The factor of all tokens of a group, or 0 where two of them differ or one is not finite. A token of zeros agrees with
    any: its scores are zero. Factors above 1 (a key above 448) or below 2^-64 count as different: in between, a score times
    the factor and the factor times the query's stay inside float32 wherever the other does, so which of the two a kernel
    takes shows in no bit."""
    low = tl.min(tl.where(amax == 0, 127, e), 0)
    high = tl.max(tl.where(amax == 0, -126, e), 0)
    none = tl.max(amax, 0) == 0
    agree = (tl.max(bad.to(tl.int32), 0) == 0) & (none | ((low == high) & (high <= 0) & (high >= -64)))
    return tl.where(agree, _power(tl.where(none, 0, high)) * factor, 0.0)


@triton.jit
def _store_common(GROUPS, block_row, factor, ROWS: tl.constexpr):
    """A group's factor, one of four of a block of 128 rows: in its own 64 rows' place, and behind the 64 before them."""
    group = tl.program_id(0) % (128 // ROWS)
    place = GROUPS + block_row // 16 + (group // 2) * 4 + group % 2
    tl.store(place, factor)
    tl.store(place - 2, factor, mask=group >= 2)


@triton.jit
def _load(X, row, rows, valid, head, stride_t, stride_h, D: tl.constexpr):
    column = tl.arange(0, D)
    at = (row + rows).to(tl.int64)[:, None] * stride_t + tl.cast(head, tl.int64) * stride_h + column[None, :]
    return tl.load(X + at, mask=(rows < valid)[:, None], other=0.0)


@triton.jit
def _amax(x):
    return tl.max((x.to(tl.int16, bitcast=True) & 0x7FFF).to(tl.int32), 1)


@triton.jit
def _codes(x, e, bad):
    y = tl.where(bad[:, None], 0.0, x.to(tl.float32) * _power(-e)[:, None])
    return y.to(tl.float8e4nv)


@triton.jit
def _clean(X, CLEAN, row, rows, heads, stride_t, stride_h, D: tl.constexpr):
    """Copy some tokens, those that are not finite as zeros."""
    for head in range(heads):
        x = _load(X, 0, row, rows, head, stride_t, stride_h, D)
        x = tl.where((_amax(x) >= 0x7F80)[:, None], 0.0, x)
        at = row.to(tl.int64)[:, None] * (heads * D) + head * D + tl.arange(0, D)[None, :]
        tl.store(CLEAN + at, x, mask=(row < rows)[:, None])


@triton.jit
def _clear(X, row, outside, width):
    """Zero the rows of X (rows, width) that are `outside`."""
    for base in range(0, width, 128):
        column = base + tl.arange(0, 128)
        at = row.to(tl.int64)[:, None] * width + column[None, :]
        zero = tl.zeros([row.shape[0], 128], X.dtype.element_ty)
        tl.store(X + at, zero, mask=outside[:, None] & (column < width)[None, :])


@triton.jit
def _outside(COUNTS, row, rows, SIDE: tl.constexpr):
    """Which rows of the buffer belong to no document. SIDE: 3 for queries, 5 for keys."""
    return ((row < tl.load(COUNTS + SIDE)) | (row >= tl.load(COUNTS + SIDE + 1))) & (row < rows)


@triton.jit
def _report(X, COUNTS, token, outside, END: tl.constexpr, heads, stride_t, stride_h, D: tl.constexpr):
    """Raise the flag if a token shortly behind the last document is not finite."""
    near = outside & (token < tl.load(COUNTS + END) + 128)
    for head in range(heads):
        at = token.to(tl.int64)[:, None] * stride_t + tl.cast(head, tl.int64) * stride_h + tl.arange(0, D)[None, :]
        x = tl.load(X + at, mask=near[:, None], other=0.0)
        if tl.max(_amax(x), 0) >= 0x7F80:
            tl.store(COUNTS + 2, 1)


@triton.jit(do_not_specialize=["hq", "hk", "q_rows", "k_rows"])
def encode_kernel(Q, K, V, QC, KC, VC, VD, QF, KF, VF, KG, O, LSE, Q_BLOCKS, K_BLOCKS, COUNTS, q_stride_t, q_stride_h,
                  k_stride_t, k_stride_h, v_stride_t, v_stride_h, q_pad, k_pad, factor, sign, hq, hk, q_rows,
                  k_rows, D: tl.constexpr, ROWS: tl.constexpr):  # fmt: skip
    """Grid (blocks * 128 / ROWS, query heads + key heads + 1). q_pad, k_pad: rows of a head in the padded buffers. The
    last row of the grid sets O and LSE of the tokens outside all documents, and looks for what is not finite there: tiles
    of Q and K as given reach up to 127 rows past the last document."""
    block = tl.program_id(0) // (128 // ROWS)
    rows = (tl.program_id(0) % (128 // ROWS)) * ROWS + tl.arange(0, ROWS)
    head = tl.program_id(1)
    column = tl.arange(0, D)
    nan = float("nan")
    if head < hq:
        if block < tl.load(COUNTS):
            row = tl.load(Q_BLOCKS + block * 16)
            valid = tl.load(Q_BLOCKS + block * 16 + 1)
            x = _load(Q, row, rows, valid, head, q_stride_t, q_stride_h, D)
            amax = _amax(x)
            bad = amax >= 0x7F80
            e = _exponent(amax)
            at = head.to(tl.int64) * q_pad + block * 128 + rows
            tl.store(QC + at[:, None] * D + column[None, :], _codes(x, e, bad))
            tl.store(QF + at, tl.where(bad, nan, _power(e) * factor))
            if tl.max(amax, 0) >= 0x7F80:
                tl.store(COUNTS + 2, 1)
    elif head == hq + hk:
        token = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
        outside = _outside(COUNTS, token, q_rows, 3)
        if tl.max(outside.to(tl.int32), 0) > 0:
            _clear(O, token, outside, hq * D)
            for h in range(hq):
                tl.store(LSE + h * q_rows + token, tl.full([ROWS], float("-inf"), tl.float32), mask=outside)
            _report(Q, COUNTS, token, outside, 4, hq, q_stride_t, q_stride_h, D)
        outside = _outside(COUNTS, token, k_rows, 5)
        if tl.max(outside.to(tl.int32), 0) > 0:
            _report(K, COUNTS, token, outside, 6, hk, k_stride_t, k_stride_h, D)
    else:
        head -= hq
        if block < tl.load(COUNTS + 1):
            row = tl.load(K_BLOCKS + block * 16)
            valid = tl.load(K_BLOCKS + block * 16 + 1)
            k = _load(K, row, rows, valid, head, k_stride_t, k_stride_h, D)
            v = _load(V, row, rows, valid, head, v_stride_t, v_stride_h, D)
            k_amax, v_amax = _amax(k), _amax(v)
            bad = (k_amax >= 0x7F80) | (v_amax >= 0x7F80)
            ek, ev = _exponent(k_amax), tl.where(bad, 0, _exponent(v_amax))
            at = head.to(tl.int64) * k_pad + block * 128 + rows
            to = at[:, None] * D + column[None, :]
            v_codes = _codes(v, ev, bad)
            tl.store(KC + to, _codes(k, ek, bad))
            tl.store(VC + to, v_codes)
            decoded = v_codes.to(tl.float32) * _power(ev)[:, None]
            # rounding to a code may take the largest finite numbers to 2^128; 0 * infinity would cross the mask
            decoded = tl.minimum(tl.maximum(decoded, -LARGEST), LARGEST)
            tl.store(VD + to, decoded.to(tl.bfloat16))
            tl.store(KF + at, tl.where(bad, nan, _power(ek) * sign))
            _store_common(KG, head.to(tl.int64) * k_pad + block * 128, _common(ek, k_amax, bad, sign), ROWS)
            tl.store(VF + at, _power(ev))
            if tl.max(tl.maximum(k_amax, v_amax), 0) >= 0x7F80:
                tl.store(COUNTS + 2, 1)


@triton.jit(do_not_specialize=["lse_stride_h", "dlse_stride_t", "dlse_stride_h", "q_rows", "k_rows", "hq", "hk"])
def encode_gradient_kernel(G, O, REST, LSE, DLSE, GC, GB, LSE2, DELTA, Q, K, Q_CLEAN, K_CLEAN, DQ, DK, DV, Q_BLOCKS,
                           COUNTS, TURNS, g_stride_t, g_stride_h, o_stride_t, o_stride_h, q_stride_t, q_stride_h,
                           k_stride_t, k_stride_h, lse_stride_h, dlse_stride_t, dlse_stride_h, q_pad, q_rows,
                           k_rows, hq, hk, HAS_DLSE: tl.constexpr, REMAINDER: tl.constexpr, D: tl.constexpr,
                           ROWS: tl.constexpr):  # fmt: skip
    """Grid (blocks * 128 / ROWS, query heads + 1): dO's codes, and per row LSE log2(e) - e(G) and (D - dLSE) / 2^e(G).
    The last row of the grid zeroes gradients of tokens outside all documents, writes the cleaned copies if need be, and
    leaves in TURNS the counts with the lists of the two passes at their start: what the forward kept is only read."""
    block = tl.program_id(0) // (128 // ROWS)
    head = tl.program_id(1)
    if head == hq:
        if tl.program_id(0) == 0:
            word = tl.arange(0, 16)
            tl.store(TURNS + word, tl.load(COUNTS + word, mask=word < 7, other=0))
        token = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
        if tl.load(COUNTS + 2) != 0:
            _clean(Q, Q_CLEAN, token, q_rows, hq, q_stride_t, q_stride_h, D)
            _clean(K, K_CLEAN, token, k_rows, hk, k_stride_t, k_stride_h, D)
        outside = _outside(COUNTS, token, q_rows, 3)
        if tl.max(outside.to(tl.int32), 0) > 0:
            _clear(DQ, token, outside, hq * D)
        outside = _outside(COUNTS, token, k_rows, 5)
        if tl.max(outside.to(tl.int32), 0) > 0:
            _clear(DK, token, outside, hk * D)
            _clear(DV, token, outside, hk * D)
    elif block < tl.load(COUNTS):
        rows = (tl.program_id(0) % (128 // ROWS)) * ROWS + tl.arange(0, ROWS)
        column = tl.arange(0, D)
        row = tl.load(Q_BLOCKS + block * 16)
        valid = tl.load(Q_BLOCKS + block * 16 + 1)
        g = _load(G, row, rows, valid, head, g_stride_t, g_stride_h, D)
        o = _load(O, row, rows, valid, head, o_stride_t, o_stride_h, D)
        live = rows < valid
        lse = tl.load(LSE + head.to(tl.int64) * lse_stride_h + row + rows, mask=live, other=float("-inf"))
        amax = _amax(g)
        bad = amax >= 0x7F80
        e = tl.where(bad, 0, _exponent(amax))
        codes = _codes(g, e, bad)
        values = codes.to(tl.float32)
        exact = o.to(tl.float32)
        if REMAINDER:
            exact += _load(REST, row, rows, valid, head, hq * D, D, D).to(tl.float32)
        delta = tl.sum(values * exact, 1)
        if HAS_DLSE:
            at = head.to(tl.int64) * dlse_stride_h + (row + rows).to(tl.int64) * dlse_stride_t
            delta -= tl.load(DLSE + at, mask=live, other=0.0) * _power(-e)
        blind = lse == float("-inf")  # a row that sees no key, or padding: its P is zero
        at = head.to(tl.int64) * q_pad + block * 128 + rows
        to = at[:, None] * D + column[None, :]
        tl.store(GC + to, codes)
        tl.store(GB + to, values.to(tl.bfloat16))
        lse2 = tl.where(bad, float("nan"), lse * 1.4426950408889634 - e.to(tl.float32))
        tl.store(LSE2 + at, tl.where(blind, float("inf"), lse2))
        tl.store(DELTA + at, tl.where(blind, 0.0, delta))
