"""The dQ pass: query blocks resident, keys walk by.

    S = Q K^T, E = G V^T   (E4M3 codes)        P' = exp2(S - LSE2)        U = P' (E - D')        dQ += U K   (BF16, FP32 sums)

The same weights as in the dK/dV pass (dkv.py), made again: two passes need no transposed U through shared memory, no
atomics and no order between CTAs, and dQ is summed in registers: steps at the mask's right edge first, from the last one
down, then the others, ascending. So masks stand in steps before the main loop and nowhere behind it, and, with FRONTIER, so do
scores from Q as given, resident beside its codes, and the tiles of K as given that dQ reads anyway. One CTA holds 128 queries
of one head, two consumer warpgroups with 64 rows each. S and E of the next step are started before dQ of this one, so that the
next weights are made under it.
"""

from __future__ import annotations

from .common import (
    SLOT_LAYOUT,
    SLOTS,
    agreed,
    announce,
    announced,
    as_given,
    fetch,
    full_keys,
    key_groups,
    operand,
    pass_over,
    seen_keys,
)
from .compat import fence_async_shared, gl, gluon, mbarrier, tma_load, warpgroup_mma, warpgroup_mma_wait


@gluon.jit
def edge_steps(position, first, end, left, right, LEFT: gl.constexpr, BN: gl.constexpr):
    """Of the steps first .. end those whose key blocks are full pairs, from .. to."""
    each: gl.constexpr = 128 // BN
    full_first, full_end = full_keys(position, first // each, gl.cdiv(end, each), left, right, LEFT)
    return gl.minimum(full_first * each, end), gl.minimum(full_end * each, end)


@gluon.jit
def dq_producer(q_desc, g_desc, a_desc, l_desc, d_desc, k_desc, v_desc, kb_desc, clean_desc, kf_desc, vf_desc, kg_desc,
                qb_desc, ITEMS, COUNTS, qs, gs, qbs, rows, ks, vs, kbs, kfs, vfs, kgs, slots, q_full, q_empty, qb_full,
                qb_empty, full, empty, q_pad, k_pad, left, right, D: gl.constexpr, BN: gl.constexpr, ST: gl.constexpr,
                LEFT: gl.constexpr, FRONTIER: gl.constexpr, hq, group, width):  # fmt: skip
    blocks = gl.load(COUNTS)
    total = blocks * hq
    dirty = gl.load(COUNTS + 2)
    i = 0
    tile = 0
    t = gl.atomic_add(COUNTS + 9, 1)
    while t < total:
        h, out_row, valid, pad, position, other_pad, lk, first_block, end_block, k_row, _shift = fetch(
            ITEMS, t, blocks, hq, width
        )
        hk = h // group
        row = h * q_pad + pad
        base = hk * k_pad + other_pad
        first = first_block * (128 // BN)
        end = gl.minimum(end_block * (128 // BN), gl.cdiv(lk, BN))
        mbarrier.wait(q_empty, (tile & 1) ^ 1)
        announce(slots, 0, h)
        announce(slots, 1, out_row)
        announce(slots, 2, valid)
        announce(slots, 3, position)
        announce(slots, 4, lk)
        announce(slots, 5, first)
        announce(slots, 6, end)
        mbarrier.expect(q_full, 4 * 64 * D + 3 * 512)
        for c in gl.static_range(2):
            tma_load(a_desc, [row + c * 64], q_full, rows.index(c))
            tma_load(l_desc, [row + c * 64], q_full, rows.index(2 + c))
            tma_load(d_desc, [row + c * 64], q_full, rows.index(4 + c))
            tma_load(q_desc, [row + c * 64, 0], q_full, qs.index(c))
            tma_load(g_desc, [row + c * 64, 0], q_full, gs.index(c))
        tile += 1
        if FRONTIER:
            mbarrier.wait(qb_empty, (tile & 1))
            mbarrier.expect(qb_full, 4 * 64 * D)
            for c in gl.static_range(2):
                tma_load(qb_desc, [out_row + c * 64, h * D], qb_full, qbs.index(c))
        edge = gl.minimum(edge_steps(position, first, end, left, right, LEFT, BN)[1], lk // BN)
        draw = gl.maximum(first, end - 3)
        for j in range(first, end):
            if j == draw:  # in good time: 5% of this pass on short documents, and a loss in the other two
                t = gl.atomic_add(COUNTS + 9, 1)
            n = gl.where(j < first + end - edge, first + end - 1 - j, j - (end - edge))
            s = i % ST
            bar = full.index(s)
            mbarrier.wait(empty.index(s), ((i // ST) & 1) ^ 1)
            mbarrier.expect(bar, 4 * BN * D + 8 * BN + 128)
            at = base + n * BN
            tma_load(k_desc, [at, 0], bar, ks.index(s))
            tma_load(v_desc, [at, 0], bar, vs.index(s))
            tma_load(kf_desc, [at], bar, kfs.index(s))
            tma_load(kg_desc, [at // 16], bar, kgs.index(s))
            tma_load(vf_desc, [at], bar, vfs.index(s))
            if dirty != 0:
                tma_load(clean_desc, [k_row + n * BN, hk * D], bar, kbs.index(s))
            else:
                tma_load(kb_desc, [k_row + n * BN, hk * D], bar, kbs.index(s))
            i += 1
        if first >= end:
            t = gl.atomic_add(COUNTS + 9, 1)
    mbarrier.wait(q_empty, (tile & 1) ^ 1)
    announce(slots, 0, -1)
    mbarrier.arrive(q_full, count=1)


@gluon.jit
def first_step(q, g, k, v, kf, vf, a, lse, d, seen, zero_s, zero):
    """U of an item's first step, before rounding; nothing is under way."""
    ts = warpgroup_mma(q, k.permute((1, 0)), zero_s, use_acc=False, is_async=True)
    tp = warpgroup_mma(g, v.permute((1, 0)), zero, use_acc=False, is_async=True)
    x = gl.convert_layout(warpgroup_mma_wait(1, deps=[ts]), zero.type.layout, assert_trivial=True)
    e = warpgroup_mma_wait(0, deps=[tp])
    p = gl.where(seen, gl.exp2((x * kf[None, :]) * a[:, None] - lse[:, None]), 0.0)
    return gl.where(seen, p * (e * vf[None, :] - d[:, None]), 0.0)


@gluon.jit
def dq_steps(lo, hi, i, u, dq, q, g, a, lse, d, row, zero, zero_s, lk, left, right, ks, vs, kbs, kfs, vfs, kgs, full,
             empty, MASK: gl.constexpr, WIDE: gl.constexpr, DOWN: gl.constexpr, LEFT: gl.constexpr, BN: gl.constexpr,
             ST: gl.constexpr, SL: gl.constexpr, DOT: gl.constexpr):  # fmt: skip
    """Steps lo .. hi - 1, or hi - 1 .. lo if DOWN; u is the rounded U of the step before, whose product with K runs under
    this step's weights. WIDE: q is Q as given, and a and zero_s go with it."""
    cl: gl.constexpr = gl.SliceLayout(0, SL)
    for n in range(lo, hi):
        s = i % ST
        sp = (i + ST - 1) % ST
        mbarrier.wait(full.index(s), (i // ST) & 1)
        if MASK:
            kf = kfs.index(s).load(cl)
            if WIDE:
                kf = as_given(kf, 1.0)
        else:
            one = agreed(kgs.index(s), BN // 32)
        vf = vfs.index(s).load(cl)
        if WIDE:
            ts = warpgroup_mma(q, kbs.index(s).permute((1, 0)), zero_s, use_acc=False, is_async=True)
        else:
            ts = warpgroup_mma(q, ks.index(s).permute((1, 0)), zero_s, use_acc=False, is_async=True)
        tp = warpgroup_mma(g, vs.index(s).permute((1, 0)), zero, use_acc=False, is_async=True)
        td = warpgroup_mma(u, kbs.index(sp), dq, is_async=True)
        x = warpgroup_mma_wait(2, deps=[ts])
        if WIDE:
            x = gl.convert_layout(x, SL, assert_trivial=True)
        if MASK:
            at = lo + hi - 1 - n if DOWN else n
            seen = seen_keys(row, at, lk, left, right, LEFT, BN, SL, False)
            p = gl.exp2((x * kf[None, :]) * a[:, None] - lse[:, None])
            p = gl.where(seen, p, 0.0)
        elif one:
            p = gl.exp2(key_groups(x, kgs.index(s), a, lse))
        else:
            kf = kfs.index(s).load(cl)
            p = gl.exp2((x * kf[None, :]) * a[:, None] - lse[:, None])
        e = warpgroup_mma_wait(1, deps=[tp])
        w = p * (e * vf[None, :] - d[:, None])
        if MASK:
            w = gl.where(seen, w, 0.0)
        dq = warpgroup_mma_wait(0, deps=[td])
        mbarrier.arrive(empty.index(sp), count=1)
        u = operand(w, DOT)
        i += 1
    return i, u, dq


@gluon.jit
def dq_consumer(c, DQ, qs, gs, qbs, rows, ks, vs, kbs, kfs, vfs, kgs, slots, q_full, q_empty, qb_full, qb_empty, full,
                empty, scale, unit, left, right, hq, D: gl.constexpr, BN: gl.constexpr, ST: gl.constexpr,
                LEFT: gl.constexpr, HOLD: gl.constexpr, FRONTIER: gl.constexpr):  # fmt: skip
    SL: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 32])
    OL: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    DOT: gl.constexpr = gl.DotOperandLayout(0, OL, 2)
    RL: gl.constexpr = gl.SliceLayout(1, SL)
    BL: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    WL: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    zero = gl.full([64, BN], 0.0, gl.float32, layout=SL)
    zero_wide = gl.full([64, BN], 0.0, gl.float32, layout=WL)
    i = 0
    tile = 0
    mbarrier.wait(q_full, 0)
    h = announced(slots, 0)
    while h >= 0:
        out_row = announced(slots, 1)
        valid = announced(slots, 2)
        position = announced(slots, 3)
        lk = announced(slots, 4)
        first = announced(slots, 5)
        end = announced(slots, 6)
        # the CTA's steps come in the order end - 1 .. edge, first .. edge - 1. Of them those that a row of this warpgroup sees
        top = position + c * 64
        stop = gl.where(top + 63 + right < 0, 0, gl.maximum(top + 63 + right, 0) // BN + 1)
        stop = gl.where(c * 64 < valid, gl.maximum(gl.minimum(stop, end), first), first)
        full_first, full_end = edge_steps(position, first, end, left, right, LEFT, BN)
        edge = gl.minimum(full_end, lk // BN)
        local = c * 64 + gl.arange(0, 64, layout=RL)
        row = position + local
        a = rows.index(c).load(RL)
        lse = rows.index(2 + c).load(RL)
        d = rows.index(4 + c).load(RL)
        if HOLD:
            q = qs.index(c).load(gl.DotOperandLayout(0, SL, 4))
            g = gs.index(c).load(gl.DotOperandLayout(0, SL, 4))
            mbarrier.arrive(q_empty, count=1)  # all is in registers: the next item's may come
        else:
            q = qs.index(c)
            g = gs.index(c)
        dq = gl.full([64, D], 0.0, gl.float32, layout=OL)
        if FRONTIER:
            q_given = qbs.index(c)
            a_given = as_given(a, unit)
            mbarrier.wait(qb_full, tile & 1)
        i = pass_over(gl.maximum(end - stop, 0), i, full, empty, ST)
        if first < stop:
            s = i % ST
            mbarrier.wait(full.index(s), (i // ST) & 1)
            kf = kfs.index(s).load(gl.SliceLayout(0, SL))
            vf = vfs.index(s).load(gl.SliceLayout(0, SL))
            own = gl.where(edge < end, stop - 1, first)
            start = gl.where(edge < end, first, first + 1)
            seen = seen_keys(row, own, lk, left, right, LEFT, BN, SL, False)
            if FRONTIER == 0:
                w = first_step(q, g, ks.index(s), vs.index(s), kf, vf, a, lse, d, seen, zero, zero)
            elif (own < full_first) | (own >= full_end):
                w = first_step(q_given, g, kbs.index(s), vs.index(s), as_given(kf, 1.0), vf, a_given, lse, d, seen,
                               zero_wide, zero)  # fmt: skip
            else:
                w = first_step(q, g, ks.index(s), vs.index(s), kf, vf, a, lse, d, seen, zero, zero)
            u = operand(w, DOT)
            i += 1
            if FRONTIER:
                i, u, dq = dq_steps(edge, stop - 1, i, u, dq, q_given, g, a_given, lse, d, row, zero, zero_wide, lk, left,
                                    right, ks, vs, kbs, kfs, vfs, kgs, full, empty, True, True, True, LEFT, BN, ST, SL,
                                    DOT)  # fmt: skip
                if LEFT:
                    full_first = gl.minimum(full_first, edge)
                    i, u, dq = dq_steps(start, full_first, i, u, dq, q_given, g, a_given, lse, d, row, zero, zero_wide, lk,
                                        left, right, ks, vs, kbs, kfs, vfs, kgs, full, empty, True, True, False, LEFT, BN,
                                        ST, SL, DOT)  # fmt: skip
                    start = gl.maximum(start, full_first)
            elif LEFT:
                i, u, dq = dq_steps(edge, stop - 1, i, u, dq, q, g, a, lse, d, row, zero, zero, lk, left, right, ks, vs,
                                    kbs, kfs, vfs, kgs, full, empty, True, False, True, LEFT, BN, ST, SL, DOT)  # fmt: skip
                full_first = gl.minimum((gl.maximum(top + 63 - left, 0) + BN - 1) // BN, edge)
                i, u, dq = dq_steps(start, full_first, i, u, dq, q, g, a, lse, d, row, zero, zero, lk, left, right, ks, vs,
                                    kbs, kfs, vfs, kgs, full, empty, True, False, False, LEFT, BN, ST, SL, DOT)  # fmt: skip
                start = gl.maximum(start, full_first)
            else:  # what all rows of this warpgroup see whole at the edge is counted to the steps without a mask
                whole = gl.maximum(gl.minimum(gl.maximum(top + right + 1, 0) // BN, stop - 1), edge)
                i, u, dq = dq_steps(whole, stop - 1, i, u, dq, q, g, a, lse, d, row, zero, zero, lk, left, right, ks, vs,
                                    kbs, kfs, vfs, kgs, full, empty, True, False, True, LEFT, BN, ST, SL, DOT)  # fmt: skip
                start -= whole - edge
            i, u, dq = dq_steps(start, edge, i, u, dq, q, g, a, lse, d, row, zero, zero, lk, left, right, ks, vs, kbs, kfs,
                                vfs, kgs, full, empty, False, False, False, LEFT, BN, ST, SL, DOT)  # fmt: skip
            sp = (i + ST - 1) % ST
            td = warpgroup_mma(u, kbs.index(sp), dq, is_async=True)
            dq = warpgroup_mma_wait(0, deps=[td])
            mbarrier.arrive(empty.index(sp), count=1)
        if FRONTIER:
            mbarrier.arrive(qb_empty, count=1)
        if not HOLD:
            mbarrier.arrive(q_empty, count=1)
        out = gl.convert_layout((dq * scale).to(gl.bfloat16), BL)
        ro = c * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, BL))
        co = gl.arange(0, D, layout=gl.SliceLayout(0, BL))
        to = (out_row + ro).to(gl.int64)[:, None] * (hq * D) + (h * D + co)[None, :]
        gl.store(DQ + to, out, mask=(ro < valid)[:, None])
        tile += 1
        mbarrier.wait(q_full, tile & 1)
        h = announced(slots, 0)


@gluon.jit(do_not_specialize=["left", "right", "hq", "group", "width"])
def dq_kernel(q_desc, g_desc, a_desc, l_desc, d_desc, k_desc, v_desc, kb_desc, clean_desc, kf_desc, vf_desc, kg_desc,
              qb_desc, DQ, ITEMS, COUNTS, q_pad, k_pad, scale, unit, left, right, hq, group, width, D: gl.constexpr,
              BN: gl.constexpr, ST: gl.constexpr,  LEFT: gl.constexpr, HOLD: gl.constexpr,
              FRONTIER: gl.constexpr):  # fmt: skip
    F8: gl.constexpr = gl.float8e4nv
    qs = gl.allocate_shared_memory(F8, [2, 64, D], q_desc.layout)
    gs = gl.allocate_shared_memory(F8, [2, 64, D], g_desc.layout)
    if FRONTIER:
        qbs = gl.allocate_shared_memory(gl.bfloat16, [2, 64, D], qb_desc.layout)
    else:
        qbs = qs
    rows = gl.allocate_shared_memory(gl.float32, [6, 64], a_desc.layout)  # factors, LSE2 and D' of the two warpgroups
    ks = gl.allocate_shared_memory(F8, [ST, BN, D], k_desc.layout)
    vs = gl.allocate_shared_memory(F8, [ST, BN, D], v_desc.layout)
    kbs = gl.allocate_shared_memory(gl.bfloat16, [ST, BN, D], kb_desc.layout)
    kfs = gl.allocate_shared_memory(gl.float32, [ST, BN], kf_desc.layout)
    vfs = gl.allocate_shared_memory(gl.float32, [ST, BN], vf_desc.layout)
    kgs = gl.allocate_shared_memory(gl.float32, [ST, 32], kg_desc.layout)
    slots = gl.allocate_shared_memory(gl.int32, [SLOTS, 1], SLOT_LAYOUT)
    q_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    qb_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    qb_empty = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    full = gl.allocate_shared_memory(gl.int64, [ST, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [ST, 1], mbarrier.MBarrierLayout())
    mbarrier.init(q_full, 1)
    mbarrier.init(q_empty, 2)
    mbarrier.init(qb_full, 1)
    mbarrier.init(qb_empty, 2)
    for s in gl.static_range(ST):
        mbarrier.init(full.index(s), 1)
        mbarrier.init(empty.index(s), 2)
    fence_async_shared()
    gl.warp_specialize([
        (dq_consumer, (0, DQ, qs, gs, qbs, rows, ks, vs, kbs, kfs, vfs, kgs, slots, q_full, q_empty, qb_full, qb_empty,
                       full, empty, scale, unit, left, right, hq, D, BN, ST, LEFT, HOLD, FRONTIER)),
        (dq_consumer, (1, DQ, qs, gs, qbs, rows, ks, vs, kbs, kfs, vfs, kgs, slots, q_full, q_empty, qb_full, qb_empty,
                       full, empty, scale, unit, left, right, hq, D, BN, ST, LEFT, HOLD, FRONTIER)),
        (dq_producer, (q_desc, g_desc, a_desc, l_desc, d_desc, k_desc, v_desc, kb_desc, clean_desc, kf_desc, vf_desc,
                       kg_desc, qb_desc, ITEMS, COUNTS, qs, gs, qbs, rows, ks, vs, kbs, kfs, vfs, kgs, slots, q_full,
                       q_empty, qb_full, qb_empty, full, empty, q_pad, k_pad, left, right, D, BN, ST, LEFT, FRONTIER, hq,
                       group, width)),
    ], [4, 1], [240, 24])  # fmt: skip
