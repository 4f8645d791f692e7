"""The forward kernel: S = Q K^T on E4M3 codes, O = P V on BF16.

One CTA holds 128 queries: two consumer warpgroups with 64 rows each, and a producer warp that brings key blocks of 128
positions by TMA. Per step a consumer
    1. starts S of this step (8 bit) and P V of the step before (16 bit), both asynchronous,
    2. makes the weights of this step under that P V,
    3. joins.

The row reference m of the softmax may lag behind the running maximum: P in BF16 and sums in FP32 keep their relative
precision wherever m lies. The rule, row by row: a step of 128 keys (ascending; positions inside the document alone say
which) whose maximum exceeds m by more than LAG moves m to that maximum, and so does the first step that a row sees. Two
things follow. Nothing overflows; and a key that takes nearly all of a row's weight has P = 1 exactly, as O = V of that
key must be exact for O and E to cancel in the backward (an attention sink, wherever it stands).

The maximum itself is not computed. Weights are made against the m at hand, with one fused multiply-add and one exp2; a
weight above 2^LAG shows in a thread's partial sum of the row, which is needed anyway. Then the step is made again by the
rule (`again`). That any row of a warpgroup can send the step there is invisible: rows that the rule does not move get the
same bits from it.

The LSE counts the weights before they are rounded to BF16. The second warpgroup's exp2 fill the queue that shared-memory
reads and shuffles also wait in; so the factors of the keys are read before the products are started, and the sum of a row
is kept per thread and crosses lanes once, at the end. Where each 32 keys of a step have one factor (they mostly have, see
quantize.py) a step multiplies by four numbers a row instead of a vector: a sixth of its instructions less, the same bits.

FRONTIER (`frontier_scores=bf16`): the block's own step comes first, with S from Q and K as given. Its tiles take two stages of
the ring: K lies where the V of one would, the halves of Q where codes of K would. The first row of a block sees one key there,
whose score alone would be its reference, so the second step moves every reference to its maximum, whatever LAG says.
"""

from __future__ import annotations

from .common import (
    SLOT_LAYOUT,
    SLOTS,
    agreed,
    announce,
    announced,
    as_given,
    await_turn,
    declare_vote,
    fetch,
    full_keys,
    key_groups,
    operand,
    outcome,
    pass_turn,
    seen_keys,
    store_quarters,
    vote,
)
from .compat import as_bfloat16, fence_async_shared, gl, gluon, mbarrier, tma_load, warpgroup_mma, warpgroup_mma_wait

LAG = gl.constexpr(6.0)  # in powers of two; reference/ has the same in Recipe.lag
# a partial sum below it holds no weight above 2^LAG, whatever exp2 makes of the last bits
PEAK = gl.constexpr(2.0**LAG.value - 1)


