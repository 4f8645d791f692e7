"""The backward of the route `mxfp8`, in two passes without atomics: dQ by blocks of queries, dK and dV by blocks of keys.

    P = 2^(S - LSE2)    E = G V^T    U = P (E - D)    dQ += U K    dV += P^T G    dK += U^T Q

As in reference/: in full pairs, `strict` rounds the weights of dQ with one scale for a row of a block of keys, those of dV and
dK with one for a column of a block of queries, scales of the other operand folded in; `fast` has 32 x 32 squares on U and a
constant on P. At the mask's edge `strict` has 16 bits throughout, and reads dO from its codes there too.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .rounding import by_constant, by_line, gradient_weights
from .steps import full_keys, seen

DV_BOOST = tl.constexpr(256.0)  # 2^8: P of dV is at most 1


@triton.jit
def _dq_steps(lo, hi, dq, Q, G, qf, lse2, delta, query, keys, left, right, K, KF, KM, V, at, EDGE: tl.constexpr,
              MASK: tl.constexpr, STRICT: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, D: tl.constexpr):  # fmt: skip
    """Key blocks lo .. hi - 1; Q and G: where the queries' rows are."""
    feature = tl.arange(0, D)
    q, g = tl.load(Q), tl.load(G)
    for n in range(lo, hi):
        r = at + n * 128 + tl.arange(0, 128)
        key = n * 128 + tl.arange(0, 128)
        tile = r[:, None] * D + feature[None, :]
        k = tl.load(K + tile)
        p = tl.exp2(tl.dot(q, tl.trans(k)) * (qf[:, None] * tl.load(KM + r)[None, :]) - lse2[:, None])
        u = p * (tl.dot(g, tl.trans(tl.load(V + tile))) - delta[:, None])
        if MASK:
            u = tl.where(seen(query[:, None], key[None, :], keys, left, right, LEFT, RIGHT), u, 0.0)
        dq = tl.dot(gradient_weights(u, KF, r, EDGE, STRICT), k, dq)
    return dq


