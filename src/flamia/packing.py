"""Packed documents: who sees whom, and how a document is cut into blocks.

Many documents of any length lie behind each other in one buffer; `cu_seqlens` holds their offsets. Everything here is
counted *inside* a document: a scale group, a block or a mask that knew an address would make a token's arithmetic depend
on its neighbours. And everything is decided by positions alone, never by a document's length: what a prefix computes
must not change when more tokens follow.

With Lq queries and Lk keys in a document, the query in row i has position i + Lk - Lq (bottom-right, as flash-attention
counts), in masks and in blocks alike; so the last rows of a long document, computed alone against its keys, fall into
the same blocks as in the full call. A query at position i sees keys i - left .. i + right, both ends included.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Documents:
    """The documents of one call and their mask.

    cu_q, cu_k: (documents + 1,) int32 offsets of queries and keys. left, right: how far a query sees, None = no limit;
    causal attention has right = 0. aligned: whoever made the offsets vouches that every document's first query lies on a
    multiple of 128 positions, which nobody can see on the host where queries and keys differ in number.
    """

    cu_q: Tensor
    cu_k: Tensor
    left: int | None = None
    right: int | None = None
    aligned: bool = False

    @classmethod
    def batched(cls, batch: int, lq: int, lk: int, left: int | None, right: int | None, device=None) -> Documents:
        """`batch` documents of equal lengths."""
        steps = torch.arange(batch + 1, dtype=torch.int32, device=device)
        return cls(steps * lq, steps * lk, left, right)

    def spans(self) -> list[tuple[int, int, int, int]]:
        """(first query row, end, first key row, end) of each document, on the host: waits for the device."""
        q, k = self.cu_q.tolist(), self.cu_k.tolist()
        return list(zip(q[:-1], q[1:], k[:-1], k[1:]))

    def positions(self, side: str, rows: int) -> tuple[Tensor, Tensor]:
        """(document, position) of each of `rows` rows of the buffer, int64 (rows,). side: "q" or "k". Rows behind the
        last document belong to none: their document is the number of documents."""
        cu = (self.cu_q if side == "q" else self.cu_k).to(torch.int64)
        row = torch.arange(rows, device=cu.device)
        document = torch.searchsorted(cu[1:].contiguous(), row, right=True)
        start = cu[document.clamp(max=cu.numel() - 1)]
        position = row - start
        if side == "q":
            shift = torch.cat([(self.cu_k - self.cu_q).diff(), self.cu_q.new_zeros(1)]).to(torch.int64)
            position = position + shift[document]
        return document, position

    def visible(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Which of the key positions each query position sees: bool (queries, keys)."""
        distance = keys[None, :] - queries[:, None]
        seen = torch.ones_like(distance, dtype=torch.bool)
        if self.left is not None:
            seen &= distance >= -self.left
        if self.right is not None:
            seen &= distance <= self.right
        return seen

    def key_blocks(self, query_block: int, block: int) -> tuple[int, int | None]:
        """The range [first, end) of key blocks in which a query of the block can see anything; end None = unlimited."""
        first = 0 if self.left is None else max(0, (query_block * block - self.left) // block)
        end = None if self.right is None else max(first, ((query_block + 1) * block - 1 + self.right) // block + 1)
        return first, end

    def full_blocks(self, query_block: int, block: int, sides: str) -> tuple[int, int | None]:
        """The range [first, end) of key blocks that every query of the block sees whole, by nominal block ends; end None
        = unlimited. sides: "both" sides of the mask count, only the "right" one, or "none" (then all blocks are full)."""
        q_first, q_last = query_block * block, (query_block + 1) * block - 1
        first, end = self.key_blocks(query_block, block)
        if sides != "none" and self.right is not None:
            end = (q_first + self.right + 1) // block
        if sides == "both" and self.left is not None:
            first = max(0, -((self.left - q_last) // block))
        return first, None if end is None else max(first, end)


def visible_pairs(documents: Documents) -> int:
    """How many (query, key) pairs the mask leaves: what a FLOP count is proportional to. Waits for the device."""
    total = 0
    for q0, q1, k0, k1 in documents.spans():
        lk = k1 - k0
        position = torch.arange(q1 - q0, dtype=torch.int64) + lk - (q1 - q0)
        low = torch.zeros_like(position) if documents.left is None else (position - documents.left).clamp(min=0)
        high = (
            torch.full_like(position, lk) if documents.right is None else (position + documents.right + 1).clamp(max=lk)
        )
        total += int((high - low).clamp(min=0).sum())
    return total


def query_blocks(lq: int, lk: int, block: int) -> Iterator[tuple[int, int, int]]:
    """(block number, first row, end row) of the blocks of a document's queries; rows are counted in the document. Blocks
    lie on positions, so the first may start inside; with more queries than keys, numbers start below zero."""
    shift = lk - lq
    for number in range(shift // block, (lk - 1) // block + 1) if lq else ():
        yield number, max(0, number * block - shift), min(lq, (number + 1) * block - shift)
