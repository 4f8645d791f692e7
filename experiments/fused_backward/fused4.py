"""Fused backward, five products: see notes."""
from __future__ import annotations
from flamia.hopper.common import SLOT_LAYOUT, item, operand
from flamia.hopper.compat import fence_async_shared, gl, gluon, mbarrier, tma_load, warpgroup_mma, warpgroup_mma_wait

from triton.experimental.gluon.language._core import builtin, ir
from flamia.hopper.compat import tma
tma_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global


@builtin
def tma_add(desc, coord, src, _semantic=None):
    coord = _semantic._convert_to_ir_values(coord, require_i64=False)
    _semantic.builder.create_async_tma_reduce(ir.DESCRIPTOR_REDUCE_KIND.ADD, desc.handle, coord, src.handle)


thread_barrier = getattr(gl, "thread_barrier", None) or gl.barrier
R = gl.constexpr(4)  # turns a scout may be ahead
SLOTS = gl.constexpr(12)


POLL = gl.constexpr(
    "{ .reg .pred p; .reg .u32 n; mov.u32 n, 0; AGAIN: ld.acquire.gpu.global.s32 $0, [$1]; setp.ge.s32 p, $0, $2; "
    "@p bra GOT; add.u32 n, n, 1; setp.lt.u32 p, n, LIMIT; @p bra AGAIN; GOT: fence.proxy.async.global; }".replace("LIMIT", "20000"))
READ = gl.constexpr("cp.async.bulk.wait_group.read 0; mov.u32 $0, 0;")
PUBLISH = gl.constexpr("{ cp.async.bulk.wait_group 0; fence.proxy.async.global; fence.acq_rel.gpu; st.relaxed.gpu.global.s32 [$1], $2; mov.u32 $0, 0; }")


@gluon.jit
def put(slots, k, value):
    slots.index(k).store(gl.full([1], value, gl.int32, layout=gl.BlockedLayout([1], [32], [1], [0])))


@gluon.jit
def get(slots, k, WARPS: gl.constexpr):
    return gl.max(slots.index(k).load(gl.BlockedLayout([1], [32], [WARPS], [0])), 0)


