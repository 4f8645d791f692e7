"""Merged backward, causal, D = 128: items of keys make dK and dV and hand their rounded U to items of queries, 256 at a time, which
are then a plain product dQ = U K. See README.md."""

from __future__ import annotations

from flamia.hopper.common import SLOT_LAYOUT, announce, announced, operand, pass_over, store_quarters
from flamia.hopper.compat import as_bfloat16, fence_async_shared, gl, gluon, mbarrier, tma_load, warpgroup_mma, warpgroup_mma_wait
from flamia.hopper.dkv import seen_pairs, weights

from flamia.hopper.compat import tma  # noqa: E402

tma_store = getattr(tma, 'async_store', None) or tma.async_copy_shared_to_global
store_wait = tma.store_wait
RING = gl.constexpr(3)
SLOTS = gl.constexpr(16)
READY = gl.constexpr(
    "{ .reg .pred p; ld.acquire.gpu.global.s32 $0, [$1]; setp.ge.s32 p, $0, $2; selp.b32 $0, 1, 0, p; fence.proxy.async; }")
AWAIT = gl.constexpr(
    "{ .reg .pred p; .reg .u32 n; mov.u32 n, 0; AGAIN: ld.acquire.gpu.global.s32 $0, [$1]; setp.ge.s32 p, $0, $2; "
    "@p bra GOT; add.u32 n, n, 1; setp.lt.u32 p, n, 200000; @p bra AGAIN; GOT: fence.proxy.async; }")
PUBLISH = gl.constexpr("{ cp.async.bulk.wait_group 0; fence.proxy.async; red.release.gpu.global.add.s32 [$1], $2; mov.u32 $0, 0; }")


