"""Who works on what: lists of work, built on the device so that the host never waits and a CUDA graph can be replayed
with other offsets.

Two things are laid out here from `cu_seqlens` alone.

*Padded rows.* Every document starts at a multiple of 128 rows in the encoded buffers, so a block of document-local
positions is one aligned tile, wherever the document lies in the packed buffer, and no tile holds rows of two documents.
A call with T tokens in n documents has at most T // 128 + min(n, T) blocks: that is the capacity everything is allocated
for, known without reading an offset.

*Items.* An item is one CTA's work: a block of 128 queries with the key blocks it sees (forward, dQ), or a block of 128
keys with the query steps that see it (dK, dV). Items are ordered longest first by a counting sort, so that what is left
for the end is short. The order of items of one length is whatever the atomics made of it; no sum depends on it.

A record is 16 int32 words; see the names below. Offsets are clamped to the buffer and made monotonous first: a
corrupted `cu_seqlens` may give nonsense, but no access leaves a buffer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from flamia.packing import Documents
from flamia.saved import BLOCK, BUCKETS, RECORD

OPEN = 1 << 29  # an open side of a window

# words of a record; "own" is the side that the item's block lies on, "other" the side it walks along
ROW, VALID, PAD, POSITION, OTHER_PAD, OTHER_LENGTH, FIRST, END, OTHER_ROW, SHIFT = (tl.constexpr(i) for i in range(10))
WORDS = tl.constexpr(10)  # that are written, of the 16


class Plan(NamedTuple):
    """Device tables of one call. All int32, flat.

    q_blocks, k_blocks: a record of 16 words per block, in the order of the padded buffers (ROW, VALID, PAD and POSITION
        are set): what the encoders walk along.
    q_items, k_items: the same blocks, longest first, for the attention kernels.
    scratch: the histogram of the sort; `counts` and the documents' tables follow it in memory.
    counts: (16,) query blocks, key blocks, a flag (some token is not finite), the first row and the end of the documents
        on the query side and on the key side, then how many items the three attention kernels have given out
    """

    q_blocks: Tensor
    k_blocks: Tensor
    q_items: Tensor
    k_items: Tensor
    scratch: Tensor
    counts: Tensor
    tables: Tensor
    q_capacity: int
    k_capacity: int


def tables(words: Tensor, sizes: Sequence[int]) -> Plan:
    """The parts of `words` (flamia/saved.py has the sizes), written or yet to be written."""
    return Plan(*words.split_with_sizes(sizes), sizes[0] // RECORD, sizes[1] // RECORD)


def lay_out(plan: Plan, documents: Documents, q_rows: int, k_rows: int, q_step: int = 64) -> None:
    """Write the tables of one call. q_step: queries in one step of the dK/dV pass."""
    left = OPEN if documents.left is None else min(documents.left, OPEN)
    right = OPEN if documents.right is None else min(documents.right, OPEN)
    cap_q, cap_k = plan.q_capacity, plan.k_capacity
    schedule_kernel[(1,)](
        documents.cu_q, documents.cu_k, plan.scratch, plan.q_blocks, plan.k_blocks, plan.q_items, plan.k_items,
        documents.cu_q.numel() - 1, q_rows, k_rows, cap_q, cap_k, left, right, Q_STEP=q_step, SHIFT_Q=_shift(cap_k),
        SHIFT_K=_shift(cap_q * (BLOCK // q_step)), CHUNK=1024, num_warps=8,
    )  # fmt: skip


def _shift(longest: int) -> int:
    """How far to shift a length so that it falls into a bucket."""
    return max(0, longest.bit_length() - (BUCKETS.bit_length() - 1))


@triton.jit
def _maximum(a, b):
    return tl.maximum(a, b)


@triton.jit
def _lay_documents(CU, STARTS, LENGTHS, PADS, count, rows, CHUNK: tl.constexpr):
    """Clamped starts and lengths of the documents, and their first padded block. Returns (blocks, last row's end)."""
    blocks = 0
    floor = 0
    for first in range(0, count, CHUNK):
        d = first + tl.arange(0, CHUNK)
        live = d < count
        start = tl.minimum(tl.maximum(tl.load(CU + d, mask=live, other=0), 0), rows)
        end = tl.minimum(tl.maximum(tl.load(CU + d + 1, mask=live, other=0), 0), rows)
        start = tl.maximum(tl.associative_scan(start, 0, _maximum), floor)
        end = tl.maximum(tl.associative_scan(tl.maximum(start, end), 0, _maximum), floor)
        length = tl.where(live, end - start, 0)
        size = (length + 127) // 128
        before = blocks + tl.cumsum(size, 0) - size
        tl.store(STARTS + d, start, mask=live)
        tl.store(LENGTHS + d, length, mask=live)
        tl.store(PADS + d, before, mask=live)
        blocks += tl.sum(size, 0)
        floor = tl.max(end, 0)
    return blocks, floor


@triton.jit
def _first(CU, rows):
    return tl.minimum(tl.maximum(tl.load(CU), 0), rows)


@triton.jit
def _find(PADS, block, count):
    """The document of each block: the last one whose first padded block is at or before it."""
    low = tl.zeros_like(block)
    high = low + count
    width = count
    while width > 0:
        middle = (low + high) // 2
        right = tl.load(PADS + middle, mask=middle < count, other=0) <= block
        low = tl.where(right, middle, low)
        high = tl.where(right, high, middle)
        width = width // 2
    return low


@triton.jit
def _query_range(position, valid, lk, left, right):
    """Key blocks [first, end) that a block of queries at `position` sees."""
    last = position + valid - 1
    first = tl.maximum(position - left, 0) // 128
    end = tl.minimum((lk + 127) // 128, tl.where(last + right < 0, 0, tl.maximum(last + right, 0) // 128 + 1))
    return first, tl.maximum(first, end)


@triton.jit
def _key_range(k0, valid, lq, shift, left, right, STEP: tl.constexpr):
    """Query steps [first, end) that see a block of keys."""
    low = tl.maximum(k0 - right - shift, 0)
    high = tl.minimum(lq - 1, k0 + valid - 1 + left - shift)
    first = low // STEP
    return first, tl.where(high < low, first, tl.maximum(high, 0) // STEP + 1)


@triton.jit
def _records(BLOCKS, HIST, STARTS, LENGTHS, PADS, O_STARTS, O_LENGTHS, O_PADS, count, blocks, cap, left, right,
             KEYS: tl.constexpr, STEP: tl.constexpr, SHIFT_BY: tl.constexpr, CHUNK: tl.constexpr):  # fmt: skip
    """Write the records of one side in padded order, and count how many have each length."""
    for base in range(0, cap, CHUNK):
        b = base + tl.arange(0, CHUNK)
        inside = b < cap
        live = b < blocks
        d = _find(PADS, b, count)
        own = (b - tl.load(PADS + d, mask=live, other=0)) * 128
        length = tl.load(LENGTHS + d, mask=live, other=0)
        start = tl.load(STARTS + d, mask=live, other=0)
        other = tl.load(O_LENGTHS + d, mask=live, other=0)
        valid = tl.where(live, tl.minimum(length - own, 128), 0)
        if KEYS:
            shift = length - other
            position = own
            first, end = _key_range(own, valid, other, shift, left, right, STEP)
        else:
            shift = other - length
            position = own + shift
            first, end = _query_range(position, valid, other, left, right)
        end = tl.where(live, end, first)
        record = BLOCKS + b * 16
        tl.store(record + ROW, start + own, mask=inside)
        tl.store(record + VALID, valid, mask=inside)
        tl.store(record + PAD, b * 128, mask=inside)
        tl.store(record + POSITION, position, mask=inside)
        tl.store(record + OTHER_PAD, tl.load(O_PADS + d, mask=live, other=0) * 128, mask=inside)
        tl.store(record + OTHER_LENGTH, other, mask=inside)
        tl.store(record + FIRST, first, mask=inside)
        tl.store(record + END, end, mask=inside)
        tl.store(record + OTHER_ROW, tl.load(O_STARTS + d, mask=live, other=0), mask=inside)
        tl.store(record + SHIFT, shift, mask=inside)
        bucket = 1023 - tl.minimum((end - first) >> SHIFT_BY, 1023)
        tl.atomic_add(HIST + bucket, 1, mask=live, sem="relaxed")


@triton.jit
def _sort(BLOCKS, ITEMS, HIST, blocks, cap, SHIFT_BY: tl.constexpr, CHUNK: tl.constexpr):
    """Copy the records, longest first; those without a block stay where they are."""
    bucket = tl.arange(0, 1024)
    size = tl.load(HIST + bucket, cache_modifier=".cg")  # past the first-level cache: atomics wrote it
    tl.debug_barrier()
    tl.store(HIST + bucket, tl.cumsum(size, 0) - size)
    tl.debug_barrier()
    word = tl.arange(0, 16)
    for base in range(0, cap, CHUNK):
        b = base + tl.arange(0, CHUNK)
        live = b < blocks
        record = BLOCKS + b * 16
        steps = tl.load(record + END, mask=live, other=0) - tl.load(record + FIRST, mask=live, other=0)
        place = tl.atomic_add(HIST + 1023 - tl.minimum(steps >> SHIFT_BY, 1023), 1, mask=live, sem="relaxed")
        place = tl.where(live, place, b)
        inside = (b < cap)[:, None] & (word < WORDS)[None, :]
        words = tl.load(BLOCKS + b[:, None] * 16 + word[None, :], mask=inside, other=0)
        tl.store(ITEMS + place[:, None] * 16 + word[None, :], words, mask=inside)


@triton.jit(do_not_specialize=["count", "q_rows", "k_rows", "cap_q", "cap_k", "left", "right"])
def schedule_kernel(CU_Q, CU_K, SCRATCH, Q_BLOCKS, K_BLOCKS, Q_ITEMS, K_ITEMS, count, q_rows, k_rows, cap_q, cap_k,
                    left, right, Q_STEP: tl.constexpr, SHIFT_Q: tl.constexpr, SHIFT_K: tl.constexpr,
                    CHUNK: tl.constexpr):  # fmt: skip
    HIST = SCRATCH
    COUNTS = SCRATCH + 2048
    TABLE = COUNTS + 16
    stride = count + 1
    tl.store(HIST + tl.arange(0, 2048), tl.zeros([2048], tl.int32))
    nq, q_end = _lay_documents(CU_Q, TABLE, TABLE + stride, TABLE + 2 * stride, count, q_rows, CHUNK)
    nk, k_end = _lay_documents(CU_K, TABLE + 3 * stride, TABLE + 4 * stride, TABLE + 5 * stride, count, k_rows, CHUNK)
    tl.store(COUNTS, nq)
    tl.store(COUNTS + 1, nk)
    tl.store(COUNTS + 2, 0)
    tl.store(COUNTS + 3, _first(CU_Q, q_rows))
    tl.store(COUNTS + 4, q_end)
    tl.store(COUNTS + 5, _first(CU_K, k_rows))
    tl.store(COUNTS + 6, k_end)
    tl.store(COUNTS + 7, 0)
    tl.debug_barrier()
    _records(Q_BLOCKS, HIST, TABLE, TABLE + stride, TABLE + 2 * stride, TABLE + 3 * stride, TABLE + 4 * stride,
             TABLE + 5 * stride, count, nq, cap_q, left, right, False, Q_STEP, SHIFT_Q, CHUNK)  # fmt: skip
    _records(K_BLOCKS, HIST + 1024, TABLE + 3 * stride, TABLE + 4 * stride, TABLE + 5 * stride, TABLE, TABLE +
             stride, TABLE + 2 * stride, count, nk, cap_k, left, right, True, Q_STEP, SHIFT_K, CHUNK)  # fmt: skip
    tl.debug_barrier()
    _sort(Q_BLOCKS, Q_ITEMS, HIST, nq, cap_q, SHIFT_Q, CHUNK)
    _sort(K_BLOCKS, K_ITEMS, HIST + 1024, nk, cap_k, SHIFT_K, CHUNK)
