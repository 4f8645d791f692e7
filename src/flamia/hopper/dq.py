"""The dQ pass: query blocks resident, keys walk by.

    S = Q K^T, E = G V^T   (E4M3 codes)        P' = exp2(S - LSE2)        U = P' (E - D')        dQ += U K   (BF16, FP32 sums)

The same weights as in the dK/dV pass (dkv.py), made again: two passes need no transposed U through shared memory, no
atomics and no order between CTAs, and dQ is summed in registers, ascending in the keys. One CTA holds 128 queries of one
head, two consumer warpgroups with 64 rows each. S and E of the next step are started before dQ of this one, so that the
next weights are made under it.
"""

from __future__ import annotations

from .common import SLOT_LAYOUT, SLOTS, agreed, announce, announced, fetch, key_groups, operand, pass_over, seen_keys
from .compat import fence_async_shared, gl, gluon, mbarrier, tma_load, warpgroup_mma, warpgroup_mma_wait


@gluon.jit
def dq_producer(q_desc, g_desc, a_desc, l_desc, d_desc, k_desc, v_desc, kb_desc, clean_desc, kf_desc, vf_desc, kg_desc,
                ITEMS, COUNTS, qs, gs, rows, ks, vs, kbs, kfs, vfs, kgs, slots, q_full, q_empty, full, empty, q_pad,
                k_pad, D: gl.constexpr, BN: gl.constexpr, ST: gl.constexpr, hq, group, width):  # fmt: skip
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
        draw = gl.maximum(first, end - 3)
        for n in range(first, end):
            if n == draw:  # in good time: 5% of this pass on short documents, and a loss in the other two
                t = gl.atomic_add(COUNTS + 9, 1)
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
def gradient(x, e, kf, vf, a, lse, d, seen, MASK: gl.constexpr):
    """U of one step, before rounding."""
    p = gl.exp2((x * kf[None, :]) * a[:, None] - lse[:, None])
    if MASK:
        p = gl.where(seen, p, 0.0)
    u = p * (e * vf[None, :] - d[:, None])
    if MASK:
        u = gl.where(seen, u, 0.0)
    return u


