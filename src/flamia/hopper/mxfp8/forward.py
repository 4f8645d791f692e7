"""The forward of the route `mxfp8`: O and LSE of a block of 128 queries of one head.

    S = Q K^T        of rounded tensors, or of those given at the mask's edge (`strict`)
    m                moves when a step exceeds it by more than 2^LAG
    O += P V         full pairs: P rounded to E4M3 relative to V's largest scale so far

The names and the order are those of reference/forward.py; steps.py says what a full pair is.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .rounding import by_constant, e4m3, unfolded
from .steps import full_keys, seen

LAG = tl.constexpr(2.0)
BOOST = tl.constexpr(64.0)  # 2^6: weights reach 2^LAG, and E4M3 ends at 448


@triton.jit
def _steps(lo, hi, acc, m, total, top, Q, qf, query, keys, left, right, K, KM, V, VF, at, EDGE: tl.constexpr,
           MASK: tl.constexpr, STRICT: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, D: tl.constexpr):  # fmt: skip
    """Key blocks lo .. hi - 1. Q: where the queries' rows are. EDGE: all weights have 16 bits. top: V's largest factor in
    full pairs so far."""
    feature = tl.arange(0, D)
    q = tl.load(Q)
    for n in range(lo, hi):
        r = at + n * 128 + tl.arange(0, 128)
        key = n * 128 + tl.arange(0, 128)
        tile = r[:, None] * D + feature[None, :]
        s = tl.dot(q, tl.trans(tl.load(K + tile))) * (qf[:, None] * tl.load(KM + r)[None, :])
        if MASK:
            s = tl.where(seen(query[:, None], key[None, :], keys, left, right, LEFT, RIGHT), s, float("-inf"))
        largest = tl.max(s, 1)
        moved = tl.where(largest > m + LAG, largest, m)
        p = tl.exp2(s - tl.where(moved == float("-inf"), 0.0, moved)[:, None])
        keep = tl.where(moved == m, 1.0, tl.exp2(m - moved))
        m = moved
        total = total * keep + tl.sum(p, 1)
        if EDGE:
            w = p.to(tl.bfloat16)
        elif STRICT:
            vf = tl.load(VF + r)
            top = tl.maximum(top, tl.max(vf, 0))
            reference = tl.where(top == 0, 1.0, top)
            w = e4m3(p * (vf * (BOOST / reference))[None, :]) * unfolded(reference * (1 / BOOST), vf)[None, :]
            w = w.to(tl.bfloat16)
        else:
            w = by_constant(p, BOOST)
        acc = tl.dot(w, tl.load(V + tile), acc * keep[:, None])
    return acc, m, total, top


@triton.jit(do_not_specialize=["left", "right", "lse_stride", "hq", "group"])
def forward_kernel(Q, QG, QM, K, KG, KM, V, VG, VF, O, LSE, ITEMS, COUNTS, q_pad, k_pad, o_stride, lse_stride,
                   left, right, exponent, hq, group, STRICT: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr,
                   D: tl.constexpr, BM: tl.constexpr):  # fmt: skip
    """Q, K, V rounded, QG, KG, VG as given, or rounded as well (`fast`). exponent: softmax scale * log2(e)."""
    rank = tl.program_id(0) // hq
    h = tl.program_id(0) % hq
    if rank < tl.load(COUNTS):
        record = ITEMS + rank * 16
        row, valid, pad, position = tl.load(record), tl.load(record + 1), tl.load(record + 2), tl.load(record + 3)
        first, end, keys = tl.load(record + 6), tl.load(record + 7), tl.load(record + 5)
        at = tl.cast(h // group, tl.int64) * k_pad + tl.load(record + 4)
        local = tl.program_id(1) * BM + tl.arange(0, BM)
        r = tl.cast(h, tl.int64) * q_pad + pad + local
        feature = tl.arange(0, D)
        tile = r[:, None] * D + feature[None, :]
        qf = tl.load(QM + r) * exponent
        query = position + local
        acc = tl.zeros([BM, D], tl.float32)
        m = tl.full([BM], float("-inf"), tl.float32)
        total = tl.zeros([BM], tl.float32)
        top = tl.cast(0.0, tl.float32)
        full_first, full_end = full_keys(position, first, end, left, right, LEFT, RIGHT)
        inner = tl.maximum(tl.minimum(full_end, keys // 128), full_first)
        q, edge = Q + tile, QG + tile
        if LEFT:
            acc, m, total, top = _steps(first, full_first, acc, m, total, top, edge, qf, query, keys, left, right, KG, KM, VG, VF,
                                        at, STRICT, True, STRICT, LEFT, RIGHT, D)  # fmt: skip
        acc, m, total, top = _steps(full_first, inner, acc, m, total, top, q, qf, query, keys, left, right, K, KM, V, VF, at,
                                    False, False, STRICT, LEFT, RIGHT, D)  # fmt: skip
        acc, m, total, top = _steps(inner, full_end, acc, m, total, top, q, qf, query, keys, left, right, K, KM, V, VF, at,
                                    False, True, STRICT, LEFT, RIGHT, D)  # fmt: skip
        acc, m, total, top = _steps(full_end, end, acc, m, total, top, edge, qf, query, keys, left, right, KG, KM, VG, VF, at,
                                    STRICT, True, STRICT, LEFT, RIGHT, D)  # fmt: skip
        nothing = total == 0
        o = acc * tl.where(nothing, 0.0, 1.0 / tl.where(nothing, 1.0, total))[:, None]
        lse = tl.where(nothing, float("-inf"), (m + tl.log2(total)) * 0.6931471805599453)
        to = (row + local).to(tl.int64)[:, None] * o_stride + h * D + feature[None, :]
        tl.store(O + to, o.to(tl.bfloat16), mask=(local < valid)[:, None])
        tl.store(LSE + tl.cast(h, tl.int64) * lse_stride + row + local, lse, mask=local < valid)
