"""Pieces that the three attention kernels share: taking work from the list, and rounding straight into an operand.

CTAs are persistent. A kernel's producer warp draws the number of the next item from a counter in memory (integers, so
the draw disturbs no sum), reads its record, and leaves what the consumers need in shared memory, behind the barrier that
also announces the item's resident tiles: consumers never wait for global memory. Which CTA computes an item changes
nothing in the item.
"""

from __future__ import annotations

from .compat import gl, gluon, mbarrier

SLOTS = gl.constexpr(8)
SLOT_LAYOUT = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.jit
def item(t, blocks, heads, width):
    """(block's rank, head) of item t. Heads go in groups of `width`: all blocks of a group, longest first, then the next
    group, so that the keys of only a few heads pass through the second-level cache at a time."""
    span = blocks * width
    group = t // span
    rest = t - group * span
    inside = gl.minimum(width, heads - group * width)
    return rest // inside, group * width + rest % inside


@gluon.jit
def fetch(ITEMS, t, blocks, heads, width):
    """Item t: its head, and the first ten words of its record."""
    rank, h = item(t, blocks, heads, width)
    r = ITEMS + rank * 16
    return (
        h, gl.load(r), gl.load(r + 1), gl.load(r + 2), gl.load(r + 3), gl.load(r + 4), gl.load(r + 5), gl.load(r + 6),
        gl.load(r + 7), gl.load(r + 8), gl.load(r + 9),
    )  # fmt: skip


@gluon.jit
def announce(slots, k: gl.constexpr, value):
    """Leave a number for the consumers (one warp)."""
    slots.index(k).store(gl.full([1], value, gl.int32, layout=gl.BlockedLayout([1], [32], [1], [0])))


@gluon.jit
def announced(slots, k: gl.constexpr):
    """Read it (four warps)."""
    return gl.max(slots.index(k).load(gl.BlockedLayout([1], [32], [4], [0])), 0)


@gluon.jit
def operand(x, LAYOUT: gl.constexpr):
    """FP32 accumulator layout -> BF16 A operand in registers: the fragments coincide, so this is one rounding
    instruction for two numbers and no movement."""
    x = gl.convert_layout(x, LAYOUT, assert_trivial=True)
    return gl.inline_asm_elementwise(
        "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [x], dtype=gl.bfloat16, is_pure=True, pack=2
    )