@gluon.jit
def forward_producer(q_desc, a_desc, k_desc, v_desc, f_desc, g_desc, qb_desc, kb_desc, ITEMS, COUNTS, qs, qf, ks, vs, fs,
                     gs, slots, q_full, q_empty, k_full, v_full, empty, q_pad, k_pad, left, right, hq, group, width,
                     D: gl.constexpr, BN: gl.constexpr, ST: gl.constexpr, LEFT: gl.constexpr,
                     FRONTIER: gl.constexpr):  # fmt: skip
    blocks = gl.load(COUNTS)
    total = blocks * hq
    i = 0
    tile = 0
    t = gl.atomic_add(COUNTS + 7, 1)
    while t < total:
        h, out_row, valid, pad, position, other_pad, lk, first, end, k_row, _shift = fetch(ITEMS, t, blocks, hq, width)
        row = h * q_pad + pad
        base = (h // group) * k_pad + other_pad
        mbarrier.wait(q_empty, (tile & 1) ^ 1)
        announce(slots, 0, h)
        announce(slots, 1, out_row)
        announce(slots, 2, valid)
        announce(slots, 3, position)
        announce(slots, 4, lk)
        announce(slots, 5, first)
        announce(slots, 6, end)
        mbarrier.expect(q_full, 128 * D + 512)
        for c in gl.static_range(2):
            tma_load(q_desc, [row + c * 64, 0], q_full, qs.index(c))
            tma_load(a_desc, [row + c * 64], q_full, qf.index(c))
        tile += 1
        full_first, full_end = full_keys(position, first, end, left, right, LEFT)
        for j in range(first, end):
            n = j
            if FRONTIER:
                n = gl.where(j == first, end, j) - 1
            s = i % ST
            mbarrier.wait(empty.index(s), ((i // ST) & 1) ^ 1)
            wide = False
            if FRONTIER:
                wide = (n < full_first) | (n >= full_end)
            if wide:
                q16 = as_bfloat16(ks.index(s), 64, D)
                mbarrier.expect(k_full.index(s), BN * D)
                tma_load(qb_desc, [out_row, h * D], k_full.index(s), q16)
                mbarrier.expect(v_full.index(s), 2 * BN * D)
                tma_load(kb_desc, [k_row + n * BN, (h // group) * D], v_full.index(s), vs.index(s))
                i += 1
                s = i % ST
                mbarrier.wait(empty.index(s), ((i // ST) & 1) ^ 1)
                q16 = as_bfloat16(ks.index(s), 64, D)
                mbarrier.expect(k_full.index(s), BN * D + BN * 4 + 128)
                tma_load(qb_desc, [out_row + 64, h * D], k_full.index(s), q16)
            else:
                mbarrier.expect(k_full.index(s), BN * D + BN * 4 + 128)
                tma_load(k_desc, [base + n * BN, 0], k_full.index(s), ks.index(s))
            tma_load(f_desc, [base + n * BN], k_full.index(s), fs.index(s))
            tma_load(g_desc, [(base + n * BN) // 16], k_full.index(s), gs.index(s))
            mbarrier.expect(v_full.index(s), 2 * BN * D)
            tma_load(v_desc, [base + n * BN, 0], v_full.index(s), vs.index(s))
            i += 1
        t = gl.atomic_add(COUNTS + 7, 1)
    mbarrier.wait(q_empty, (tile & 1) ^ 1)
    announce(slots, 0, -1)
    mbarrier.arrive(q_full, count=1)


@gluon.jit
def thread_sums(p, BN: gl.constexpr):
    """(64, BN) -> (64, 4): sums over what one thread holds of a row; four lanes share a row."""
    return gl.sum(gl.sum(p.reshape([64, BN // 8, 4, 2]), 3), 1)


@gluon.jit
def wide_scores(c, i, ks, vs, zero, D: gl.constexpr, ST: gl.constexpr):
    """Start S of a frontier step: Q and K as given, from the two stages that its tiles take."""
    q = as_bfloat16(ks.index((i + c) % ST), 64, D)
    return warpgroup_mma(q, vs.index(i % ST).permute((1, 0)), zero, use_acc=False, is_async=True)


@gluon.jit
def again(x, factor, a, m, seen, lag, MASK: gl.constexpr):
    """A step by the rule: its weights, the rows' new reference, and the factor that rescales what came before."""
    t = x * factor[None, :]
    if MASK:
        t = gl.where(seen, t, -float("inf"))
    top = gl.max(t, 1) * a
    new = gl.where(top > m + lag, top, m)
    safe = gl.where(new == -float("inf"), 0.0, new)  # a row that has seen nothing yet
    return gl.exp2(t * a[:, None] - safe[:, None]), new, gl.exp2(m - safe)


@gluon.jit
def first_step(n, i, a, q, row, zero, lk, left, right, unit, ks, vs, fs, k_full, v_full, empty,
               WIDE: gl.constexpr, LEFT: gl.constexpr, D: gl.constexpr, BN: gl.constexpr, ST: gl.constexpr, SL: gl.constexpr,
               c):  # fmt: skip
    """The first step of an item, by the rule and with nothing under way: its weights, the row references, and its stage."""
    mbarrier.wait(k_full.index(i % ST), (i // ST) & 1)
    if WIDE:
        mbarrier.wait(v_full.index(i % ST), (i // ST) & 1)
        i += 1
        mbarrier.wait(k_full.index(i % ST), (i // ST) & 1)
    s = i % ST
    factor = fs.index(s).load(gl.SliceLayout(0, SL))
    if WIDE:
        a, factor = as_given(a, unit), as_given(factor, 1.0)
        ts = wide_scores(c, i - 1, ks, vs, zero, D, ST)
        x = gl.convert_layout(warpgroup_mma_wait(0, deps=[ts]), SL, assert_trivial=True)
    else:
        ts = warpgroup_mma(q, ks.index(s).permute((1, 0)), zero, use_acc=False, is_async=True)
        x = warpgroup_mma_wait(0, deps=[ts])
    seen = seen_keys(row, n, lk, left, right, LEFT, BN, SL, True)
    w, m, _ = again(
        x, factor, a, gl.full([64], -float("inf"), gl.float32, layout=gl.SliceLayout(1, SL)), seen, LAG, True
    )
    if WIDE:
        mbarrier.arrive(empty.index((i - 1) % ST), count=1)
    return w, m, i


@gluon.jit
def forward_steps(lo, hi, last, second, i, p, acc, m, l, a, q, row, zero, lk, left, right, unit, ks, vs, fs, gs, k_full, v_full,
                  empty, MASK: gl.constexpr, WIDE: gl.constexpr, LEFT: gl.constexpr, D: gl.constexpr, BN: gl.constexpr,
                  ST: gl.constexpr, SL: gl.constexpr, OL: gl.constexpr, DOT: gl.constexpr, c):  # fmt: skip
    if WIDE:
        a = as_given(a, unit)
    for n in range(lo, hi):
        if WIDE:
            mbarrier.wait(k_full.index(i % ST), (i // ST) & 1)
            mbarrier.wait(v_full.index(i % ST), (i // ST) & 1)
            i += 1
            mbarrier.wait(k_full.index(i % ST), (i // ST) & 1)
        s = i % ST
        back: gl.constexpr = 2 if WIDE else 1
        sp = (i - back) % ST
        if MASK:
            factor = fs.index(s).load(gl.SliceLayout(0, SL))
        else:
            one = agreed(gs.index(s), BN // 32)
        if WIDE:
            factor = as_given(factor, 1.0)
        await_turn(c)
        if WIDE:
            ts = wide_scores(c, i - 1, ks, vs, zero, D, ST)
        else:
            ts = warpgroup_mma(q, ks.index(s).permute((1, 0)), zero, use_acc=False, is_async=True)
        mbarrier.wait(v_full.index(sp), ((i - back) // ST) & 1)
        to = warpgroup_mma(p, vs.index(sp), acc, is_async=True)
        pass_turn(c)
        x = warpgroup_mma_wait(1, deps=[ts])
        if WIDE:
            x = gl.convert_layout(x, SL, assert_trivial=True)
        if MASK:
            w = gl.exp2((x * factor[None, :]) * a[:, None] - m[:, None])
            w = gl.where(seen_keys(row, n, lk, left, right, LEFT, BN, SL, True), w, 0.0)
        elif one:
            w = gl.exp2(key_groups(x, gs.index(s), a, m))
        else:
            factor = fs.index(s).load(gl.SliceLayout(0, SL))
            w = gl.exp2((x * factor[None, :]) * a[:, None] - m[:, None])
        sums = thread_sums(w, BN)
        limit = PEAK
        lag = LAG
        if second is not None:  # the step by the rule, in which every row's reference may rise
            at = i - back + 1
            limit = gl.where(at == second, -1.0, PEAK)
            lag = gl.where(at == second, 0.0, LAG)
        vote(c, sums, limit)
        # this wait's branch also keeps the assembler from moving the weights behind the join, where no product runs
        mbarrier.wait(k_full.index((i + 1) % ST), ((i + 1) // ST) & 1, pred=i < last)
        acc, w = warpgroup_mma_wait(0, deps=[to, w])
        raised = outcome()
        if raised != 0:
            if WIDE:
                ts = wide_scores(c, i - 1, ks, vs, zero, D, ST)
            else:
                ts = warpgroup_mma(q, ks.index(s).permute((1, 0)), zero, use_acc=False, is_async=True)
            x = warpgroup_mma_wait(0, deps=[ts])
            if WIDE:
                x = gl.convert_layout(x, SL, assert_trivial=True)
            # n, told so that the assembler does not keep the mask above in 64 bits of registers for a step that rarely comes
            seen = seen_keys(row, n + raised - 1, lk, left, right, LEFT, BN, SL, True)
            factor = fs.index(s).load(gl.SliceLayout(0, SL))
            if WIDE:
                factor = as_given(factor, 1.0)
            w, m, alpha = again(x, factor, a, m, seen, lag, MASK)
            sums = thread_sums(w, BN)
            l = l * gl.convert_layout(alpha, gl.SliceLayout(1, l.type.layout), assert_trivial=True)[:, None]
            acc = acc * gl.convert_layout(alpha, gl.SliceLayout(1, OL))[:, None]
        l += sums
        mbarrier.arrive(empty.index(sp), count=1)
        if WIDE:
            mbarrier.arrive(empty.index((i - 1) % ST), count=1)
        p = operand(w, DOT)
        i += 1
    return i, p, acc, m, l


@gluon.jit
def forward_consumer(c, O, REST, LSE, qs, qf, ks, vs, fs, gs, slots, q_full, q_empty, k_full, v_full, empty, o_stride_t,
                     lse_stride, left, right, unit, D: gl.constexpr, BN: gl.constexpr, ST: gl.constexpr,
                     LEFT: gl.constexpr, HOLD: gl.constexpr, FRONTIER: gl.constexpr,
                     REMAINDER: gl.constexpr):  # fmt: skip
    SL: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 32])
    OL: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    DOT: gl.constexpr = gl.DotOperandLayout(0, OL, 2)
    RL: gl.constexpr = gl.SliceLayout(1, SL)
    BL: gl.constexpr = gl.BlockedLayout([1, 8], [1024 // D, D // 32], [4, 1], [1, 0])
    WL: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    zero = gl.full([64, BN], 0.0, gl.float32, layout=SL)
    zero_wide = gl.full([64, BN], 0.0, gl.float32, layout=WL)
    i = 0
    tile = 0
    if c == 1:
        pass_turn(c)
    mbarrier.wait(q_full, 0)
    h = announced(slots, 0)
    while h >= 0:
        out_row = announced(slots, 1)
        valid = announced(slots, 2)
        position = announced(slots, 3)
        lk = announced(slots, 4)
        first = announced(slots, 5)
        end = announced(slots, 6)
        full_first, full_end = full_keys(position, first, end, left, right, LEFT)
        whole_end = gl.maximum(gl.minimum(full_end, lk // BN), full_first)  # behind it a tile reaches past the document
        local = c * 64 + gl.arange(0, 64, layout=RL)
        row = position + local
        a = gl.where(row + right < 0, 1.0, qf.index(c).load(RL))  # sees no key: not finite for no reason of its own
        if HOLD:
            q = qs.index(c).load(gl.DotOperandLayout(0, SL, 4))
            mbarrier.arrive(q_empty, count=1)  # all is in registers: the next item's may come
        else:
            q = qs.index(c)
        m = gl.full([64], -float("inf"), gl.float32, layout=RL)
        l = thread_sums(zero, BN)
        acc = gl.full([64, D], 0.0, gl.float32, layout=OL)
        if first < end:
            last = i + end - 1 - first
            if not FRONTIER:
                w, m, i = first_step(first, i, a, q, row, zero, lk, left, right, unit, ks, vs, fs, k_full, v_full, empty,
                                     False, LEFT, D, BN, ST, SL, c)  # fmt: skip
            else:
                own = end - 1
                last += full_first - first + end - full_end  # a frontier step's tiles take two stages
                w, m, i = first_step(own, i, a, q, row, zero_wide, lk, left, right, unit, ks, vs, fs, k_full, v_full, empty,
                                     True, LEFT, D, BN, ST, SL, c)  # fmt: skip
            l = thread_sums(w, BN)
            p = operand(w, DOT)
            mbarrier.wait(k_full.index((i + 1) % ST), ((i + 1) // ST) & 1, pred=i < last)
            i += 1
            if not FRONTIER:
                if LEFT:
                    i, p, acc, m, l = forward_steps(
                        first + 1, full_first, last, None, i, p, acc, m, l, a, q, row, zero, lk, left, right, unit, ks, vs, fs,
                        gs, k_full, v_full, empty, True, False, LEFT, D, BN, ST, SL, OL, DOT, c)  # fmt: skip
                i, p, acc, m, l = forward_steps(
                    gl.maximum(first + 1, full_first), whole_end, last, None, i, p, acc, m, l, a, q, row, zero, lk, left,
                    right, unit, ks, vs, fs, gs, k_full, v_full, empty, False, False, LEFT, D, BN, ST, SL, OL, DOT,
                    c)  # fmt: skip
                i, p, acc, m, l = forward_steps(
                    gl.maximum(first + 1, whole_end), end, last, None, i, p, acc, m, l, a, q, row, zero, lk, left, right,
                    unit, ks, vs, fs, gs, k_full, v_full, empty, True, False, LEFT, D, BN, ST, SL, OL, DOT, c)  # fmt: skip
            else:
                second = i
                if LEFT:
                    i, p, acc, m, l = forward_steps(
                        first, gl.minimum(full_first, own), last, second, i, p, acc, m, l, a, q, row, zero_wide, lk, left,
                        right, unit, ks, vs, fs, gs, k_full, v_full, empty, True, True, LEFT, D, BN, ST, SL, OL, DOT,
                        c)  # fmt: skip
                i, p, acc, m, l = forward_steps(
                    full_first, gl.minimum(full_end, own), last, second, i, p, acc, m, l, a, q, row, zero, lk, left, right,
                    unit, ks, vs, fs, gs, k_full, v_full, empty, False, False, LEFT, D, BN, ST, SL, OL, DOT, c)  # fmt: skip
            sp = (i - 1) % ST
            mbarrier.wait(v_full.index(sp), ((i - 1) // ST) & 1)
            to = warpgroup_mma(p, vs.index(sp), acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=[to])
            mbarrier.arrive(empty.index(sp), count=1)
        if not HOLD:
            mbarrier.arrive(q_empty, count=1)
        total_weight = gl.convert_layout(gl.sum(l, 1), RL)
        blind = total_weight == 0.0
        inverse = 1.0 / gl.where(blind, 1.0, total_weight)
        lse = gl.where(blind, -float("inf"), (m + gl.log2(total_weight)) * 0.6931471805599453)
        gl.store(LSE + h.to(gl.int64) * lse_stride + out_row + local, lse, mask=local < valid)
        out = acc * gl.convert_layout(inverse, gl.SliceLayout(1, OL))[:, None]
        ro = c * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, BL))
        co = h * D + gl.arange(0, D // 4, layout=gl.SliceLayout(0, BL))
        at = (out_row + ro).to(gl.int64)[:, None] * o_stride_t + co[None, :]
        rounded = out.to(gl.bfloat16)
        store_quarters(O + at, rounded, (ro < valid)[:, None], D, BL)
        if REMAINDER:  # what rounding took from O, for D of the backward
            store_quarters(REST + at, (out - rounded.to(gl.float32)).to(gl.bfloat16), (ro < valid)[:, None], D, BL)
        tile += 1
        mbarrier.wait(q_full, tile & 1)
        h = announced(slots, 0)


@gluon.jit(do_not_specialize=["lse_stride", "left", "right", "hq", "group", "width"])
def forward_kernel(q_desc, a_desc, k_desc, v_desc, f_desc, g_desc, qb_desc, kb_desc, O, REST, LSE, ITEMS, COUNTS, q_pad, k_pad,
                   o_stride_t, lse_stride, left, right, unit, hq, group, width, D: gl.constexpr, BN: gl.constexpr,
                   ST: gl.constexpr, LEFT: gl.constexpr, HOLD: gl.constexpr, FRONTIER: gl.constexpr,
                   REMAINDER: gl.constexpr):  # fmt: skip
    qs = gl.allocate_shared_memory(gl.float8e4nv, [2, 64, D], q_desc.layout)
    qf = gl.allocate_shared_memory(gl.float32, [2, 64], a_desc.layout)
    ks = gl.allocate_shared_memory(gl.float8e4nv, [ST, BN, D], k_desc.layout)
    vs = gl.allocate_shared_memory(gl.bfloat16, [ST, BN, D], v_desc.layout)
    fs = gl.allocate_shared_memory(gl.float32, [ST, BN], f_desc.layout)
    gs = gl.allocate_shared_memory(gl.float32, [ST, 32], g_desc.layout)
    slots = gl.allocate_shared_memory(gl.int32, [SLOTS, 1], SLOT_LAYOUT)
    q_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [ST, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [ST, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [ST, 1], mbarrier.MBarrierLayout())
    mbarrier.init(q_full, 1)
    mbarrier.init(q_empty, 2)
    for s in gl.static_range(ST):
        mbarrier.init(k_full.index(s), 1)
        mbarrier.init(v_full.index(s), 1)
        mbarrier.init(empty.index(s), 2)
    fence_async_shared()
    declare_vote()
    gl.warp_specialize([
        (forward_consumer, (0, O, REST, LSE, qs, qf, ks, vs, fs, gs, slots, q_full, q_empty, k_full, v_full, empty, o_stride_t,
                            lse_stride, left, right, unit, D, BN, ST, LEFT, HOLD, FRONTIER, REMAINDER)),
        (forward_consumer, (1, O, REST, LSE, qs, qf, ks, vs, fs, gs, slots, q_full, q_empty, k_full, v_full, empty, o_stride_t,
                            lse_stride, left, right, unit, D, BN, ST, LEFT, HOLD, FRONTIER, REMAINDER)),
        (forward_producer, (q_desc, a_desc, k_desc, v_desc, f_desc, g_desc, qb_desc, kb_desc, ITEMS, COUNTS, qs, qf, ks, vs,
                            fs, gs, slots, q_full, q_empty, k_full, v_full, empty, q_pad, k_pad, left, right, hq, group,
                            width, D, BN, ST, LEFT, FRONTIER)),
    ], [4, 1], [240, 24])  # fmt: skip
