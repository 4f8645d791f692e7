"""The dK/dV pass: key blocks resident, queries walk by.

    S^T = K Q^T, E^T = V G^T   (E4M3 codes)          P'^T = exp2(S^T - LSE2)     U^T = P'^T (E^T - D')
    dV += P'^T G_codes, dK += U^T Q                  (BF16 operands, FP32 sums)

P' is P times 2^e(G): the exponent of dO's token scale sits in LSE2, so that G can be read as its codes, D' is D / 2^e(G),
and E^T needs no factor per column (see quantize.py). U is the true one.

One CTA holds 128 keys of one key head: two consumer warpgroups with 64 keys each, whose dV and dK (64 x D each, FP32) stay
in registers while all queries of all heads of the group pass in steps of 64, ascending: no atomics, one order. A operands
of the two 16-bit products come straight from registers. No product is under way across the end of a step: ptxas would
serialise all of them; a step's U crosses it instead, as the operand of a product that the next step starts.

FRONTIER (`frontier_scores=bf16`): steps at the mask's edge make S from K as given, resident beside its codes, and from the tile
of Q as given that dK reads anyway. All its steps start S before the product of the last step's U (EARLY): in the other order
the assembler puts addresses between the parts of S, and the other warpgroup's products come in between (docs/lab-log.md).
"""

from __future__ import annotations

from .common import SLOT_LAYOUT, SLOTS, announce, announced, as_given, fetch, operand, store_quarters
from .compat import fence_async_shared, gl, gluon, mbarrier, tma_load, warpgroup_mma, warpgroup_mma_wait