@gluon.jit
def halves(x):
    """Of the columns."""
    return x.reshape([x.shape[0], 2, x.shape[1] // 2]).permute((0, 2, 1)).split()


@gluon.jit
def store_quarters(at, x, mask, D: gl.constexpr, BL: gl.constexpr):
    """Store a tile of D columns, a quarter of them at a time: the exchange between threads takes shared memory, and little
    is left. at: addresses of the first quarter."""
    low, high = halves(x)
    first, second = halves(low)
    gl.store(at, gl.convert_layout(first, BL), mask=mask)
    gl.store(at + D // 4, gl.convert_layout(second, BL), mask=mask)
    first, second = halves(high)
    gl.store(at + D // 2, gl.convert_layout(first, BL), mask=mask)
    gl.store(at + 3 * D // 4, gl.convert_layout(second, BL), mask=mask)


@gluon.jit
def late(x):
    """x (int32), as if it were known only here: the compiler would evaluate a mask ahead of the products and carry its bits
    past them, packed, at three times the instructions."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def seen_keys(row, n, lk, left, right, LEFT: gl.constexpr, BN: gl.constexpr, SL: gl.constexpr, LATE: gl.constexpr):
    """Which (query, key) pairs of step n are visible: keys row - left .. row + right of the document's lk."""
    col = n * BN + gl.arange(0, BN, layout=gl.SliceLayout(0, SL))
    high = gl.minimum(row + right, lk - 1)
    if LATE:
        high = late(high)
    seen = col[None, :] <= high[:, None]
    if LEFT:
        low = row - left
        if LATE:
            low = late(low)
        seen = seen & (col[None, :] >= low[:, None])
    return seen


@gluon.jit
def full_keys(position, first, end, left, right, LEFT: gl.constexpr):
    """Of the key blocks first .. end those of full pairs: every query of the block at `position` sees them whole, by the
    positions of blocks alone (flamia/packing.py, Documents.full_blocks)."""
    full_end = gl.minimum(gl.maximum(gl.maximum(position + right + 1, 0) // 128, first), end)
    full_first = first
    if LEFT:
        full_first = gl.minimum(gl.maximum((gl.maximum(position + 127 - left, 0) + 127) // 128, first), full_end)
    return full_first, full_end


@gluon.jit
def as_given(factor, unit):
    """What takes the place of the factors of codes where a product reads the tensor itself: +- unit, and still NaN for a
    token that is not finite."""
    return gl.where(factor > 0, unit, gl.where(factor < 0, -unit, factor))


@gluon.jit
def agreed(mem, count: gl.constexpr):
    """Whether `count` groups of 32 tokens have one factor each (quantize.py writes 0 where they have not)."""
    f = mem.slice(0, count).load(gl.BlockedLayout([count], [32], [4], [0]))
    return gl.min(gl.abs(f), 0) > 0


# Scores against one factor for each group of 32 tokens: what a column's factor costs is then paid once per group and row, and
# the exponent of a weight is one fused multiply-add. Factors are powers of two, so the bits are those of the general way.


@gluon.jit
def key_groups(x, mem, a, m):
    """x * (factor of the column's group * a[row]) - m[row]."""
    rows: gl.constexpr = x.shape[0]
    groups: gl.constexpr = x.shape[1] // 32
    y = x.reshape([rows, groups, 32])
    L: gl.constexpr = y.type.layout
    by_row: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, L))
    f = mem.slice(0, groups).load(gl.SliceLayout(0, gl.SliceLayout(2, L)))
    c = (gl.convert_layout(a, by_row, assert_trivial=True)[:, None] * f[None, :])[:, :, None]
    z = y * c - gl.convert_layout(m, by_row, assert_trivial=True)[:, None][:, :, None]
    return gl.convert_layout(z.reshape([rows, x.shape[1]]), x.type.layout, assert_trivial=True)


@gluon.jit
def pass_over(count, i, full, empty, ST: gl.constexpr):
    """Give back the tiles of `count` steps of which a warpgroup sees nothing, once they are there: a release ahead of
    the arrival would be taken for one of the round before."""
    for _n in range(count):
        s = i % ST
        mbarrier.wait(full.index(s), (i // ST) & 1)
        mbarrier.arrive(empty.index(s), count=1)
        i += 1
    return i


# One bit that every thread of a warpgroup can vote on. Gluon's way from a tensor to a scalar crosses lanes and then warps,
# some 300 cycles with two barriers; the hardware's reducing barrier takes one. The result is uniform, so it may steer a
# branch, but has to reach Gluon as a scalar: it waits in a register of the machine language, declared once per kernel.
_VOTE = (
    "{ .reg .pred p, q; .reg .f32 t; max.NaN.f32 t, $2, $3; setp.geu.f32 q, t, $4; "
    "barrier.cta.red.or.pred p, BARRIER, 128, q; selp.b32 flamia_vote, 1, 0, p; mov.b32 $0, 0; mov.b32 $1, 0; }"
)
VOTE_0, VOTE_1 = (gl.constexpr(_VOTE.replace("BARRIER", barrier)) for barrier in ("12", "13"))


@gluon.jit
def declare_vote():
    """Once, before the warps part ways."""
    x = gl.full([1], 0, gl.int32, layout=gl.BlockedLayout([1], [32], [4], [0]))
    gl.inline_asm_elementwise(
        ".reg .b32 flamia_vote; mov.b32 $0, $1;", "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def vote(c, x, limit):
    """All 128 threads of warpgroup c: does any hold an x (two FP32 numbers a thread) of at least `limit`, or NaN?"""
    if c == 0:
        gl.inline_asm_elementwise(VOTE_0, "=r,=r,r,r,r,r", [x, limit], dtype=gl.int32, is_pure=False, pack=2)
    else:
        gl.inline_asm_elementwise(VOTE_1, "=r,=r,r,r,r,r", [x, limit], dtype=gl.int32, is_pure=False, pack=2)


@gluon.jit
def outcome():
    """The last vote of this warpgroup, 0 or 1."""
    x = gl.full([1], 0, gl.int32, layout=gl.BlockedLayout([1], [32], [4], [0]))
    x = gl.inline_asm_elementwise("mov.b32 $0, flamia_vote;", "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1)
    return gl.max(x, 0)


# Turns: the two consumer warpgroups start their products one after the other, so that one makes weights while the other's
# products run. Named barriers of all 256 threads; warpgroup 1 passes once before it begins.


@gluon.jit
def await_turn(c):
    x = gl.full([128], 14, gl.int32, layout=gl.BlockedLayout([1], [32], [4], [0])) + c
    gl.inline_asm_elementwise("bar.sync $1, 256; mov.b32 $0, $1;", "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def pass_turn(c):
    x = gl.full([128], 15, gl.int32, layout=gl.BlockedLayout([1], [32], [4], [0])) - c
    gl.inline_asm_elementwise("bar.arrive $1, 256; mov.b32 $0, $1;", "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1)
