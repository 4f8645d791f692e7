"""One call, taken apart: operands encoded, documents cut into blocks, pairs of blocks sorted into full and frontier.

The reference works on one block of queries of one document at a time, against all key blocks that it can see, so memory
grows with the length and never with its square. All arithmetic is float64 and rounds only where the recipe rounds: where a
kernel has FP32 accumulators, sums here are exact, or so nearly that their order cannot show in the result.
Blocks are padded to full size and lie on positions, so the shapes of all products depend on positions alone.

Tokens that are not finite have their rows zeroed in every operand, since a zero weight times NaN is NaN and would cross
the mask; what they must do instead, turn the rows that see them into NaN, is done to the scores (forward.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from flamia.operands import Operands
from flamia.packing import Documents, query_blocks
from flamia.quantize import Quantized, hadamard, quantize
from flamia.recipe import Recipe
from flamia.reference.weights import Fold

LOG2E = 1.4426950408889634


@dataclass
class Segment:
    """A run of key blocks that read the same table: columns [start, stop) of the query block's scores."""

    start: int
    stop: int
    operands: Operands
    full: bool

    @property
    def columns(self) -> slice:
        return slice(self.start, self.stop)


class Problem:
    """Encoded operands of a call. `g` is the gradient of the output, absent in the forward."""

    def __init__(
        self, q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, documents: Documents, recipe: Recipe, scale: float
    ) -> None:
        self.documents, self.recipe, self.scale = documents, recipe, scale
        self.dtype = q.dtype
        self.query_heads, self.key_heads = q.shape[1], k.shape[1]
        self.bad = {"q": _not_finite(q), "k": _not_finite(k) | _not_finite(v)}
        if g is not None:
            self.bad["q"] = self.bad["q"] | _not_finite(g)
        if recipe.rotate:
            self.rotation = hadamard(q.shape[-1], q.device)
        self.spans = documents.spans()
        used_q, used_k = self.spans[-1][1::2] if self.spans else (0, 0)
        self.tensors = {"q": _clean(q, used_q), "k": _clean(k, used_k), "v": _clean(v, used_k)}
        if g is not None:
            self.tensors["g"] = _clean(g, used_q)
        self._encoded: dict[tuple[str, str], Quantized] = {}

    def encoded(self, name: str, cell: str) -> Quantized:
        """The operand that a table's cell `name` ("s_q", ...) asks for, encoded once per call."""
        operand = name[-1]
        key = (operand, cell if name != "s_k" else cell + "/centered")
        if key not in self._encoded:
            self._encoded[key] = self._encode(operand, cell, name)
        return self._encoded[key]

    def _encode(self, operand: str, cell: str, name: str) -> Quantized:
        x, recipe = self.tensors[operand].to(torch.float64), self.recipe
        side = "q" if operand in "qg" else "k"
        if name == "s_k" and recipe.center_k != "none":
            x = self._centered(x)
        if self.rotated(name, cell):
            x = x @ self.rotation
        if not recipe.rounding:
            return Quantized(x, torch.ones((), dtype=x.dtype, device=x.device))
        return quantize(x, cell, self.documents, side, recipe.scale_rule, recipe.frontier_block)

    def rotated(self, name: str, cell: str) -> bool:
        """Whether the operand is read in the rotated basis: Q and K with low bits, in every product that reads them."""
        return self.recipe.rotate and name[-1] in "qk" and not cell.startswith("bf16")

    def _centered(self, k: Tensor) -> Tensor:
        """K less its mean over each document or over the call: a control, a statistic that sees the future."""
        k = k.clone()
        spans = [(k0, k1) for _, _, k0, k1 in self.spans]
        if self.recipe.center_k == "call":
            spans = [(0, spans[-1][1])] if spans else []
        for k0, k1 in spans:
            if k1 > k0:
                k[k0:k1] -= k[k0:k1].mean(0)
        return k

    def blocks(self) -> Iterator[Block]:
        for span in self.spans:
            for number, first, end in query_blocks(span[1] - span[0], span[3] - span[2], self.recipe.frontier_block):
                yield Block(self, span, number, first, end)


