"""Merged backward, causal, D = 128: items of keys make dK and dV and hand their rounded U to items of queries, 256 at a time, which
are then a plain product dQ = U K. See README.md."""

from __future__ import annotations

from producer import producer

from flamia.hopper.common import SLOT_LAYOUT, announced, operand, store_quarters
from flamia.hopper.compat import as_bfloat16, fence_async_shared, gl, gluon, mbarrier, warpgroup_mma, warpgroup_mma_wait
from flamia.hopper.dkv import seen_pairs, weights

SLOTS = gl.constexpr(16)


@gluon.jit
def dkv_steps(lo, hi, last, i, u, dk, dv, k, v, kf, vf, key, zero, shift, left, right, qs, gs, qbs, gbs, fs, ls, ds, us, c,
              full, empty, MASK: gl.constexpr, LEFT: gl.constexpr, FIRST: gl.constexpr, BM: gl.constexpr,
              ST: gl.constexpr, SL: gl.constexpr, DOT: gl.constexpr):
    cl: gl.constexpr = gl.SliceLayout(0, SL)
    for m in range(lo, hi):
        s = i % ST
        sp = (i + ST - 1) % ST
        if not FIRST:
            tk = warpgroup_mma(u, qbs.index(sp), dk, is_async=True)
        ts = warpgroup_mma(k, qs.index(s).permute((1, 0)), zero, use_acc=False, is_async=True)
        tp = warpgroup_mma(v, gs.index(s).permute((1, 0)), zero, use_acc=False, is_async=True)
        if FIRST:
            x = warpgroup_mma_wait(1, deps=[ts])
        else:
            us.index(2 * ((i - 1) % (ST - 1)) + c).store(u)
            fence_async_shared()
            x, dk = warpgroup_mma_wait(1, deps=[ts, tk])
            mbarrier.arrive(empty.index(sp), count=1)
        f = fs.index(s).load(cl)
        lse = ls.index(s).load(cl)
        seen = seen_pairs(key, m, shift, left, right, LEFT, BM, SL)
        p = weights(x, kf, f, lse, seen, MASK)
        tv = warpgroup_mma(operand(p, DOT), gbs.index(s), dv, is_async=True)
        e = warpgroup_mma_wait(1, deps=[tp])
        d = ds.index(s).load(cl)
        w = p * (e * vf[:, None] - d[None, :])
        if MASK:
            w = gl.where(seen, w, 0.0)
        mbarrier.wait(full.index((i + 1) % ST), ((i + 1) // ST) & 1, pred=i < last)
        dv, w = warpgroup_mma_wait(0, deps=[tv, w])
        u = operand(w, DOT)
        i += 1
    return i, u, dk, dv


@gluon.jit
def consumer(c, DK, DV, DQ, ks, vs, rows, qs, gs, qbs, gbs, uts, us, fs, ls, ds, slots, tail, kv_full, kv_empty, full, empty,
             scale, left, right, heads, group, D: gl.constexpr, BM: gl.constexpr, ST: gl.constexpr, LEFT: gl.constexpr):
    SL: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BM, 32])
    OL: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    DOT: gl.constexpr = gl.DotOperandLayout(0, OL, 2)
    RL: gl.constexpr = gl.SliceLayout(1, SL)
    BL: gl.constexpr = gl.BlockedLayout([1, 8], [4 * 256 // D, D // 8 // 4], [4, 1], [1, 0])
    zero = gl.full([64, BM], 0.0, gl.float32, layout=SL)
    k = ks.index(c)
    v = vs.index(c)
    i = 0
    tile = 0
    ended = 0
    mbarrier.wait(kv_full, 0)
    hk = announced(slots, 0)
    while hk >= 0:
        out_row = announced(slots, 1)
        valid = announced(slots, 2)
        k0 = announced(slots, 3)
        shift = announced(slots, 4)
        first = announced(slots, 5)
        end = announced(slots, 6)
        queries = announced(slots, 7)
        ro = c * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, BL))
        co = gl.arange(0, D // 4, layout=gl.SliceLayout(0, BL))
        if queries == 0:
            full_first = (gl.maximum(k0 + 127 - right - shift, 0) + BM - 1) // BM
            full_first = gl.minimum(gl.maximum(full_first, first), end)
            full_end = end
            if LEFT:
                full_end = gl.maximum(k0 + left - shift + 1, 0) // BM
                full_end = gl.minimum(gl.maximum(full_end, full_first), end)
            # keys behind the document's end are seen by nobody: dQ would add them up
            full_first = gl.where(valid < 128, end, full_first)
            full_end = gl.where(valid < 128, end, full_end)
            local = c * 64 + gl.arange(0, 64, layout=RL)
            key = gl.where(local < valid, k0 + local, 1 << 30)
            kf = rows.index(c).load(RL)
            vf = rows.index(2 + c).load(RL)
            dk = gl.full([64, D], 0.0, gl.float32, layout=OL)
            dv = gl.full([64, D], 0.0, gl.float32, layout=OL)
            if first < end:
                last = i + (end - first) * group - 1
                mbarrier.wait(full.index(i % ST), (i // ST) & 1)
                u = gl.full([64, BM], 0.0, gl.bfloat16, layout=DOT)
                i, u, dk, dv = dkv_steps(
                    first, first + 1, last, i, u, dk, dv, k, v, kf, vf, key, zero, shift, left, right, qs, gs,
                    qbs, gbs, fs, ls, ds, us, c, full, empty, True, LEFT, True, BM, ST, SL, DOT)
                start = first + 1
                for _g in range(group):
                    i, u, dk, dv = dkv_steps(
                        start, full_first, last, i, u, dk, dv, k, v, kf, vf, key, zero, shift, left, right,
                        qs, gs, qbs, gbs, fs, ls, ds, us, c, full, empty, True, LEFT, False, BM, ST, SL, DOT)
                    i, u, dk, dv = dkv_steps(
                        gl.maximum(start, full_first), full_end, last, i, u, dk, dv, k, v, kf, vf, key, zero,
                        shift, left, right, qs, gs, qbs, gbs, fs, ls, ds, us, c, full, empty, False, LEFT, False,
                        BM, ST, SL, DOT)
                    if LEFT:
                        i, u, dk, dv = dkv_steps(
                            gl.maximum(start, full_end), end, last, i, u, dk, dv, k, v, kf, vf, key, zero,
                            shift, left, right, qs, gs, qbs, gbs, fs, ls, ds, us, c, full, empty, True, LEFT, False,
                            BM, ST, SL, DOT)
                    start = first
                sp = (i + ST - 1) % ST
                tk = warpgroup_mma(u, qbs.index(sp), dk, is_async=True)
                mbarrier.wait(tail, ended & 1)
                ended += 1
                us.index(2 * ((i - 1) % (ST - 1)) + c).store(u)
                fence_async_shared()
                dk = warpgroup_mma_wait(0, deps=[tk])
                mbarrier.arrive(empty.index(sp), count=1)
            mbarrier.arrive(kv_empty, count=1)
            to = (out_row + ro).to(gl.int64)[:, None] * (heads * D) + (hk * D + co)[None, :]
            store_quarters(DV + to, dv.to(gl.bfloat16), (ro < valid)[:, None], D, BL)
            store_quarters(DK + to, (dk * scale).to(gl.bfloat16), (ro < valid)[:, None], D, BL)
        else:
            half = announced(slots, 8)
            mbarrier.arrive(kv_empty, count=1)
            da = gl.full([64, D], 0.0, gl.float32, layout=OL)
            db = gl.full([64, D], 0.0, gl.float32, layout=OL)
            for n in range(first, half):
                s = i % ST
                mbarrier.wait(full.index(s), (i // ST) & 1)
                da = warpgroup_mma(uts.index(s).slice(c * 64, 64, 1).permute((1, 0)), qbs.index(s), da, is_async=True)
                if c == 0:
                    db = warpgroup_mma(as_bfloat16(qs.index(s), 64, 64).permute((1, 0)), qbs.index(s), db, is_async=True)
                else:
                    db = warpgroup_mma(as_bfloat16(gs.index(s), 64, 64).permute((1, 0)), qbs.index(s), db, is_async=True)
                da, db = warpgroup_mma_wait(2, deps=[da, db])
                mbarrier.arrive(empty.index((i + ST - 1) % ST), count=1, pred=n > first)
                i += 1
            for n in range(half, end):
                s = i % ST
                mbarrier.wait(full.index(s), (i // ST) & 1)
                if c == 0:
                    db = warpgroup_mma(as_bfloat16(qs.index(s), 64, 64).permute((1, 0)), qbs.index(s), db, is_async=True)
                else:
                    db = warpgroup_mma(as_bfloat16(gs.index(s), 64, 64).permute((1, 0)), qbs.index(s), db, is_async=True)
                da, db = warpgroup_mma_wait(1, deps=[da, db])
                mbarrier.arrive(empty.index((i + ST - 1) % ST), count=1, pred=n > first)
                i += 1
            da, db = warpgroup_mma_wait(0, deps=[da, db])
            mbarrier.arrive(empty.index((i + ST - 1) % ST), count=1, pred=first < end)
            to = (out_row + ro).to(gl.int64)[:, None] * (heads * group * D) + (hk * D + co)[None, :]
            store_quarters(DQ + to, (da * scale).to(gl.bfloat16), (ro < valid)[:, None], D, BL)
            to += 128 * (heads * group * D)
            store_quarters(DQ + to, (db * scale).to(gl.bfloat16), (ro + 128 < valid)[:, None], D, BL)
        tile += 1
        mbarrier.wait(kv_full, tile & 1)
        hk = announced(slots, 0)


@gluon.jit(do_not_specialize=["left", "right", "heads", "group", "width"])
def backward_kernel(k_desc, v_desc, kf_desc, vf_desc, q_desc, g_desc, qb_desc, clean_desc, gb_desc, f_desc, l_desc,
                    d_desc, kb_desc, kclean_desc, u_desc, ut_desc, DK, DV, DQ, K_ITEMS, Q_ITEMS, K_BLOCKS, COUNTS, FLAGS,
                    q_pad, k_pad, scale, left, right, heads, group, width, D: gl.constexpr, BM: gl.constexpr,
                    ST: gl.constexpr, LEFT: gl.constexpr):
    F8: gl.constexpr = gl.float8e4nv
    ks = gl.allocate_shared_memory(F8, [2, 64, D], k_desc.layout)
    vs = gl.allocate_shared_memory(F8, [2, 64, D], v_desc.layout)
    rows = gl.allocate_shared_memory(gl.float32, [4, 64], kf_desc.layout)
    qs = gl.allocate_shared_memory(F8, [ST, BM, D], q_desc.layout)
    gs = gl.allocate_shared_memory(F8, [ST, BM, D], g_desc.layout)
    qbs = gl.allocate_shared_memory(gl.bfloat16, [ST, BM, D], qb_desc.layout)
    gbs = gl.allocate_shared_memory(gl.bfloat16, [ST, BM, D], gb_desc.layout)
    if D == 128:
        uts = gbs
    else:
        uts = gl.allocate_shared_memory(gl.bfloat16, [ST, BM, 128], ut_desc.layout)
    us = gl.allocate_shared_memory(gl.bfloat16, [2 * (ST - 1), 64, BM], u_desc.layout)
    fs = gl.allocate_shared_memory(gl.float32, [ST, BM], f_desc.layout)
    ls = gl.allocate_shared_memory(gl.float32, [ST, BM], l_desc.layout)
    ds = gl.allocate_shared_memory(gl.float32, [ST, BM], d_desc.layout)
    slots = gl.allocate_shared_memory(gl.int32, [SLOTS, 1], SLOT_LAYOUT)
    kv_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    kv_empty = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    full = gl.allocate_shared_memory(gl.int64, [ST, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [ST, 1], mbarrier.MBarrierLayout())
    tail = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(tail, 1)
    mbarrier.init(kv_full, 1)
    mbarrier.init(kv_empty, 2)
    for s in gl.static_range(ST):
        mbarrier.init(full.index(s), 1)
        mbarrier.init(empty.index(s), 2)
    fence_async_shared()
    gl.warp_specialize([
        (consumer, (0, DK, DV, DQ, ks, vs, rows, qs, gs, qbs, gbs, uts, us, fs, ls, ds, slots, tail, kv_full, kv_empty, full,
                    empty, scale, left, right, heads, group, D, BM, ST, LEFT)),
        (consumer, (1, DK, DV, DQ, ks, vs, rows, qs, gs, qbs, gbs, uts, us, fs, ls, ds, slots, tail, kv_full, kv_empty, full,
                    empty, scale, left, right, heads, group, D, BM, ST, LEFT)),
        (producer, (k_desc, v_desc, kf_desc, vf_desc, q_desc, g_desc, qb_desc, clean_desc, gb_desc, f_desc, l_desc,
                    d_desc, kb_desc, kclean_desc, u_desc, ut_desc, K_ITEMS, Q_ITEMS, K_BLOCKS, COUNTS, FLAGS, ks, vs,
                    rows, qs, gs, qbs, gbs, uts, us, fs, ls, ds, slots, tail, kv_full, kv_empty, full, empty, q_pad, k_pad, D,
                    BM, ST, heads, group, width, right)),
    ], [4, 1], [240, 24])
