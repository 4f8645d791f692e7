"""The encoders: one read of the 16-bit tensors, everything the attention kernels want of them written once.

Scales are powers of two, one per token and head, from that token alone: the smallest 2^e with amax <= 448 * 2^e. The
amax is taken on bit patterns: bfloat16 numbers of one sign order like integers, so the maximum is exact, and infinity and
NaN are simply the largest patterns (a floating-point maximum would drop a NaN).

What is written, all head-major and document-padded (schedule.py):
    E4M3 codes of Q, K, V and dO
    V decoded, in BF16 (exact): what O = P V reads, so that O and E = dO V^T read the same V
    dO's *codes* as BF16 numbers: dV = P^T G reads them, and 2^e(G) is folded into P as an exponent
    a row factor 2^e(Q) * |softmax scale| * log2(e) per query, 2^e(K) * sign(softmax scale) per key, 2^e(V) per key
    LSE in powers of two less e(G), and D / 2^e(G), per query

A token that is not finite has its codes zeroed (0 * NaN would cross the mask) and its factor set to NaN, so that exactly
the scores that can see it become NaN: the mask is a select, and comes after the factor. No kernel branches on it. The
products over tokens also read K and Q as given, straight from the packed buffer; a flag makes them take cleaned copies,
written only when the flag is up.
"""

from __future__ import annotations

import triton
import triton.language as tl

ROWS = 32  # tokens of one program; divides a block of 128


@triton.jit
def _exponent(amax_bits):
    """The ceil rule on bfloat16 magnitude bits: smallest e >= -127 with amax <= 448 * 2^e, 0 for a zero."""
    bits = amax_bits << 16
    e = (bits >> 23) - 135 + tl.where((bits & 0x7FFFFF) > 0x600000, 1, 0)
    return tl.where(amax_bits == 0, 0, tl.maximum(e, -127))


@triton.jit
def _power(e):
    """2^e as float32, -127 <= e <= 127."""
    return tl.where(e == -127, 0x00400000, (e + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _load(X, row, rows, valid, head, stride_t, stride_h, D: tl.constexpr):
    column = tl.arange(0, D)
    at = (row + rows).to(tl.int64)[:, None] * stride_t + head * stride_h + column[None, :]
    return tl.load(X + at, mask=(rows < valid)[:, None], other=0.0)


@triton.jit
def _amax(x):
    return tl.max((x.to(tl.int16, bitcast=True) & 0x7FFF).to(tl.int32), 1)


@triton.jit
def _codes(x, e, bad):
    y = tl.where(bad[:, None], 0.0, x.to(tl.float32) * _power(-e)[:, None])
    return y.to(tl.float8e4nv)


@triton.jit(do_not_specialize=["hq"])
def encode_kernel(Q, K, V, QC, KC, VC, VD, QF, KF, VF, Q_BLOCKS, K_BLOCKS, COUNTS, q_stride_t, q_stride_h, k_stride_t,
                  k_stride_h, v_stride_t, v_stride_h, q_pad, k_pad, factor, sign, hq, D: tl.constexpr,
                  ROWS: tl.constexpr):  # fmt: skip
    """Grid (blocks * 128 / ROWS, query heads + key heads). q_pad, k_pad: rows of a head in the padded buffers."""
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
            tl.store(VD + to, (v_codes.to(tl.float32) * _power(ev)[:, None]).to(tl.bfloat16))
            tl.store(KF + at, tl.where(bad, nan, _power(ek) * sign))
            tl.store(VF + at, _power(ev))
            if tl.max(tl.maximum(k_amax, v_amax), 0) >= 0x7F80:
                tl.store(COUNTS + 2, 1)


@triton.jit(do_not_specialize=["lse_stride_h", "dlse_stride_t", "dlse_stride_h"])
def encode_gradient_kernel(G, O, LSE, DLSE, GC, GB, LSE2, DELTA, Q_BLOCKS, COUNTS, g_stride_t, g_stride_h, o_stride_t,
                           o_stride_h, lse_stride_h, dlse_stride_t, dlse_stride_h, q_pad, HAS_DLSE: tl.constexpr,
                           D: tl.constexpr, ROWS: tl.constexpr):  # fmt: skip
    """Grid (query blocks * 128 / ROWS, query heads): dO's codes, and per row LSE log2(e) - e(G) and (D - dLSE) / 2^e(G)."""
    block = tl.program_id(0) // (128 // ROWS)
    if block < tl.load(COUNTS):
        rows = (tl.program_id(0) % (128 // ROWS)) * ROWS + tl.arange(0, ROWS)
        head = tl.program_id(1)
        column = tl.arange(0, D)
        row = tl.load(Q_BLOCKS + block * 16)
        valid = tl.load(Q_BLOCKS + block * 16 + 1)
        g = _load(G, row, rows, valid, head, g_stride_t, g_stride_h, D)
        o = _load(O, row, rows, valid, head, o_stride_t, o_stride_h, D)
        live = rows < valid
        if (tl.program_id(0) == 0) & (head == 0):  # the two passes of the backward start their lists
            tl.store(COUNTS + 8, 0)
            tl.store(COUNTS + 9, 0)
        lse = tl.load(LSE + head.to(tl.int64) * lse_stride_h + row + rows, mask=live, other=float("-inf"))
        amax = _amax(g)
        bad = amax >= 0x7F80
        e = tl.where(bad, 0, _exponent(amax))
        codes = _codes(g, e, bad)
        values = codes.to(tl.float32)
        delta = tl.sum(values * o.to(tl.float32), 1)
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


@triton.jit(do_not_specialize=["rows", "heads"])
def clean_kernel(X, CLEAN, COUNTS, rows, stride_t, stride_h, heads, D: tl.constexpr, ROWS: tl.constexpr):
    """A packed copy of X in which tokens that are not finite are zero; does nothing unless the encoder raised the flag."""
    if tl.load(COUNTS + 2) != 0:
        row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
        for head in range(heads):
            x = _load(X, 0, row, rows, head, stride_t, stride_h, D)
            x = tl.where((_amax(x) >= 0x7F80)[:, None], 0.0, x)
            at = row.to(tl.int64)[:, None] * (heads * D) + head * D + tl.arange(0, D)[None, :]
            tl.store(CLEAN + at, x, mask=(row < rows)[:, None])


@triton.jit(do_not_specialize=["rows", "width", "heads"])
def clear_kernel(X, LSE, rows, width, COUNTS, SIDE: tl.constexpr, heads, ROWS: tl.constexpr):
    """Zero the rows of X (rows, width) that belong to no document, and set LSE (heads, rows) there to -inf. SIDE: 3 for
    queries, 5 for keys. heads = 0: no LSE."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    first = tl.load(COUNTS + SIDE)
    end = tl.load(COUNTS + SIDE + 1)
    if (tl.program_id(0) * ROWS < first) | ((tl.program_id(0) + 1) * ROWS > end):
        outside = ((row < first) | (row >= end)) & (row < rows)
        for base in range(0, width, 256):
            column = base + tl.arange(0, 256)
            at = row.to(tl.int64)[:, None] * width + column[None, :]
            tl.store(X + at, tl.zeros([ROWS, 256], X.dtype.element_ty), mask=outside[:, None] & (column < width)[None, :])
        for head in range(heads):
            tl.store(LSE + head * rows + row, tl.full([ROWS], float("-inf"), tl.float32), mask=outside)