class Block:
    """One block of queries of one document with the keys it can see.

    Tensors are (Hk, G, R, ...) on the query side, R = `frontier_block` rows, and (Hk, N, ...) on the key side, N keys in
    whole blocks from `first_key`.
    """

    def __init__(self, problem: Problem, span: tuple[int, int, int, int], number: int, first: int, end: int) -> None:
        self.problem, self.number = problem, number
        documents, size, sides = problem.documents, problem.recipe.frontier_block, problem.recipe.splits
        q0, q1, k0, k1 = span
        self.lk = k1 - k0
        self.position = number * size  # of the block's first row
        self.rows = slice(q0 + first, q0 + end)  # in the buffer
        self.front = first + (k1 - k0) - (q1 - q0) - self.position  # rows of the block that lie before the document
        low, high = documents.key_blocks(number, size)
        last = -(-self.lk // size)
        high = last if high is None else min(high, last)
        low = min(low, high)
        self.first_key, self.keys = low * size, (high - low) * size
        self.key_rows = slice(k0 + self.first_key, min(k1, k0 + self.first_key + self.keys))
        full_low, full_high = documents.full_blocks(number, size, sides)
        full_low = min(max(full_low, low), high)
        full_high = high if full_high is None else min(max(full_high, full_low), high)
        table, frontier = problem.recipe.full, problem.recipe.frontier
        runs = [
            (low, full_low, frontier, False),
            (full_low, full_high, table, True),
            (full_high, high, frontier, False),
        ]
        self.segments = [Segment((a - low) * size, (b - low) * size, t, f) for a, b, t, f in runs if b > a]
        # whether the *nominal* plan has a full pair, whatever the document's length: decides how G is read
        nominal_low, nominal_high = documents.full_blocks(number, size, sides)
        rounds_anyway = sides != "both" or frontier.e_v != "bf16:none"
        self.has_full = rounds_anyway or nominal_high is None or nominal_high > nominal_low

        device = documents.cu_q.device
        query = self.position + torch.arange(size, device=device)
        key = self.first_key + torch.arange(self.keys, device=device)
        row = torch.arange(size, device=device)
        real = (row >= self.front) & (row < self.front + end - first)
        self.visible = documents.visible(query, key) & real[:, None] & (key < self.lk)[None, :]

    def queries(self, x: Tensor) -> Tensor:
        """Rows of a packed (T, Hq, ..) tensor as (Hk, G, R, ..), zero where the block has no row."""
        size = self.problem.recipe.frontier_block
        part = x[self.rows]
        out = x.new_zeros(size, *x.shape[1:])
        out[self.front : self.front + len(part)] = part
        return out.unflatten(1, (self.problem.key_heads, -1)).movedim(0, 2)

    def key_side(self, x: Tensor) -> Tensor:
        """Rows of a packed (T, Hk, ..) tensor as (Hk, N, ..), zero behind the document's end."""
        part = x[self.key_rows]
        out = x.new_zeros(self.keys, *x.shape[1:])
        out[: len(part)] = part
        return out.movedim(0, 1)

    def write_rows(self, target: Tensor, x: Tensor) -> None:
        """Store (Hk, G, R, ..) into the rows of a packed (T, Hq, ..) tensor."""
        count = self.rows.stop - self.rows.start
        part = x[:, :, self.front : self.front + count].movedim(2, 0).flatten(1, 2)
        target[self.rows] = part.to(target.dtype)

    def add_keys(self, target: Tensor, segment: Segment, x: Tensor) -> None:
        """Add (Hk, n, D) to the key rows of a segment in a packed (T, Hk, D) tensor."""
        start = self.key_rows.start + segment.start
        stop = min(self.key_rows.stop, self.key_rows.start + segment.stop)
        if stop > start:
            target[start:stop] += x[:, : stop - start].movedim(1, 0)

    def read(self, name: str, segment: Segment) -> Tensor:
        """Decoded values of a tensor operand for a segment: (Hk, G, R, D) or (Hk, n, D), float64."""
        encoded = self.problem.encoded(name, getattr(segment.operands, name))
        if name[-1] in "qg":
            if name[-1] == "g" and not self.has_full:  # nothing would be gained by rounding it
                return self.queries(self.problem.tensors["g"]).to(torch.float64)
            return self.queries(encoded.values)
        return self.key_side(encoded.values)[:, segment.columns]

    def fold(self, weight: str, segment: Segment) -> Fold | None:
        """The scale exponents of the operand that meets weight "o_p", "dv_p", "dq_u" or "dk_u" in its product."""
        companion = {"o_p": "o_v", "dv_p": "dv_g", "dq_u": "dq_k", "dk_u": "dk_q"}[weight]
        encoded = self.problem.encoded(companion, getattr(segment.operands, companion))
        if encoded.exponent is None or encoded.nonzero is None:
            return None
        if companion[-1] in "qg":
            return Fold(self.queries(encoded.exponent)[..., None], self.queries(encoded.nonzero)[..., None])
        exponent, nonzero = self.key_side(encoded.exponent), self.key_side(encoded.nonzero)
        return Fold(exponent[:, None, None, segment.columns], nonzero[:, None, None, segment.columns])


def _not_finite(x: Tensor) -> Tensor:
    """(T, H) bool: tokens with an element that is NaN or infinite."""
    return ~x.isfinite().all(-1)


def _clean(x: Tensor, used: int) -> Tensor:
    """x with zeros for tokens that are not finite, and behind the last document, where no statistic may look."""
    behind = torch.arange(len(x), device=x.device) >= used
    return torch.where((_not_finite(x) | behind[:, None])[..., None], 0, x)