@gluon.jit
def fused_producer(k_desc, v_desc, kb_desc, kclean_desc, q_desc, g_desc, qb_desc, clean_desc, gb_desc, f_desc,
                   l_desc, d_desc, ITEMS, COUNTS, ks, vs, kbs, qs, gs, qbs, gbs, fs, ls, ds, slots, kv_full, kv_empty,
                   full, made, q_pad, k_pad, D: gl.constexpr, BM: gl.constexpr, heads, group, width):
    blocks = gl.load(COUNTS + 1)
    total = blocks * heads
    dirty = gl.load(COUNTS + 2)
    i = 0
    tile = 0
    t = gl.atomic_add(COUNTS + 8, 1)
    while t < total:
        rank, hk = item(t, blocks, heads, width)
        record = ITEMS + rank * 16
        out_row = gl.load(record)
        valid = gl.load(record + 1)
        row = hk * k_pad + gl.load(record + 2)
        k0 = gl.load(record + 3)
        pad = gl.load(record + 4)
        lq = gl.load(record + 5)
        first = gl.load(record + 6)
        end = gl.load(record + 7)
        q_row = gl.load(record + 8)
        shift = gl.load(record + 9)
        mbarrier.wait(kv_empty, (tile & 1) ^ 1)
        put(slots, 0, hk)
        put(slots, 1, out_row)
        put(slots, 2, valid)
        put(slots, 3, k0)
        put(slots, 4, shift)
        put(slots, 5, first)
        put(slots, 6, end)
        put(slots, 7, pad)
        put(slots, 8, lq)
        put(slots, 9, row)
        mbarrier.expect(kv_full, 4 * 64 * D + 128 * 2 * D)
        for c in gl.static_range(2):
            tma_load(k_desc, [row + c * 64, 0], kv_full, ks.index(c))
            tma_load(v_desc, [row + c * 64, 0], kv_full, vs.index(c))
            for b in gl.static_range(2):
                if dirty != 0:
                    tma_load(kclean_desc, [out_row + c * 64, hk * D + b * (D // 2)], kv_full, kbs.index(2 * c + b))
                else:
                    tma_load(kb_desc, [out_row + c * 64, hk * D + b * (D // 2)], kv_full, kbs.index(2 * c + b))
        tile += 1
        for h in range(hk * group, (hk + 1) * group):
            base = h * q_pad + pad
            for m in range(first, end):
                at = base + m * BM
                s = i & 1
                bar = full.index(s)
                mbarrier.wait(made.index(s), ((i >> 1) & 1) ^ 1)
                mbarrier.expect(bar, 6 * BM * D + 12 * BM)
                tma_load(q_desc, [at, 0], bar, qs.index(s))
                tma_load(g_desc, [at, 0], bar, gs.index(s))
                tma_load(f_desc, [at], bar, fs.index(s))
                tma_load(l_desc, [at], bar, ls.index(s))
                tma_load(d_desc, [at], bar, ds.index(s))
                tma_load(gb_desc, [at, 0], bar, gbs.index(s))
                if dirty != 0:
                    tma_load(clean_desc, [q_row + m * BM, h * D], bar, qbs.index(i % 3))
                else:
                    tma_load(qb_desc, [q_row + m * BM, h * D], bar, qbs.index(i % 3))
                i += 1
        t = gl.atomic_add(COUNTS + 8, 1)
    mbarrier.wait(kv_empty, (tile & 1) ^ 1)
    put(slots, 0, -1)
    mbarrier.arrive(kv_full, count=1)


@gluon.jit
def fused_scout(TURNS, ERRORS, slots, kv_full, kv_empty, turn, done, q_pad, right, BM: gl.constexpr, group):
    """Waits in front of memory, so that the consumers need not: lets them send a step's dQ once every later key block has."""
    i = 0
    tile = 0
    mbarrier.wait(kv_full, 0)
    hk = get(slots, 0, 1)
    while hk >= 0:
        k0 = get(slots, 3, 1)
        shift = get(slots, 4, 1)
        first = get(slots, 5, 1)
        end = get(slots, 6, 1)
        pad = get(slots, 7, 1)
        lq = get(slots, 8, 1)
        mbarrier.arrive(kv_empty, count=1)
        n = k0 // 128
        last = (lq + shift + 127) // 128 - 1
        for h in range(hk * group, (hk + 1) * group):
            place = (h * q_pad + pad) // BM
            at = TURNS + place
            for m in range(first, end):
                want = gl.minimum((gl.minimum(m * BM + BM - 1, lq - 1) + right + shift) // 128, last) - n
                if want > 0:
                    seen = gl.inline_asm_elementwise(POLL, "=r,l,r", [(at + m).to(gl.int64), want], dtype=gl.int32, is_pure=False, pack=1)
                    if seen < want:
                        gl.store(ERRORS, want - seen)
                s = i % R
                mbarrier.wait(done.index(s), ((i // R) & 1) ^ 1)
                mbarrier.arrive(turn.index(s), count=1)
                i += 1
        tile += 1
        mbarrier.wait(kv_full, tile & 1)
        hk = get(slots, 0, 1)


@gluon.jit
def fused_publisher(dq_desc, TURNS, stage, slots, kv_full, kv_empty, turn, sent, stage_free, done, q_pad, right, BM: gl.constexpr, group):
    """Tells the next key block that a step's dQ has been added."""
    i = 0
    tile = 0
    mbarrier.wait(kv_full, 0)
    hk = get(slots, 0, 1)
    while hk >= 0:
        k0 = get(slots, 3, 1)
        shift = get(slots, 4, 1)
        first = get(slots, 5, 1)
        end = get(slots, 6, 1)
        pad = get(slots, 7, 1)
        lq = get(slots, 8, 1)
        mbarrier.arrive(kv_empty, count=1)
        n = k0 // 128
        last = (lq + shift + 127) // 128 - 1
        for h in range(hk * group, (hk + 1) * group):
            place = (h * q_pad + pad) // BM
            at = TURNS + place
            for m in range(first, end):
                want = gl.minimum((gl.minimum(m * BM + BM - 1, lq - 1) + right + shift) // 128, last) - n
                s = i % R
                mbarrier.wait(turn.index(s), (i // R) & 1)
                mbarrier.wait(sent, i & 1)
                to = (place + m) * 128
                if want == 0:
                    tma_store(dq_desc, [to, 0], stage.index(0))
                    tma_store(dq_desc, [to + 64, 0], stage.index(1))
                else:
                    tma_add(dq_desc, [to, 0], stage.index(0))
                    tma_add(dq_desc, [to + 64, 0], stage.index(1))
                gl.inline_asm_elementwise(READ, "=r,r", [want], dtype=gl.int32, is_pure=False, pack=1)
                mbarrier.arrive(stage_free, count=1)
                gl.inline_asm_elementwise(PUBLISH, "=r,l,r", [(at + m).to(gl.int64), want + 1], dtype=gl.int32, is_pure=False, pack=1)
                mbarrier.arrive(done.index(s), count=1)
                i += 1
        tile += 1
        mbarrier.wait(kv_full, tile & 1)
        hk = get(slots, 0, 1)


@gluon.jit
def send(dq, stage, c: gl.constexpr, j, sent, stage_free, H: gl.constexpr):
    """Leave a step's half of dQ for the publisher, in the order of the fragments: float4 by float4."""
    x = dq.reshape([4, 2, 8, H // 8, 4, 2]).permute((3, 0, 2, 4, 1, 5)).reshape([64, H])
    mbarrier.wait(stage_free, (j & 1) ^ 1)
    stage.index(c).store(x)
    fence_async_shared()
    mbarrier.arrive(sent, count=1)


@gluon.jit
def seen_pairs(low, high, m, shift, LEFT: gl.constexpr, BM: gl.constexpr, SL: gl.constexpr):
    position = shift + m * BM + gl.arange(0, BM, layout=gl.SliceLayout(0, SL))
    seen = position[None, :] >= low[:, None]
    if LEFT:
        seen = seen & (position[None, :] <= high[:, None])
    return seen


@gluon.jit
def weights(x, kf, fs, ls, s, low, high, m, shift, MASK: gl.constexpr, LEFT: gl.constexpr, BM: gl.constexpr, SL: gl.constexpr):
    f = fs.index(s).load(gl.SliceLayout(0, SL))
    lse = ls.index(s).load(gl.SliceLayout(0, SL))
    p = gl.exp2(x * (kf[:, None] * f[None, :]) - lse[None, :])
    if MASK:
        p = gl.where(seen_pairs(low, high, m, shift, LEFT, BM, SL), p, 0.0)
    return p


@gluon.jit
def fused_steps(lo, hi, i, u, dk, dv, kf, vf, low, high, zero, zq, shift, c: gl.constexpr, ks, vs, kbs, us, qs, gs, qbs, gbs,
                fs, ls, ds, stage, full, made, sent, stage_free, MASK: gl.constexpr, LEFT: gl.constexpr, FIRST: gl.constexpr, MODE: gl.constexpr,
                BM: gl.constexpr, SL: gl.constexpr, DOT: gl.constexpr, H: gl.constexpr):
    for m in range(lo, hi):
        s = i & 1
        z = i >> 30  # zero; keeps the compiler from holding descriptors in registers through the loop
        mbarrier.wait(full.index(s), (i >> 1) & 1)
        ts = warpgroup_mma(ks.index(c + z), qs.index(s).permute((1, 0)), zero, use_acc=False, is_async=True)
        if FIRST:
            x = warpgroup_mma_wait(0, deps=[ts])
            tp = warpgroup_mma(vs.index(c + z), gs.index(s).permute((1, 0)), zero, use_acc=False, is_async=True)
            p = weights(x, kf, fs, ls, s, low, high, m, shift, MASK, LEFT, BM, SL)
            pb = operand(p, DOT)
        else:
            if MODE == 1:
                tk = warpgroup_mma(u, qbs.index((i - 1) % 3), dk, is_async=True)
            mbarrier.wait(made.index(s ^ 1), ((i - 1) >> 1) & 1)
            td = warpgroup_mma(us.index(0).permute((1, 0)), kbs.index(c + z), zq, use_acc=False, is_async=True)
            td = warpgroup_mma(us.index(1).permute((1, 0)), kbs.index(2 + c + z), td, is_async=True)
            if MODE == 1:
                x, dk, dq = warpgroup_mma_wait(0, deps=[ts, tk, td])
            else:
                tk = warpgroup_mma(u, qbs.index((i - 1) % 3), dk, is_async=True)
                x, dq = warpgroup_mma_wait(1, deps=[ts, td])
            send(dq, stage, c, i - 1, sent, stage_free, H)
            tp = warpgroup_mma(vs.index(c + z), gs.index(s).permute((1, 0)), zero, use_acc=False, is_async=True)
            p = weights(x, kf, fs, ls, s, low, high, m, shift, MASK, LEFT, BM, SL)
            pb = operand(p, DOT)
        tv = warpgroup_mma(pb, gbs.index(s), dv, is_async=True)
        if FIRST or MODE == 1:
            e = warpgroup_mma_wait(1, deps=[tp])
        else:
            e, dk = warpgroup_mma_wait(1, deps=[tp, tk])
        d = ds.index(s).load(gl.SliceLayout(0, SL))
        w = p * (e * vf[:, None] - d[None, :])
        if MASK:
            w = gl.where(seen_pairs(low, high, m, shift, LEFT, BM, SL), w, 0.0)
        u = operand(w, DOT)
        mbarrier.wait(sent, (i - 1) & 1)  # both groups have made dQ from the last U^T
        us.index(c).store(u)
        dv = warpgroup_mma_wait(0, deps=[tv])
        fence_async_shared()
        mbarrier.arrive(made.index(s), count=1)
        i += 1
    return i, u, dk, dv


@gluon.jit
def fused_consumer(c: gl.constexpr, DK, DV, KF, VF, ks, vs, kbs, us, qs, gs, qbs, gbs, fs, ls, ds, stage, slots, kv_full, kv_empty,
                   full, made, sent, stage_free, scale, left, right, heads, group, D: gl.constexpr, BM: gl.constexpr, LEFT: gl.constexpr,
                   MODE: gl.constexpr):
    H: gl.constexpr = D // 2
    SL: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BM, 32])
    OL: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    QL: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, H, 16])
    DOT: gl.constexpr = gl.DotOperandLayout(0, OL, 2)
    RL: gl.constexpr = gl.SliceLayout(1, SL)
    zero = gl.full([64, BM], 0.0, gl.float32, layout=SL)
    zq = gl.full([64, H], 0.0, gl.float32, layout=QL)
    i = 0
    tile = 0
    mbarrier.wait(kv_full, 0)
    hk = get(slots, 0, 4)
    while hk >= 0:
        out_row = get(slots, 1, 4)
        valid = get(slots, 2, 4)
        k0 = get(slots, 3, 4)
        shift = get(slots, 4, 4)
        first = get(slots, 5, 4)
        end = get(slots, 6, 4)
        # the query steps whose every row sees all 128 keys
        full_first = (gl.maximum(k0 + 127 - right - shift, 0) + BM - 1) // BM
        full_first = gl.minimum(gl.maximum(full_first, first), end)
        if valid < 128:
            full_first = end
        full_end = end
        if LEFT:
            full_end = gl.maximum(k0 + left - shift - (BM - 1) + BM, 0) // BM
            full_end = gl.minimum(gl.maximum(full_end, full_first), end)
        local = c * 64 + gl.arange(0, 64, layout=RL)
        key = k0 + local
        low = gl.where(local < valid, key - right, 1 << 30)
        high = key + left
        at = get(slots, 9, 4) + local
        kf = gl.load(KF + at)
        vf = gl.load(VF + at)
        dk = gl.full([64, D], 0.0, gl.float32, layout=OL)
        dv = gl.full([64, D], 0.0, gl.float32, layout=OL)
        if first < end:
            u = gl.full([64, BM], 0.0, gl.bfloat16, layout=DOT)
            i, u, dk, dv = fused_steps(
                first, first + 1, i, u, dk, dv, kf, vf, low, high, zero, zq, shift, c, ks, vs, kbs, us, qs, gs,
                    qbs, gbs, fs, ls, ds, stage, full, made, sent, stage_free, True, LEFT, True, MODE, BM, SL, DOT, H)
            start = first + 1
            for g in range(0, group):
                i, u, dk, dv = fused_steps(
                    start, full_first, i, u, dk, dv, kf, vf, low, high, zero, zq, shift, c, ks, vs, kbs, us, qs, gs,
                    qbs, gbs, fs, ls, ds, stage, full, made, sent, stage_free, True, LEFT, False, MODE, BM, SL, DOT, H)
                i, u, dk, dv = fused_steps(
                    gl.maximum(start, full_first), full_end, i, u, dk, dv, kf, vf, low, high, zero, zq, shift, c, ks, vs, kbs, us, qs, gs,
                    qbs, gbs, fs, ls, ds, stage, full, made, sent, stage_free, False, LEFT, False, MODE, BM, SL, DOT, H)
                if LEFT:
                    i, u, dk, dv = fused_steps(
                        gl.maximum(start, full_end), end, i, u, dk, dv, kf, vf, low, high, zero, zq, shift, c, ks, vs, kbs, us, qs, gs,
                    qbs, gbs, fs, ls, ds, stage, full, made, sent, stage_free, True, LEFT, False, MODE, BM, SL, DOT, H)
                start = first
            j = i - 1
            tk = warpgroup_mma(u, qbs.index(j % 3), dk, is_async=True)
            mbarrier.wait(made.index(j & 1), (j >> 1) & 1)
            td = warpgroup_mma(us.index(0).permute((1, 0)), kbs.index(c), zq, use_acc=False, is_async=True)
            td = warpgroup_mma(us.index(1).permute((1, 0)), kbs.index(2 + c), td, is_async=True)
            dk, dq = warpgroup_mma_wait(0, deps=[tk, td])
            send(dq, stage, c, j, sent, stage_free, H)
        mbarrier.arrive(kv_empty, count=1)
        ro = c * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, OL))
        co = gl.arange(0, D, layout=gl.SliceLayout(0, OL))
        to = (out_row + ro).to(gl.int64)[:, None] * (heads * D) + (hk * D + co)[None, :]
        gl.store(DV + to, dv.to(gl.bfloat16), mask=(ro < valid)[:, None])
        gl.store(DK + to, (dk * scale).to(gl.bfloat16), mask=(ro < valid)[:, None])
        tile += 1
        mbarrier.wait(kv_full, tile & 1)
        hk = get(slots, 0, 4)


@gluon.jit(do_not_specialize=["left", "right", "heads", "group", "width"])
def fused_kernel(k_desc, v_desc, kb_desc, kclean_desc, q_desc, g_desc, qb_desc, clean_desc, gb_desc, f_desc, l_desc,
                 d_desc, dq_desc, DK, DV, KF, VF, TURNS, ERRORS, ITEMS, COUNTS, q_pad, k_pad, scale, left, right, heads, group, width,
                 D: gl.constexpr, BM: gl.constexpr, LEFT: gl.constexpr, MODE: gl.constexpr):
    F8: gl.constexpr = gl.float8e4nv
    BAR: gl.constexpr = mbarrier.MBarrierLayout()
    ks = gl.allocate_shared_memory(F8, [2, 64, D], k_desc.layout)
    vs = gl.allocate_shared_memory(F8, [2, 64, D], v_desc.layout)
    kbs = gl.allocate_shared_memory(gl.bfloat16, [4, 64, D // 2], kb_desc.layout)
    us = gl.allocate_shared_memory(gl.bfloat16, [2, 64, BM], gl.NVMMASharedLayout(128, 16, 2))
    stage = gl.allocate_shared_memory(gl.float32, [2, 64, D // 2], dq_desc.layout)
    qs = gl.allocate_shared_memory(F8, [2, BM, D], q_desc.layout)
    gs = gl.allocate_shared_memory(F8, [2, BM, D], g_desc.layout)
    qbs = gl.allocate_shared_memory(gl.bfloat16, [3, BM, D], qb_desc.layout)
    gbs = gl.allocate_shared_memory(gl.bfloat16, [2, BM, D], gb_desc.layout)
    fs = gl.allocate_shared_memory(gl.float32, [2, BM], f_desc.layout)
    ls = gl.allocate_shared_memory(gl.float32, [2, BM], l_desc.layout)
    ds = gl.allocate_shared_memory(gl.float32, [2, BM], d_desc.layout)
    slots = gl.allocate_shared_memory(gl.int32, [SLOTS, 1], SLOT_LAYOUT)
    kv_full = gl.allocate_shared_memory(gl.int64, [1], BAR)
    kv_empty = gl.allocate_shared_memory(gl.int64, [1], BAR)
    full = gl.allocate_shared_memory(gl.int64, [2, 1], BAR)
    made = gl.allocate_shared_memory(gl.int64, [2, 1], BAR)
    stage_free = gl.allocate_shared_memory(gl.int64, [1], BAR)
    sent = gl.allocate_shared_memory(gl.int64, [1], BAR)
    turn = gl.allocate_shared_memory(gl.int64, [R, 1], BAR)
    done = gl.allocate_shared_memory(gl.int64, [R, 1], BAR)
    mbarrier.init(kv_full, 1)
    mbarrier.init(kv_empty, 4)
    for s in gl.static_range(2):
        mbarrier.init(full.index(s), 1)
        mbarrier.init(made.index(s), 2)
    mbarrier.init(sent, 2)
    mbarrier.init(stage_free, 1)
    for s in gl.static_range(R):
        mbarrier.init(turn.index(s), 1)
        mbarrier.init(done.index(s), 1)
    fence_async_shared()
    gl.warp_specialize([
        (fused_consumer, (0, DK, DV, KF, VF, ks, vs, kbs, us, qs, gs, qbs, gbs, fs, ls, ds, stage, slots, kv_full, kv_empty, full,
                          made, sent, stage_free, scale, left, right, heads, group, D, BM, LEFT, MODE)),
        (fused_consumer, (1, DK, DV, KF, VF, ks, vs, kbs, us, qs, gs, qbs, gbs, fs, ls, ds, stage, slots, kv_full, kv_empty, full,
                          made, sent, stage_free, scale, left, right, heads, group, D, BM, LEFT, MODE)),
        (fused_producer, (k_desc, v_desc, kb_desc, kclean_desc, q_desc, g_desc, qb_desc, clean_desc, gb_desc, f_desc,
                          l_desc, d_desc, ITEMS, COUNTS, ks, vs, kbs, qs, gs, qbs, gbs, fs, ls, ds, slots, kv_full, kv_empty,
                          full, made, q_pad, k_pad, D, BM, heads, group, width)),
        (fused_scout, (TURNS, ERRORS, slots, kv_full, kv_empty, turn, done, q_pad, right, BM, group)),
        (fused_publisher, (dq_desc, TURNS, stage, slots, kv_full, kv_empty, turn, sent, stage_free, done, q_pad, right, BM, group)),
    ], [4, 1, 1, 1], [240, 24, 24, 24])
