"""The producer warp: which item comes next, what it waits for, the tiles it brings, and the U that it sends. See README.md."""

from __future__ import annotations

from flamia.hopper.common import announce
from flamia.hopper.compat import as_bfloat16, gl, gluon, mbarrier, tma, tma_load

tma_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
store_wait = tma.store_wait
RING = gl.constexpr(3)
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
    # what is left to do when one of the three stages is given back: of the last three steps, a the latest
    row_a = -1
    row_b = -1
    row_c = -1
    then_a = -1
    then_b = -1
    then_c = -1
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
                    late = settle(i + k, row_c, then_c, late, FLAGS, u_desc, us, empty, ST)
                    row_c = row_b
                    row_b = row_a
                    row_a = -1
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
                    row_old = row_c
                    then_old = then_c
                    late = settle(i, row_old, then_old, late, FLAGS, u_desc, us, empty, ST)
                    row_c = row_b
                    row_b = row_a
                    row_a = tile_row * 2 + m
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
                late = settle(i, row_c, then_c, late, FLAGS, u_desc, us, empty, ST)
                row_c = -1
                then_c = -1
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
                row_old = row_c
                then_old = then_c
                late = settle(i, row_old, then_old, late, FLAGS, u_desc, us, empty, ST)
                row_c = row_b
                row_b = row_a
                row_a = -1
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
        late = settle(i + k, row_c, then_c, late, FLAGS, u_desc, us, empty, ST)
        row_c = row_b
        row_b = row_a
        row_a = -1
        then_c = then_b
        then_b = then_a
        then_a = -1
    if late >= 0:
        asm1(PUBLISH, FLAGS + late, 1)
    mbarrier.wait(kv_empty, (tile & 1) ^ 1)
    announce(slots, 0, -1)
    mbarrier.arrive(kv_full, count=1)
