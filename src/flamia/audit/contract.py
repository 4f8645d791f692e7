"""What is promised, and which rows owe it.

An attention is *isolated* when a row depends on the tokens it is allowed to see and on nothing else. That sounds
like a property of the mask, and in real arithmetic it is. In eight and four bits it is not: a scale shared by 32
tokens carries the largest of them into the rounding of all the others, so a later token moves an earlier row
although its attention weight there is zero. Each contract below is one way of asking the question, and each is
asked *bit for bit*, because an attention that leaks a little trains to a validation loss that no honest model
reaches.

Everything reduces to one matrix. ``visible[i, j]`` says that query ``i`` may see key ``j``: same document, inside
the window. A *change* names the tokens whose q, k, v or dO were disturbed. Then

* O_i and dQ_i are owed unless i itself was changed (q; for dQ also dO) or i sees a changed key or value;
* LSE_i, where an attention returns it, is owed unless its q was changed or it sees a changed key: no value moves it;
* dK_j and dV_j are owed unless j was changed, or some row that sees j was changed or sees a changed token.

So gradients of keys and values under a change of later tokens are *not* owed: later queries feed them, and calling
that a leak would be a false alarm. The contracts are regions of this: ``prefix`` keeps the earlier rows of the
disturbed document, ``document`` the rows of all others, ``mask`` everything that is owed at all. ``truncate`` and
``offset`` compare calls of different shape, ``repeat`` the same call with itself.

A document may have other numbers of queries and keys. Positions are those of its keys then, and the last query stands
where the last key does (bottom-right, as in flash-attention): query ``i`` is at i + Lk - Lq, which may lie before the
first key.

Equality here is equality of values with NaN matched by position; +0 and -0 count as equal, as ``torch.equal`` has
it, because the sign of a sum of zeros follows masked operands even in exact attention.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

TENSORS = ("O", "LSE", "dQ", "dK", "dV")
OPERANDS = ("q", "k", "v", "do")
# Which rows a tensor has: those of the queries or those of the keys.
SIDE = {"q": "q", "do": "q", "O": "q", "LSE": "q", "dQ": "q", "k": "k", "v": "k", "dK": "k", "dV": "k"}

CONTRACTS: dict[str, str] = {
    "repeat": "the same input gives the same bits, whatever was computed in between",
    "prefix": "later tokens leave O and dQ of earlier positions alone",
    "truncate": "cutting the document after t leaves O and dQ up to t alone",
    "document": "other documents leave O, dQ, dK and dV of this one alone",
    "offset": "moving a document within the buffer, or packing it alone, changes nothing",
    "mask": "a row depends on nothing but the tokens it can see; dK and dV on nothing but the rows that see them",
    "nonfinite": "NaN, infinity and 2^126 in tokens that a row cannot see leave it alone",
    "mass": "weights sum to one and row residuals to zero, at every length",
}

# The regions that make up a contract: `mask` covers every row that is owed anything, those of `prefix` and `document` too.
IMPLIES: dict[str, tuple[str, ...]] = {"mask": ("mask", "prefix", "document")}

# What a callable is held to when nobody says. `mask` is a stronger promise than most attentions make, `nonfinite` is
# one that a plain P @ V cannot keep (0 * NaN is NaN), and `mass` is a matter of accuracy that attention sinks break
# by design: all three are tried and reported, and count when claimed.
DEFAULT_CLAIMS = frozenset({"repeat", "prefix", "truncate", "document", "offset"})
CAUSAL_ONLY = frozenset({"prefix", "truncate"})


def resolve_claims(claims: Iterable[str] | None, causal: bool) -> frozenset[str]:
    """The contracts that count towards the verdict; ``prefix`` and ``truncate`` mean nothing where later tokens are
    visible.
    """
    chosen = DEFAULT_CLAIMS if claims is None else frozenset(claims)
    unknown = chosen - set(CONTRACTS)
    if unknown:
        raise ValueError(
            f"claims={sorted(chosen)}: unknown contract {sorted(unknown)}; the contracts are {', '.join(CONTRACTS)}"
        )
    if claims is None and not causal:
        chosen -= CAUSAL_ONLY
    if not causal and chosen & CAUSAL_ONLY:
        raise ValueError(
            f"claims={sorted(chosen)}: {sorted(chosen & CAUSAL_ONLY)} can only hold for a causal attention, and "
            "causal=False was given; "
            "drop them from claims or audit with causal=True"
        )
    return frozenset(chosen)


def sides(causal: bool, window: tuple[int | None, int | None] | None) -> tuple[int | None, int | None]:
    """(left, right) reach of a query, both ends inclusive, None = open. -1 means open too; causal closes the right
    side.
    """
    left, right = (None, None) if window is None else window
    left = None if left is None or left < 0 else int(left)
    right = None if right is None or right < 0 else int(right)
    return left, (0 if causal else right)


Rows = dict[str, Tensor]  # buffer rows of the queries ("q") and of the keys ("k")


@dataclass(frozen=True)
class Packing:
    """Documents laid one after another: ``lengths`` in tokens, empty ones allowed. ``queries`` are their numbers of
    queries where those differ from their numbers of keys.
    """

    lengths: tuple[int, ...]
    queries: tuple[int, ...] | None = None

    def counts(self, side: str = "k") -> tuple[int, ...]:
        return self.lengths if side == "k" or self.queries is None else self.queries

    def offsets_of(self, side: str) -> list[int]:
        out = [0]
        for n in self.counts(side):
            out.append(out[-1] + n)
        return out

    @property
    def offsets(self) -> list[int]:
        return self.offsets_of("k")

    def total_of(self, side: str) -> int:
        return sum(self.counts(side))

    @property
    def total(self) -> int:
        return sum(self.lengths)

    def start(self, document: int, side: str = "k") -> int:
        return self.offsets_of(side)[document]

    def rows(self, document: int, start: int = 0, stop: int | None = None, side: str = "k") -> Tensor:
        """Buffer rows of positions start..stop-1 of one document. Queries that stand before the first key go with
        position 0.
        """
        first, count = self.start(document, side), self.counts(side)[document]
        shift = self.lengths[document] - count
        begin = max(0, start - shift) if start > 0 else 0
        end = count if stop is None else max(0, min(stop - shift, count))
        return torch.arange(first + begin, max(first + begin, first + end))

    def both(self, document: int, start: int = 0, stop: int | None = None) -> Rows:
        return {side: self.rows(document, start, stop, side) for side in "qk"}

    def all_rows(self) -> Rows:
        return {side: torch.arange(self.total_of(side)) for side in "qk"}

    def document_of(self, side: str = "k") -> Tensor:
        """(rows,) document number of every row."""
        return torch.repeat_interleave(torch.arange(len(self.lengths)), torch.tensor(self.counts(side)))

    def position_of(self, side: str = "k") -> Tensor:
        """(rows,) position of every row within its document."""
        counts = self.counts(side)
        shifts = torch.tensor([n - m - start for n, m, start in zip(self.lengths, counts, self.offsets_of(side))])
        return torch.arange(self.total_of(side)) + shifts[self.document_of(side)]


def visible(packing: Packing, left: int | None, right: int | None) -> Tensor:
    """(queries, keys) bool: query row may see key row."""
    out = packing.document_of("q")[:, None] == packing.document_of("k")[None, :]
    ahead = packing.position_of("k")[None, :] - packing.position_of("q")[:, None]
    if left is not None:
        out &= ahead >= -left
    if right is not None:
        out &= ahead <= right
    return out


@dataclass(frozen=True)
class Change:
    """Which buffer rows of which operand were disturbed. ``queries`` are the rows of q and dO where those are laid out
    otherwise than k and v.
    """

    rows: Tensor
    operands: frozenset[str] = field(default_factory=frozenset)
    queries: Tensor | None = None


def owed(change: Change, sees: Tensor) -> dict[str, Tensor]:
    """Rows of each tensor that the ``mask`` contract says must keep their bits, as (rows,) bool."""
    hit_q, hit_k = (torch.zeros(n, dtype=torch.bool) for n in sees.shape)
    hit_q[change.rows if change.queries is None else change.queries] = True
    hit_k[change.rows] = True

    def moved(hit: Tensor, *operands: str) -> Tensor:
        return hit if change.operands & set(operands) else torch.zeros_like(hit)

    keyed = moved(hit_k, "k", "v")
    o_moves = (sees & keyed[None, :]).any(1) | moved(hit_q, "q")
    lse_moves = (sees & moved(hit_k, "k")[None, :]).any(1) | moved(hit_q, "q")
    dq_moves = o_moves | moved(hit_q, "do")
    # A key's gradient is fed by every row that sees it, so it is owed only if none of those rows moves.
    fed = (sees & dq_moves[:, None]).any(0) | keyed
    return {"O": ~o_moves, "LSE": ~lse_moves, "dQ": ~dq_moves, "dK": ~fed, "dV": ~fed}
