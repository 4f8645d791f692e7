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
* dK_j and dV_j are owed unless j was changed, or some row that sees j was changed or sees a changed token.

So gradients of keys and values under a change of later tokens are *not* owed: later queries feed them, and calling
that a leak would be a false alarm. The contracts are regions of this: ``prefix`` keeps the earlier rows of the
disturbed document, ``document`` the rows of all others, ``mask`` everything that is owed at all. ``truncate`` and
``offset`` compare calls of different shape, ``repeat`` the same call with itself.

Equality here is equality of values with NaN matched by position; +0 and -0 count as equal, as ``torch.equal`` has
it, because the sign of a sum of zeros follows masked operands even in exact attention.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

TENSORS = ("O", "dQ", "dK", "dV")
OPERANDS = ("q", "k", "v", "do")

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


@dataclass(frozen=True)
class Packing:
    """Documents laid one after another: ``lengths`` in tokens, empty ones allowed."""

    lengths: tuple[int, ...]

    @property
    def offsets(self) -> list[int]:
        out = [0]
        for n in self.lengths:
            out.append(out[-1] + n)
        return out

    @property
    def total(self) -> int:
        return sum(self.lengths)

    def start(self, document: int) -> int:
        return self.offsets[document]

    def rows(self, document: int, start: int = 0, stop: int | None = None) -> Tensor:
        """Buffer rows of positions start..stop-1 of one document."""
        first = self.start(document)
        end = self.lengths[document] if stop is None else min(stop, self.lengths[document])
        return torch.arange(first + start, max(first + start, first + end))

    def document_of(self) -> Tensor:
        """(total,) document number of every row."""
        return torch.repeat_interleave(torch.arange(len(self.lengths)), torch.tensor(self.lengths))

    def position_of(self) -> Tensor:
        """(total,) position of every row within its document."""
        starts = torch.tensor(self.offsets[:-1])
        return torch.arange(self.total) - starts[self.document_of()]


def visible(packing: Packing, left: int | None, right: int | None) -> Tensor:
    """(total, total) bool: query row may see key row."""
    doc, pos = packing.document_of(), torch.arange(packing.total)
    out = doc[:, None] == doc[None, :]
    ahead = pos[None, :] - pos[:, None]
    if left is not None:
        out &= ahead >= -left
    if right is not None:
        out &= ahead <= right
    return out


@dataclass(frozen=True)
class Change:
    """Which buffer rows of which operand were disturbed."""

    rows: Tensor
    operands: frozenset[str] = field(default_factory=frozenset)


def owed(change: Change, sees: Tensor) -> dict[str, Tensor]:
    """Rows of each tensor that the ``mask`` contract says must keep their bits, as (total,) bool."""
    total = sees.shape[0]
    hit = torch.zeros(total, dtype=torch.bool)
    hit[change.rows] = True
    nothing = torch.zeros_like(hit)
    keyed = hit if change.operands & {"k", "v"} else nothing
    sees_change = (sees & keyed[None, :]).any(1)
    o_moves = sees_change | (hit if "q" in change.operands else nothing)
    dq_moves = o_moves | (hit if "do" in change.operands else nothing)
    # A key's gradient is fed by every row that sees it, so it is owed only if none of those rows moves.
    fed = (sees & dq_moves[:, None]).any(0) | keyed
    return {"O": ~o_moves, "dQ": ~dq_moves, "dK": ~fed, "dV": ~fed}