@gluon.jit
def dkv_producer(k_desc, v_desc, kf_desc, vf_desc, q_desc, g_desc, qb_desc, clean_desc, gb_desc, f_desc, l_desc,
                 d_desc, kb_desc, ITEMS, COUNTS, ks, vs, kbs, rows, qs, gs, qbs, gbs, fs, ls, ds, slots, kv_full, kv_empty,
                 full, empty, q_pad, k_pad, D: gl.constexpr, BM: gl.constexpr, ST: gl.constexpr, FRONTIER: gl.constexpr,
                 heads, group, width):  # fmt: skip
    blocks = gl.load(COUNTS + 1)
    total = blocks * heads
    dirty = gl.load(COUNTS + 2)
    i = 0
    tile = 0
    t = gl.atomic_add(COUNTS + 8, 1)
    while t < total:
        hk, out_row, valid, own_pad, k0, pad, _lq, first, end, q_row, shift = fetch(ITEMS, t, blocks, heads, width)
        row = hk * k_pad + own_pad
        mbarrier.wait(kv_empty, (tile & 1) ^ 1)
        announce(slots, 0, hk)
        announce(slots, 1, out_row)
        announce(slots, 2, valid)
        announce(slots, 3, k0)
        announce(slots, 4, shift)
        announce(slots, 5, first)
        announce(slots, 6, end)
        mbarrier.expect(kv_full, (8 if FRONTIER else 4) * 64 * D + 2 * 512)
        for c in gl.static_range(2):
            if FRONTIER:
                tma_load(kb_desc, [out_row + c * 64, hk * D], kv_full, kbs.index(c))
            tma_load(kf_desc, [row + c * 64], kv_full, rows.index(c))
            tma_load(vf_desc, [row + c * 64], kv_full, rows.index(2 + c))
            tma_load(k_desc, [row + c * 64, 0], kv_full, ks.index(c))
            tma_load(v_desc, [row + c * 64, 0], kv_full, vs.index(c))
        tile += 1
        for h in range(hk * group, (hk + 1) * group):
            base = h * q_pad + pad
            for m in range(first, end):
                s = i % ST
                bar = full.index(s)
                mbarrier.wait(empty.index(s), ((i // ST) & 1) ^ 1)
                mbarrier.expect(bar, 6 * BM * D + 12 * BM)
                at = base + m * BM
                tma_load(q_desc, [at, 0], bar, qs.index(s))
                tma_load(g_desc, [at, 0], bar, gs.index(s))
                tma_load(f_desc, [at], bar, fs.index(s))
                tma_load(l_desc, [at], bar, ls.index(s))
                tma_load(d_desc, [at], bar, ds.index(s))
                tma_load(gb_desc, [at, 0], bar, gbs.index(s))
                if dirty != 0:
                    tma_load(clean_desc, [q_row + m * BM, h * D], bar, qbs.index(s))
                else:
                    tma_load(qb_desc, [q_row + m * BM, h * D], bar, qbs.index(s))
                i += 1
        t = gl.atomic_add(COUNTS + 8, 1)
    mbarrier.wait(kv_empty, (tile & 1) ^ 1)
    announce(slots, 0, -1)
    mbarrier.arrive(kv_full, count=1)


@gluon.jit
def seen_pairs(key, m, shift, left, right, LEFT: gl.constexpr, BM: gl.constexpr, SL: gl.constexpr):
    """Which (key, query) pairs of a step are visible: query positions key - right .. key + left."""
    position = shift + m * BM + gl.arange(0, BM, layout=gl.SliceLayout(0, SL))
    seen = position[None, :] >= (key - right)[:, None]
    if LEFT:
        seen = seen & (position[None, :] <= (key + left)[:, None])
    return seen


@gluon.jit
def weights(x, key_factor, f, lse, seen, MASK: gl.constexpr):
    p = gl.exp2(x * (key_factor[:, None] * f[None, :]) - lse[None, :])
    if MASK:
        p = gl.where(seen, p, 0.0)
    return p


@gluon.jit
def dkv_steps(lo, hi, last, i, u, dk, dv, k, v, kf, vf, key, zero, zero_s, shift, left, right, qs, gs, qbs, gbs, fs, ls,
              ds, full, empty, MASK: gl.constexpr, WIDE: gl.constexpr, LEFT: gl.constexpr, FIRST: gl.constexpr,
              EARLY: gl.constexpr, BM: gl.constexpr, ST: gl.constexpr, SL: gl.constexpr, DOT: gl.constexpr):  # fmt: skip
    """Steps lo .. hi - 1. u is the rounded U^T of the step before (unless FIRST), whose product with Q is started before
    this step's S^T and E^T. `last` is the number of the item's last step; each step awaits the tiles of the next. WIDE: k
    is K as given, and kf and zero_s go with it."""
    cl: gl.constexpr = gl.SliceLayout(0, SL)
    for m in range(lo, hi):
        s = i % ST
        sp = (i + ST - 1) % ST
        if not (FIRST or EARLY):
            tk = warpgroup_mma(u, qbs.index(sp), dk, is_async=True)
        if WIDE:
            ts = warpgroup_mma(k, qbs.index(s).permute((1, 0)), zero_s, use_acc=False, is_async=True)
        else:
            ts = warpgroup_mma(k, qs.index(s).permute((1, 0)), zero_s, use_acc=False, is_async=True)
        if EARLY and not FIRST:
            tk = warpgroup_mma(u, qbs.index(sp), dk, is_async=True)
        tp = warpgroup_mma(v, gs.index(s).permute((1, 0)), zero, use_acc=False, is_async=True)
        if FIRST:
            x = warpgroup_mma_wait(1, deps=[ts])
        else:
            x, dk = warpgroup_mma_wait(1, deps=[ts, tk])
            mbarrier.arrive(empty.index(sp), count=1)
        # read after the wait: the sums and both score tiles leave no registers for them before it
        f = fs.index(s).load(cl)
        if WIDE:
            f = as_given(f, 1.0)
            x = gl.convert_layout(x, SL, assert_trivial=True)
        lse = ls.index(s).load(cl)
        seen = seen_pairs(key, m, shift, left, right, LEFT, BM, SL)
        if WIDE:  # Q as given goes on behind the document's end, where LSE2 is infinite: inf - inf would be NaN
            seen = seen & (lse[None, :] != float("inf"))
        p = weights(x, kf, f, lse, seen, MASK)
        tv = warpgroup_mma(operand(p, DOT), gbs.index(s), dv, is_async=True)
        e = warpgroup_mma_wait(1, deps=[tp])
        d = ds.index(s).load(cl)
        w = p * (e * vf[:, None] - d[None, :])
        if MASK:
            w = gl.where(seen, w, 0.0)
        # this wait's branch also keeps the assembler from moving U behind the join, where no product runs
        mbarrier.wait(full.index((i + 1) % ST), ((i + 1) // ST) & 1, pred=i < last)
        dv, w = warpgroup_mma_wait(0, deps=[tv, w])
        u = operand(w, DOT)
        i += 1
    return i, u, dk, dv


@gluon.jit
def dkv_consumer(c, DK, DV, ks, vs, kbs, rows, qs, gs, qbs, gbs, fs, ls, ds, slots, kv_full, kv_empty, full, empty,
                 scale, unit, left, right, heads, group, D: gl.constexpr, BM: gl.constexpr, ST: gl.constexpr,
                 LEFT: gl.constexpr, FRONTIER: gl.constexpr):  # fmt: skip
    SL: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BM, 32])
    OL: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    DOT: gl.constexpr = gl.DotOperandLayout(0, OL, 2)
    RL: gl.constexpr = gl.SliceLayout(1, SL)
    PARTS: gl.constexpr = 4 if FRONTIER else 1  # in which results are written: K as given leaves little memory for it
    BL: gl.constexpr = gl.BlockedLayout([1, 8], [PARTS * 256 // D, D // 8 // PARTS], [4, 1], [1, 0])
    WL: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BM, 16])
    zero = gl.full([64, BM], 0.0, gl.float32, layout=SL)
    if FRONTIER:
        zero_edge = gl.full([64, BM], 0.0, gl.float32, layout=WL)
        k_edge = kbs.index(c)
    else:
        zero_edge = zero
        k_edge = ks.index(c)
    k = ks.index(c)
    v = vs.index(c)
    i = 0
    tile = 0
    mbarrier.wait(kv_full, 0)
    hk = announced(slots, 0)
    while hk >= 0:
        out_row = announced(slots, 1)
        valid = announced(slots, 2)
        k0 = announced(slots, 3)
        shift = announced(slots, 4)
        first = announced(slots, 5)
        end = announced(slots, 6)
        # the query steps whose every row sees all 128 keys: by blocks of 128 positions where the others read Q and K as given
        STEP: gl.constexpr = 128 if FRONTIER else BM
        full_first = (gl.maximum(k0 + 127 - right - shift, 0) + STEP - 1) // STEP * (STEP // BM)
        full_first = gl.minimum(gl.maximum(full_first, first), end)
        full_end = end
        if LEFT:
            full_end = gl.maximum(k0 + left - shift + 1, 0) // STEP * (STEP // BM)
            full_end = gl.minimum(gl.maximum(full_end, full_first), end)
        local = c * 64 + gl.arange(0, 64, layout=RL)
        key = k0 + local
        kf = rows.index(c).load(RL)
        vf = rows.index(2 + c).load(RL)
        kf_edge = kf
        if FRONTIER:
            kf_edge = as_given(kf, unit)
        dk = gl.full([64, D], 0.0, gl.float32, layout=OL)
        dv = gl.full([64, D], 0.0, gl.float32, layout=OL)
        if first < end:
            last = i + (end - first) * group - 1
            mbarrier.wait(full.index(i % ST), (i // ST) & 1)
            # the first step of all, whose mask is evaluated whether it needs it or not
            u = gl.full([64, BM], 0.0, gl.bfloat16, layout=DOT)
            start = first
            if FRONTIER:
                at_edge = (first < full_first) | (first >= full_end)
                start = gl.where(at_edge, first + 1, first)
                i, u, dk, dv = dkv_steps(
                    first, start, last, i, u, dk, dv, k_edge, v, kf_edge, vf, key, zero, zero_edge, shift, left, right, qs, gs,
                    qbs, gbs, fs, ls, ds, full, empty, True, True, LEFT, True, FRONTIER, BM, ST, SL, DOT)  # fmt: skip
            i, u, dk, dv = dkv_steps(
                start, first + 1, last, i, u, dk, dv, k, v, kf, vf, key, zero, zero, shift, left, right, qs, gs,
                qbs, gbs, fs, ls, ds, full, empty, True, False, LEFT, True, FRONTIER, BM, ST, SL, DOT)  # fmt: skip
            start = first + 1
            for _g in range(group):
                i, u, dk, dv = dkv_steps(
                    start, full_first, last, i, u, dk, dv, k_edge, v, kf_edge, vf, key, zero, zero_edge, shift, left, right,
                    qs, gs, qbs, gbs, fs, ls, ds, full, empty, True, FRONTIER, LEFT, False, FRONTIER, BM, ST, SL,
                    DOT)  # fmt: skip
                i, u, dk, dv = dkv_steps(
                    gl.maximum(start, full_first), full_end, last, i, u, dk, dv, k, v, kf, vf, key, zero, zero,
                    shift, left, right, qs, gs, qbs, gbs, fs, ls, ds, full, empty, False, False, LEFT, False,
                    FRONTIER, BM, ST, SL, DOT)  # fmt: skip
                if LEFT:
                    i, u, dk, dv = dkv_steps(
                        gl.maximum(start, full_end), end, last, i, u, dk, dv, k_edge, v, kf_edge, vf, key, zero, zero_edge,
                        shift, left, right, qs, gs, qbs, gbs, fs, ls, ds, full, empty, True, FRONTIER, LEFT, False,
                        FRONTIER, BM, ST, SL, DOT)  # fmt: skip
                start = first
            sp = (i + ST - 1) % ST
            tk = warpgroup_mma(u, qbs.index(sp), dk, is_async=True)
            dk = warpgroup_mma_wait(0, deps=[tk])
            mbarrier.arrive(empty.index(sp), count=1)
        mbarrier.arrive(kv_empty, count=1)
        ro = c * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, BL))
        co = gl.arange(0, D // PARTS, layout=gl.SliceLayout(0, BL))
        to = (out_row + ro).to(gl.int64)[:, None] * (heads * D) + (hk * D + co)[None, :]
        if PARTS == 1:
            gl.store(DV + to, gl.convert_layout(dv.to(gl.bfloat16), BL), mask=(ro < valid)[:, None])
            gl.store(DK + to, gl.convert_layout((dk * scale).to(gl.bfloat16), BL), mask=(ro < valid)[:, None])
        else:
            store_quarters(DV + to, dv.to(gl.bfloat16), (ro < valid)[:, None], D, BL)
            store_quarters(DK + to, (dk * scale).to(gl.bfloat16), (ro < valid)[:, None], D, BL)
        tile += 1
        mbarrier.wait(kv_full, tile & 1)
        hk = announced(slots, 0)


@gluon.jit(do_not_specialize=["left", "right", "heads", "group", "width"])
def dkv_kernel(k_desc, v_desc, kf_desc, vf_desc, q_desc, g_desc, qb_desc, clean_desc, gb_desc, f_desc, l_desc,
               d_desc, kb_desc, DK, DV, ITEMS, COUNTS, q_pad, k_pad, scale, unit, left, right, heads, group, width,
               D: gl.constexpr, BM: gl.constexpr, ST: gl.constexpr, LEFT: gl.constexpr,
               FRONTIER: gl.constexpr):  # fmt: skip
    F8: gl.constexpr = gl.float8e4nv
    ks = gl.allocate_shared_memory(F8, [2, 64, D], k_desc.layout)
    vs = gl.allocate_shared_memory(F8, [2, 64, D], v_desc.layout)
    if FRONTIER:
        kbs = gl.allocate_shared_memory(gl.bfloat16, [2, 64, D], kb_desc.layout)
    else:
        kbs = ks
    rows = gl.allocate_shared_memory(gl.float32, [4, 64], kf_desc.layout)  # factors of K and V of the two warpgroups
    qs = gl.allocate_shared_memory(F8, [ST, BM, D], q_desc.layout)
    gs = gl.allocate_shared_memory(F8, [ST, BM, D], g_desc.layout)
    qbs = gl.allocate_shared_memory(gl.bfloat16, [ST, BM, D], qb_desc.layout)
    gbs = gl.allocate_shared_memory(gl.bfloat16, [ST, BM, D], gb_desc.layout)
    fs = gl.allocate_shared_memory(gl.float32, [ST, BM], f_desc.layout)
    ls = gl.allocate_shared_memory(gl.float32, [ST, BM], l_desc.layout)
    ds = gl.allocate_shared_memory(gl.float32, [ST, BM], d_desc.layout)
    slots = gl.allocate_shared_memory(gl.int32, [SLOTS, 1], SLOT_LAYOUT)
    kv_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    kv_empty = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    full = gl.allocate_shared_memory(gl.int64, [ST, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [ST, 1], mbarrier.MBarrierLayout())
    mbarrier.init(kv_full, 1)
    mbarrier.init(kv_empty, 2)
    for s in gl.static_range(ST):
        mbarrier.init(full.index(s), 1)
        mbarrier.init(empty.index(s), 2)
    fence_async_shared()
    gl.warp_specialize([
        (dkv_consumer, (0, DK, DV, ks, vs, kbs, rows, qs, gs, qbs, gbs, fs, ls, ds, slots, kv_full, kv_empty, full, empty,
                        scale, unit, left, right, heads, group, D, BM, ST, LEFT, FRONTIER)),
        (dkv_consumer, (1, DK, DV, ks, vs, kbs, rows, qs, gs, qbs, gbs, fs, ls, ds, slots, kv_full, kv_empty, full, empty,
                        scale, unit, left, right, heads, group, D, BM, ST, LEFT, FRONTIER)),
        (dkv_producer, (k_desc, v_desc, kf_desc, vf_desc, q_desc, g_desc, qb_desc, clean_desc, gb_desc, f_desc,
                        l_desc, d_desc, kb_desc, ITEMS, COUNTS, ks, vs, kbs, rows, qs, gs, qbs, gbs, fs, ls, ds, slots,
                        kv_full, kv_empty, full, empty, q_pad, k_pad, D, BM, ST, FRONTIER, heads, group, width)),
    ], [4, 1], [240, 24])  # fmt: skip