@gluon.jit
def dq_steps(lo, hi, i, u, dq, q, g, a, lse, d, row, zero, lk, left, right, ks, vs, kbs, kfs, vfs, kgs, full, empty,
             MASK: gl.constexpr, LEFT: gl.constexpr, BN: gl.constexpr, ST: gl.constexpr, SL: gl.constexpr,
             DOT: gl.constexpr):  # fmt: skip
    """Steps lo .. hi - 1; u is the rounded U of the step before, whose product with K runs under this step's weights."""
    cl: gl.constexpr = gl.SliceLayout(0, SL)
    for n in range(lo, hi):
        s = i % ST
        sp = (i + ST - 1) % ST
        mbarrier.wait(full.index(s), (i // ST) & 1)
        if MASK:
            kf = kfs.index(s).load(cl)
        else:
            one = agreed(kgs.index(s), BN // 32)
        vf = vfs.index(s).load(cl)
        ts = warpgroup_mma(q, ks.index(s).permute((1, 0)), zero, use_acc=False, is_async=True)
        tp = warpgroup_mma(g, vs.index(s).permute((1, 0)), zero, use_acc=False, is_async=True)
        td = warpgroup_mma(u, kbs.index(sp), dq, is_async=True)
        x = warpgroup_mma_wait(2, deps=[ts])
        if MASK:
            seen = seen_keys(row, n, lk, left, right, LEFT, BN, SL, False)
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
def dq_consumer(c, DQ, qs, gs, rows, ks, vs, kbs, kfs, vfs, kgs, slots, q_full, q_empty, full, empty, scale, left, right,
                hq, D: gl.constexpr, BN: gl.constexpr, ST: gl.constexpr, LEFT: gl.constexpr, HOLD: gl.constexpr):  # fmt: skip
    SL: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 32])
    OL: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    DOT: gl.constexpr = gl.DotOperandLayout(0, OL, 2)
    RL: gl.constexpr = gl.SliceLayout(1, SL)
    BL: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    zero = gl.full([64, BN], 0.0, gl.float32, layout=SL)
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
        # of the CTA's steps those that a row of this warpgroup sees, and of these the ones that all its rows see whole
        top = position + c * 64
        stop = gl.where(top + 63 + right < 0, 0, gl.maximum(top + 63 + right, 0) // BN + 1)
        stop = gl.where(c * 64 < valid, gl.maximum(gl.minimum(stop, end), first), first)
        full_end = gl.minimum(gl.maximum(top + right + 1, 0) // BN, lk // BN)
        full_end = gl.minimum(gl.maximum(full_end, first), stop)
        full_first = first
        if LEFT:
            full_first = (gl.maximum(top + 63 - left, 0) + BN - 1) // BN
            full_first = gl.minimum(gl.maximum(full_first, first), full_end)
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
        if first < stop:
            s = i % ST
            mbarrier.wait(full.index(s), (i // ST) & 1)
            ts = warpgroup_mma(q, ks.index(s).permute((1, 0)), zero, use_acc=False, is_async=True)
            tp = warpgroup_mma(g, vs.index(s).permute((1, 0)), zero, use_acc=False, is_async=True)
            kf = kfs.index(s).load(gl.SliceLayout(0, SL))
            vf = vfs.index(s).load(gl.SliceLayout(0, SL))
            seen = seen_keys(row, first, lk, left, right, LEFT, BN, SL, False)
            x = warpgroup_mma_wait(1, deps=[ts])
            e = warpgroup_mma_wait(0, deps=[tp])
            w = gradient(x, e, kf, vf, a, lse, d, seen, True)
            u = operand(w, DOT)
            i += 1
            if LEFT:
                i, u, dq = dq_steps(first + 1, full_first, i, u, dq, q, g, a, lse, d, row, zero, lk, left, right,
                                    ks, vs, kbs, kfs, vfs, kgs, full, empty, True, LEFT, BN, ST, SL, DOT)  # fmt: skip
            i, u, dq = dq_steps(gl.maximum(first + 1, full_first), full_end, i, u, dq, q, g, a, lse, d, row, zero,
                                lk, left, right, ks, vs, kbs, kfs, vfs, kgs, full, empty, False, LEFT, BN, ST, SL,
                                DOT)  # fmt: skip
            i, u, dq = dq_steps(gl.maximum(first + 1, full_end), stop, i, u, dq, q, g, a, lse, d, row, zero, lk,
                                left, right, ks, vs, kbs, kfs, vfs, kgs, full, empty, True, LEFT, BN, ST, SL, DOT)  # fmt: skip
            sp = (i + ST - 1) % ST
            td = warpgroup_mma(u, kbs.index(sp), dq, is_async=True)
            dq = warpgroup_mma_wait(0, deps=[td])
            mbarrier.arrive(empty.index(sp), count=1)
        i = pass_over(gl.maximum(end - stop, 0), i, full, empty, ST)
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
def dq_kernel(q_desc, g_desc, a_desc, l_desc, d_desc, k_desc, v_desc, kb_desc, clean_desc, kf_desc, vf_desc, kg_desc, DQ,
              ITEMS, COUNTS, q_pad, k_pad, scale, left, right, hq, group, width, D: gl.constexpr, BN: gl.constexpr,
              ST: gl.constexpr,  LEFT: gl.constexpr, HOLD: gl.constexpr):  # fmt: skip
    F8: gl.constexpr = gl.float8e4nv
    qs = gl.allocate_shared_memory(F8, [2, 64, D], q_desc.layout)
    gs = gl.allocate_shared_memory(F8, [2, 64, D], g_desc.layout)
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
    full = gl.allocate_shared_memory(gl.int64, [ST, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [ST, 1], mbarrier.MBarrierLayout())
    mbarrier.init(q_full, 1)
    mbarrier.init(q_empty, 2)
    for s in gl.static_range(ST):
        mbarrier.init(full.index(s), 1)
        mbarrier.init(empty.index(s), 2)
    fence_async_shared()
    gl.warp_specialize([
        (dq_consumer, (0, DQ, qs, gs, rows, ks, vs, kbs, kfs, vfs, kgs, slots, q_full, q_empty, full, empty, scale, left,
                       right, hq, D, BN, ST, LEFT, HOLD)),
        (dq_consumer, (1, DQ, qs, gs, rows, ks, vs, kbs, kfs, vfs, kgs, slots, q_full, q_empty, full, empty, scale, left,
                       right, hq, D, BN, ST, LEFT, HOLD)),
        (dq_producer, (q_desc, g_desc, a_desc, l_desc, d_desc, k_desc, v_desc, kb_desc, clean_desc, kf_desc, vf_desc,
                       kg_desc, ITEMS, COUNTS, qs, gs, rows, ks, vs, kbs, kfs, vfs, kgs, slots, q_full, q_empty, full,
                       empty, q_pad, k_pad, D, BN, ST, hq, group, width)),
    ], [4, 1], [240, 24])  # fmt: skip