@gluon.jit
def asm1(TEXT: gl.constexpr, at, value):
    return gl.inline_asm_elementwise(TEXT, "=&r,l,r", [at.to(gl.int64), value], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def settle(i, row, then, late, FLAGS, u_desc, us, empty, ST: gl.constexpr):
    """Stage i % ST is free: its step's U goes to memory; what was to be told after the step before is told."""
    s = i % ST
    mbarrier.wait(empty.index(s), ((i // ST) & 1) ^ 1)
    if late >= 0:
        asm1(PUBLISH, FLAGS + late, 1)
    if row >= 0:
        b = (i - ST) % (ST - 1)
        tma_store(u_desc, [row // 2 * 128, (row & 1) * 64], us.index(2 * b))
        tma_store(u_desc, [row // 2 * 128 + 64, (row & 1) * 64], us.index(2 * b + 1))
    return then


@gluon.jit
def producer(k_desc, v_desc, kf_desc, vf_desc, q_desc, g_desc, qb_desc, clean_desc, gb_desc, f_desc, l_desc, d_desc,
             kb_desc, kclean_desc, u_desc, ut_desc, K_ITEMS, Q_ITEMS, K_BLOCKS, COUNTS, FLAGS, ks, vs, rows, qs, gs, qbs,
             gbs, uts, us, fs, ls, ds, slots, tail, kv_full, kv_empty, full, empty, q_pad, k_pad, D: gl.constexpr,
             BM: gl.constexpr, ST: gl.constexpr, heads, group, width, right):
    nq = gl.load(COUNTS)
    nk = gl.load(COUNTS + 1)
    dirty = gl.load(COUNTS + 2)
    tiles = gl.load(COUNTS + 10)
    total = (nk + nq * group) * heads
    groups = (heads + width - 1) // width
    last_start = total - nq * group * (heads - (groups - 1) * width)
    span = nk * width + nq * group * width
    i = 0
    tile = 0
    # what is left to do when a stage is given back: a, b (and c, if there are four) are the last steps, a the latest
    row_a = -1
    row_b = -1
    row_c = -1
    row_d = -1
    then_a = -1
    then_b = -1
    then_c = -1
    then_d = -1
    late = -1
    t = gl.atomic_add(COUNTS + 8, 1)
    while t < total:
        # which item: dkv(0), dkv(1), dq(0), dkv(2), dq(1) .. dq(groups - 1)
        g = 0
        r = t
        h = 0
        keys = t < nk * gl.minimum(width, heads)
        if not keys:
            past = t - nk * gl.minimum(width, heads)
            g = past // span
            r = past - g * span
            ahead = nk * gl.maximum(gl.minimum(width, heads - (g + 1) * width), 0)
            keys = r < ahead
            r = gl.where(keys, r, r - ahead)
            g = gl.where(keys, g + 1, g)
            if t >= last_start:
                keys = t < 0
                g = groups - 1
                r = t - last_start
        inside = gl.minimum(width, heads - g * width)
        base_head = g * width
        slot_row = (g % RING) * width * group
        if keys:
            item = K_ITEMS + r // inside * 16
            hk = base_head + r % inside
            flag = g - RING
            want = 32 * nq * group * width
            place = FLAGS + gl.maximum(flag, 0)
        else:
            inside = inside * group
            item = Q_ITEMS + r // inside * 16
            h = base_head * group + r % inside
            hk = h // group
            flag = heads + hk * (k_pad // 128) + gl.load(item + 4) // 128
            want = 32 * gl.cdiv(gl.load(item + 5), 128)
            place = FLAGS + flag
        out_row = gl.load(item)
        valid = gl.load(item + 1)
        own_pad = gl.load(item + 2)
        position = gl.load(item + 3)
        other_pad = gl.load(item + 4)
        lo = gl.load(item + 5)
        first = gl.load(item + 6)
        end = gl.load(item + 7)
        other_row = gl.load(item + 8)
        shift = gl.load(item + 9)
        if flag >= 0:
            if asm1(READY, place, want) == 0:
                # nobody may wait for this CTA while it waits itself
                for k in gl.static_range(ST):
                    if ST == 3:
                        late = settle(i + k, row_c, then_c, late, FLAGS, u_desc, us, empty, ST)
                    else:
                        late = settle(i + k, row_d, then_d, late, FLAGS, u_desc, us, empty, ST)
                    row_d = row_c
                    row_c = row_b
                    row_b = row_a
                    row_a = -1
                    then_d = then_c
                    then_c = then_b
                    then_b = then_a
                    then_a = -1
                if late >= 0:
                    asm1(PUBLISH, FLAGS + late, 1)
                    late = -1
                asm1(AWAIT, place, want)
        mbarrier.wait(kv_empty, (tile & 1) ^ 1)
        announce(slots, 1, out_row)
        announce(slots, 2, valid)
        announce(slots, 3, position)
        announce(slots, 4, shift)
        tile += 1
        if keys:
            row = hk * k_pad + own_pad
            announce(slots, 0, hk)
            announce(slots, 7, 0)
            announce(slots, 5, first)
            announce(slots, 6, end)
            mbarrier.expect(kv_full, 4 * 64 * D + 2 * 512)
            for c in gl.static_range(2):
                tma_load(kf_desc, [row + c * 64], kv_full, rows.index(c))
                tma_load(vf_desc, [row + c * 64], kv_full, rows.index(2 + c))
                tma_load(k_desc, [row + c * 64, 0], kv_full, ks.index(c))
                tma_load(v_desc, [row + c * 64, 0], kv_full, vs.index(c))
            done = heads + hk * (k_pad // 128) + (own_pad - position) // 128
            tile_row = (slot_row + (hk - base_head) * group) * tiles + gl.load(item + 10)
            for hq in range(hk * group, (hk + 1) * group):
                base = hq * q_pad + other_pad
                for m in range(first, end):
                    if ST == 3:
                        row_old = row_c
                        then_old = then_c
                    else:
                        row_old = row_d
                        then_old = then_d
                    late = settle(i, row_old, then_old, late, FLAGS, u_desc, us, empty, ST)
                    row_d = row_c
                    row_c = row_b
                    row_b = row_a
                    row_a = tile_row * 2 + m
                    then_d = then_c
                    then_c = then_b
                    then_b = then_a
                    then_a = -1
                    s = i % ST
                    bar = full.index(s)
                    mbarrier.expect(bar, 6 * BM * D + 12 * BM)
                    at = base + m * BM
                    tma_load(q_desc, [at, 0], bar, qs.index(s))
                    tma_load(g_desc, [at, 0], bar, gs.index(s))
                    tma_load(l_desc, [at], bar, ls.index(s))
                    tma_load(d_desc, [at], bar, ds.index(s))
                    tma_load(gb_desc, [at, 0], bar, gbs.index(s))
                    if dirty != 0:
                        tma_load(clean_desc, [other_row + m * BM, hq * D], bar, qbs.index(s))
                    else:
                        tma_load(qb_desc, [other_row + m * BM, hq * D], bar, qbs.index(s))
                    store_wait(0)  # this stage's tiles are complete only when an older U has left shared memory
                    tma_load(f_desc, [at], bar, fs.index(s))
                    i += 1
                tile_row += tiles
            if first < end:
                then_a = done
                # the item's last U takes the place of the third last
                if ST == 3:
                    late = settle(i, row_c, then_c, late, FLAGS, u_desc, us, empty, ST)
                    row_c = -1
                    then_c = -1
                else:
                    late = settle(i, row_d, then_d, late, FLAGS, u_desc, us, empty, ST)
                    row_d = -1
                    then_d = -1
                store_wait(0)
                mbarrier.arrive(tail, count=1)
            else:
                asm1(PUBLISH, FLAGS + done, 1)
        else:
            block = (position - shift) // 128
            rest = gl.minimum(lo - position, 256)
            high = position + rest - 1 + right
            start = first * 2
            stop = gl.minimum(gl.where(high < 0, 0, gl.maximum(high, 0) // 128 * 2 + 2), gl.cdiv(lo, 64))
            stop = gl.where((block & 1) == 0, gl.maximum(start, stop), start)
            announce(slots, 0, h)
            announce(slots, 2, gl.where((block & 1) == 0, rest, 0))
            announce(slots, 5, start)
            announce(slots, 6, stop)
            announce(slots, 7, 1)
            announce(slots, 8, gl.where((block & 1) == 0, gl.minimum(end * 2, stop), start))
            mbarrier.arrive(kv_full, count=1)
            head_row = (slot_row + h - base_head * group) * tiles
            record = K_BLOCKS + other_pad // 128 * 16 + 10
            next_tile = gl.load(record + start // 2 * 16)
            for n in range(start, stop):
                if ST == 3:
                    row_old = row_c
                    then_old = then_c
                else:
                    row_old = row_d
                    then_old = then_d
                late = settle(i, row_old, then_old, late, FLAGS, u_desc, us, empty, ST)
                row_d = row_c
                row_c = row_b
                row_b = row_a
                row_a = -1
                then_d = then_c
                then_c = then_b
                then_b = then_a
                then_a = -1
                s = i % ST
                bar = full.index(s)
                mbarrier.expect(bar, 256 * BM * 2 + 2 * BM * D)
                at = (head_row + next_tile + block) * 128 + (n & 1) * 64
                if (n & 1) == 1:
                    next_tile = gl.load(record + gl.minimum(n + 1, stop - 1) // 2 * 16)
                if dirty != 0:
                    tma_load(kclean_desc, [other_row + n * 64, hk * D], bar, qbs.index(s))
                else:
                    tma_load(kb_desc, [other_row + n * 64, hk * D], bar, qbs.index(s))
                store_wait(0)
                tma_load(ut_desc, [at, 0], bar, uts.index(s))
                tma_load(u_desc, [at + 128, 0], bar, as_bfloat16(qs.index(s), 64, 64))
                tma_load(u_desc, [at + 128, 64], bar, as_bfloat16(gs.index(s), 64, 64))
                i += 1
            if start < stop:
                then_a = g
            else:
                asm1(PUBLISH, FLAGS + g, 1)
        t = gl.atomic_add(COUNTS + 8, 1)
    for k in gl.static_range(ST):
        if ST == 3:
            late = settle(i + k, row_c, then_c, late, FLAGS, u_desc, us, empty, ST)
        else:
            late = settle(i + k, row_d, then_d, late, FLAGS, u_desc, us, empty, ST)
        row_d = row_c
        row_c = row_b
        row_b = row_a
        row_a = -1
        then_d = then_c
        then_c = then_b
        then_b = then_a
        then_a = -1
    if late >= 0:
        asm1(PUBLISH, FLAGS + late, 1)
    mbarrier.wait(kv_empty, (tile & 1) ^ 1)
    announce(slots, 0, -1)
    mbarrier.arrive(kv_full, count=1)


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