@triton.jit(do_not_specialize=["left", "right", "hq", "group"])
def dq_kernel(Q, QG, QF, QM, G, GF, GM, LSE2, DELTA, K, KG, KF, KM, V, VG, DQ, ITEMS, COUNTS, q_pad, k_pad, dq_stride, left,
              right, exponent, scale, hq, group, STRICT: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr,
              D: tl.constexpr, BM: tl.constexpr):  # fmt: skip
    """BM of the 128 queries of a block, of one head. Names as in forward.py."""
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
        qf = tl.load(QM + r) * tl.load(GM + r) * exponent
        lse2, delta = tl.load(LSE2 + r), tl.load(DELTA + r)
        query = position + local
        q, edge, g = Q + tile, QG + tile, G + tile
        full_first, full_end = full_keys(position, first, end, left, right, LEFT, RIGHT)
        inner = tl.maximum(tl.minimum(full_end, keys // 128), full_first)
        dq = tl.zeros([BM, D], tl.float32)
        if LEFT:
            dq = _dq_steps(first, full_first, dq, edge, g, qf, lse2, delta, query, keys, left, right, KG, KF, KM, VG, at, STRICT,
                           True, STRICT, LEFT, RIGHT, D)  # fmt: skip
        dq = _dq_steps(full_first, inner, dq, q, g, qf, lse2, delta, query, keys, left, right, K, KF, KM, V, at, False, False,
                       STRICT, LEFT, RIGHT, D)  # fmt: skip
        dq = _dq_steps(inner, full_end, dq, q, g, qf, lse2, delta, query, keys, left, right, K, KF, KM, V, at, False, True,
                       STRICT, LEFT, RIGHT, D)  # fmt: skip
        dq = _dq_steps(full_end, end, dq, edge, g, qf, lse2, delta, query, keys, left, right, KG, KF, KM, VG, at, STRICT, True,
                       STRICT, LEFT, RIGHT, D)  # fmt: skip
        to = (row + local).to(tl.int64)[:, None] * dq_stride + h * D + feature[None, :]
        tl.store(DQ + to, (dq * scale).to(tl.bfloat16), mask=(local < valid)[:, None])


@triton.jit
def _dkv_steps(lo, hi, dk, dv, K, V, kf, key, keys, shift, left, right, exponent, Q, QF, QM, G, GF, GM, LSE2, DELTA, at,
               EDGE: tl.constexpr, MASK: tl.constexpr, STRICT: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr,
               D: tl.constexpr):  # fmt: skip
    """Blocks of 128 queries lo .. hi - 1 of one head; tiles are transposed, keys by queries. K and V: where their rows are."""
    feature = tl.arange(0, D)
    k, v = tl.load(K), tl.load(V)
    for i in range(lo, hi):
        r = at + i * 128 + tl.arange(0, 128)
        query = shift + i * 128 + tl.arange(0, 128)
        tile = r[:, None] * D + feature[None, :]
        q = tl.load(Q + tile)
        qf = tl.load(QM + r) * tl.load(GM + r) * exponent
        p = tl.exp2(tl.dot(k, tl.trans(q)) * (kf[:, None] * qf[None, :]) - tl.load(LSE2 + r)[None, :])
        if MASK:
            visible = seen(query[None, :], key[:, None], keys, left, right, LEFT, RIGHT)
            p = tl.where(visible, p, 0.0)
        if EDGE:
            w = p.to(tl.bfloat16)
        elif STRICT:
            w = by_line(p, tl.load(GF + r))
        else:
            w = by_constant(p, DV_BOOST)
        g = tl.load(G + tile)
        dv = tl.dot(w, g, dv)
        u = p * (tl.dot(v, tl.trans(g)) - tl.load(DELTA + r)[None, :])
        if MASK:
            u = tl.where(visible, u, 0.0)
        dk = tl.dot(gradient_weights(u, QF, r, EDGE, STRICT), q, dk)
    return dk, dv


@triton.jit(do_not_specialize=["left", "right", "hk", "group"])
def dkv_kernel(Q, QG, QF, QM, G, GF, GM, LSE2, DELTA, K, KG, KF, KM, V, VG, DK, DV, ITEMS, COUNTS, q_pad, k_pad, dk_stride,
               left, right, exponent, scale, hk, group, STRICT: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr,
               D: tl.constexpr, BN: tl.constexpr):  # fmt: skip
    """BN of the 128 keys of a block, of one key head: all queries of all heads of its group, ascending."""
    rank = tl.program_id(0) // hk
    h = tl.program_id(0) % hk
    if rank < tl.load(COUNTS + 1):
        record = ITEMS + rank * 16
        row, valid, pad, k0 = tl.load(record), tl.load(record + 1), tl.load(record + 2), tl.load(record + 3)
        first, end, shift = tl.load(record + 6) // 2, (tl.load(record + 7) + 1) // 2, tl.load(record + 9)
        other = tl.load(record + 4)
        keys = k0 + valid
        local = tl.program_id(1) * BN + tl.arange(0, BN)
        r = tl.cast(h, tl.int64) * k_pad + pad + local
        feature = tl.arange(0, D)
        tile = r[:, None] * D + feature[None, :]
        kf = tl.load(KM + r)
        key = k0 + local
        k, v, edge_k, edge_v = K + tile, V + tile, KG + tile, VG + tile
        # Blocks of queries that see the whole block of keys; positions of queries are `shift` ahead of their rows. Such a pair
        # may hold keys behind the document's end where the right side is wide or open. In `strict` they disturb nobody: a
        # scale belongs to one key, and their rows are not stored. In a square of `fast` they would: there is a mask.
        full_first = first
        full_end = end
        if RIGHT:
            full_first = (tl.maximum(k0 + 127 - right - shift, 0) + 127) // 128
            full_first = tl.minimum(tl.maximum(full_first, first), end)
        if LEFT:
            full_end = tl.maximum(k0 + left - shift + 1, 0) // 128
            full_end = tl.minimum(tl.maximum(full_end, full_first), end)
        dk = tl.zeros([BN, D], tl.float32)
        dv = tl.zeros([BN, D], tl.float32)
        for g in range(group):
            at = tl.cast(h * group + g, tl.int64) * q_pad + other
            dk, dv = _dkv_steps(first, full_first, dk, dv, edge_k, edge_v, kf, key, keys, shift, left, right, exponent, QG, QF,
                                QM, G, GF, GM, LSE2, DELTA, at, STRICT, True, STRICT, LEFT, RIGHT, D)  # fmt: skip
            dk, dv = _dkv_steps(full_first, full_end, dk, dv, k, v, kf, key, keys, shift, left, right, exponent, Q, QF, QM, G,
                                GF, GM, LSE2, DELTA, at, False, not (RIGHT and STRICT), STRICT, LEFT, RIGHT, D)  # fmt: skip
            if LEFT:
                dk, dv = _dkv_steps(full_end, end, dk, dv, edge_k, edge_v, kf, key, keys, shift, left, right, exponent, QG, QF,
                                    QM, G, GF, GM, LSE2, DELTA, at, STRICT, True, STRICT, LEFT, RIGHT, D)  # fmt: skip
        to = (row + local).to(tl.int64)[:, None] * dk_stride + h * D + feature[None, :]
        mask = (local < valid)[:, None]
        tl.store(DK + to, (dk * scale).to(tl.bfloat16), mask=mask)
        tl.store(DV + to, dv.to(tl.bfloat16), mask=mask)
