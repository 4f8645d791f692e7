"""Who computes what in context-parallel attention: documents dealt to ranks, long ones in pieces of whole blocks.

A rank owns pieces of documents: the positions start .. end of one, both multiples of the recipe's block (but for a
document's end). It holds q, k and v of their tokens, computes their rows of O and dQ, and their rows of dK and dV. Work is
counted in visible pairs, the FLOPs of attention. A causal piece has few pairs in front of it if it lies early in its document and
many queries behind it, and the other way round, so pairs are dealt longest first, to the rank with the least so far: of one
long document each rank gets an early piece and a late one.

Whole documents cost no communication, so only as many of the largest are cut as balance needs. Everything here is a
function of the lengths, so all ranks come to the same plan without asking each other.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from flamia.words import amount

TOLERANCE = 0.03
"""How far the busiest rank may lie above the mean before one more document is cut."""
FEW_BLOCKS = 8
"""A document with fewer blocks for each rank than this is cut into its blocks, a longer one into two pieces for each rank."""


@dataclass(frozen=True)
class Piece:
    """Positions start .. end of a document, and the rank that owns them."""

    document: int
    start: int
    end: int
    rank: int = 0


@dataclass(frozen=True)
class Plan:
    """pieces: of all ranks, by document and position; empty documents have none. pairs, tokens: of each rank."""

    lengths: tuple[int, ...]
    ranks: int
    left: int | None
    block: int
    pieces: tuple[Piece, ...]

    @classmethod
    def of(
        cls, lengths: Sequence[int], ranks: int, *, left: int | None = None, block: int = 128, token_pairs: float = 0.0
    ) -> Plan:
        """left: a window's left side. token_pairs: how many pairs the rest of the model's work on a token is worth."""
        if ranks < 1 or block < 1 or token_pairs < 0 or any(n < 0 for n in lengths):
            raise ValueError(f"ranks = {ranks}, block = {block}, token_pairs = {token_pairs}: must be positive")

        def cost(piece: Piece) -> float:
            return visible(piece.start, piece.end, left) + token_pairs * (piece.end - piece.start)

        whole = [Piece(d, 0, n) for d, n in enumerate(lengths) if n]
        whole.sort(key=lambda piece: (-cost(piece), piece.document))
        best: tuple[float, list[Piece]] | None = None
        for count in itertools.chain([0], (2**i for i in range(len(whole).bit_length())), [len(whole)]):
            count = min(count, len(whole))
            items = whole[count:] + [part for each in whole[:count] for part in cut(each, ranks, left, block)]
            dealt, excess = deal(items, ranks, cost)
            if best is None or excess < best[0]:
                best = excess, dealt
            if best[0] <= TOLERANCE:
                break
        assert best is not None
        return cls(tuple(lengths), ranks, left, block, tuple(merged(best[1])))

    @property
    def pairs(self) -> tuple[int, ...]:
        return self._sums(lambda piece: visible(piece.start, piece.end, self.left))

    @property
    def tokens(self) -> tuple[int, ...]:
        return self._sums(lambda piece: piece.end - piece.start)

    def _sums(self, value) -> tuple[int, ...]:
        return tuple(sum(value(piece) for piece in self.of_rank(rank)) for rank in range(self.ranks))

    def of_rank(self, rank: int) -> list[Piece]:
        """In the order in which a rank holds them: whole documents, then pieces of shared ones."""
        shared = self.shared
        return sorted((p for p in self.pieces if p.rank == rank), key=lambda piece: piece.document in shared)

    @property
    def shared(self) -> frozenset[int]:
        """Documents that several ranks have pieces of."""
        owners: dict[int, set[int]] = {}
        for piece in self.pieces:
            owners.setdefault(piece.document, set()).add(piece.rank)
        return frozenset(document for document, ranks in owners.items() if len(ranks) > 1)

    def __str__(self) -> str:
        mean = max(1.0, sum(self.pairs) / self.ranks)
        return (
            f"{amount(len(self.lengths), 'document')}, {amount(sum(self.lengths), 'token')} on {amount(self.ranks, 'rank')}; the "
            f"busiest has {max(self.pairs) / mean:.3f} of the mean pairs; {amount(len(self.shared), 'shared document')}; "
            f"tokens {self.tokens}"
        )


def visible(start: int, end: int, left: int | None) -> int:
    """Pairs of the queries start .. end of a document and the keys that they see, causal."""
    if left is None or end <= left + 1:
        return (end * (end + 1) - start * (start + 1)) // 2
    if start < left + 1:
        return visible(start, left + 1, None) + (end - left - 1) * (left + 1)
    return (end - start) * (left + 1)


def cut(whole: Piece, ranks: int, left: int | None, block: int) -> list[Piece]:
    """A document in pieces of whole blocks: two for each rank, or single blocks where it has few."""
    blocks = -(-whole.end // block)
    count = 2 * ranks if blocks >= FEW_BLOCKS * ranks else blocks
    edges = [blocks * i // count * block for i in range(count)] + [whole.end]
    return [Piece(whole.document, a, b) for a, b in itertools.pairwise(edges)]


def deal(items: list[Piece], ranks: int, cost) -> tuple[list[Piece], float]:
    """Longest first to the rank with the least so far; returns the pieces and how far the busiest lies above the mean."""
    loads = [(0.0, 0, rank) for rank in range(ranks)]
    dealt = []
    for item in sorted(items, key=lambda piece: (-cost(piece), piece.document, piece.start)):
        load, tokens, rank = min(loads)
        loads[rank] = (load + cost(item), tokens + item.end - item.start, rank)
        dealt.append(Piece(item.document, item.start, item.end, rank))
    total = sum(load for load, _, _ in loads)
    return dealt, max(load for load, _, _ in loads) * ranks / total - 1 if total else 0.0


def merged(pieces: list[Piece]) -> list[Piece]:
    """By document and position, neighbours of one rank joined."""
    out: list[Piece] = []
    for piece in sorted(pieces, key=lambda piece: (piece.document, piece.start)):
        last = out[-1] if out else None
        if last and (last.document, last.rank, last.end) == (piece.document, piece.rank, piece.start):
            out[-1] = Piece(last.document, last.start, piece.end, last.rank)
        else:
            out.append(piece)
    return out
