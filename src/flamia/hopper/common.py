"""Pieces that the three attention kernels share: taking work from the list, and rounding straight into an operand.

CTAs are persistent. A kernel's producer warp draws the number of the next item from a counter in memory (integers, so
the draw disturbs no sum), reads its record, and leaves what the consumers need in shared memory, behind the barrier that
also announces the item's resident tiles: consumers never wait for global memory. Which CTA computes an item changes
nothing in the item.
"""

from __future__ import annotations

from .compat import gl, gluon

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
