"""What kernels keep of a forward for its backward, and how large that is: one buffer of bytes, laid out by shapes alone.

The backward reads the codes and factors of Q, K and V, and the lists of work. All were made by the forward; to make
them again costs up to a tenth of a training call. So the forward operator returns them, as one more output that autograd
keeps, and that `torch.compile` must be able to size without running or loading a kernel. Hence this module, which knows
the layout and nothing else.

    codes      E4M3, a byte each           Q, then K, then V; head-major, document-padded (hopper/schedule.py)
    factors    float32, one per token      Q, then K, then V, then four per 64 tokens of K
    words      int32                       the records of Q's and K's blocks, the same by length, and the tables of a call

The last of the factors stand for 32 tokens each, where all have the same (hopper/quantize.py): for every 64 tokens their
two and the next two, since TMA reads from multiples of 16 bytes.

V is not kept twice: where its codes are here, its 16-bit original is not saved (ops.py).

Rows are padded for the most blocks of 128 that so many documents can have. Every part of the codes and factors starts at
a multiple of 128 bytes from the start of the buffer, since TMA reads them.
"""

from __future__ import annotations

import torch

from flamia.recipe import Recipe

BLOCK = 128
"""Document-local positions of a block, queries and keys alike."""
RECORD = 16
"""Words of a record."""
BUCKETS = 1024
"""Of the counting sort that orders the records."""
COUNTS = 16
"""Words of what a call counts."""


def keeps(recipe: Recipe) -> bool:
    """Whether its forward leaves anything: the other route encodes anew, and reads V as given in its backward."""
    return recipe.route == "mxfp8_scores"


def capacity(rows: int, documents: int) -> int:
    """The most blocks that `documents` documents with `rows` rows together can have. Symbolic sizes stay symbolic."""
    return rows // BLOCK + torch.sym_min(documents, rows)


def sections(
    q_rows: int, k_rows: int, documents: int, q_heads: int, k_heads: int, dim: int
) -> tuple[list[int], list[int], list[int]]:
    """How many elements each part of the codes, of the factors and of the words has."""
    q_blocks, k_blocks = capacity(q_rows, documents), capacity(k_rows, documents)
    q, k = q_heads * q_blocks * BLOCK, k_heads * k_blocks * BLOCK
    records = [q_blocks * RECORD, k_blocks * RECORD]
    tables = 6 * (documents + 1)  # starts, lengths and first blocks of the documents, for queries and for keys
    return [q * dim, k * dim, k * dim], [q, k, k, k // 16], [*records, *records, 2 * BUCKETS, COUNTS, tables]


def nbytes(q_rows: int, k_rows: int, documents: int, q_heads: int, k_heads: int, dim: int) -> int:
    codes, factors, words = sections(q_rows, k_rows, documents, q_heads, k_heads, dim)
    return sum(codes) + 4 * (sum(factors) + sum(words))
