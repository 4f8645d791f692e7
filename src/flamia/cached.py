"""How one sequence's K or V lies in a cache (`cache.py`), and how the reference reads it there.

An operand's rows are in two parts: *closed* ones, as bytes (`codes.py`), and *open* ones behind them, as given in 16 bits.
`Spec` says, from the recipe's two tables, which rows may be closed when. The reference then runs as it always does, on a
call whose K and V are encoded already: closed rows from their bytes, open rows now. So its arithmetic is written once,
and nothing has to be encodable twice.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flamia.codes import PER_TOKEN, TOKEN_LOCAL, bytes_per_token, encode_tokens, pack, parts, token_values, unpack
from flamia.packing import Documents
from flamia.quantize import Quantized
from flamia.recipe import Recipe
from flamia.reference.problem import Problem

SIXTEEN = "bf16:none"


@dataclass(frozen=True)
class Spec:
    """What the forward reads of K ("s_k") or V ("o_v").

    full, frontier: the cells of pairs of blocks of the two kinds. at_once: encoded when it arrives. closes: encoded once
    its block is full; neither: kept in 16 bits.
    """

    name: str
    full: str
    frontier: str
    at_once: bool
    closes: bool
    block: int

    def bytes_per_token(self, width: int) -> float:
        return bytes_per_token(self.full, width, self.block) if self.at_once or self.closes else 2.0 * width

    def encode_arrivals(self, x: Tensor, recipe: Recipe) -> list[Tensor]:
        """The bytes of new tokens, (T, H, D); none where they stay in 16 bits for now."""
        if not self.at_once:
            return []
        plain = recipe.scale_rule == "ceil" and not (recipe.rotate and self.name == "s_k")
        if self.full in PER_TOKEN and plain:
            return list(encode_tokens(x, self.full))  # the same bytes, without a look at float64
        return encode_rows(self, x, [len(x)], recipe)


def operands_of(recipe: Recipe, left: int | None) -> tuple[Spec, Spec]:
    """The specs of K and V under a causal mask with this left side."""
    specs = []
    for name in ("s_k", "o_v"):
        full, frontier = getattr(recipe.full, name), getattr(recipe.frontier, name)
        low = recipe.rounding and full != SIXTEEN
        at_once = low and full == frontier and full.split(":")[1] in TOKEN_LOCAL
        leaves_as_frontier = left is not None and recipe.splits == "both" and full != frontier
        closes = low and not at_once and not leaves_as_frontier
        specs.append(Spec(name, full, frontier, at_once, closes, recipe.frontier_block))
    return specs[0], specs[1]


def future_blocks(position: int, block: int, left: int | None) -> tuple[int, int | None]:
    """The range of key blocks that queries from `position` on can see."""
    nothing = torch.zeros(1, dtype=torch.int32)
    return Documents(nothing, nothing, left, None).key_blocks(position // block, block)


def even_documents(lengths: list[int], device: torch.device) -> Documents:
    cu = torch.tensor([0, *lengths], device=device).cumsum(0).to(torch.int32)
    return Documents(cu, cu, None, 0)


def encode_rows(spec: Spec, x: Tensor, lengths: list[int], recipe: Recipe) -> list[Tensor]:
    """Bytes of rows (T, H, D) that begin a block."""
    quantized, bad = quantize_rows(spec, spec.full, x, lengths, recipe)
    return pack(quantized, spec.full, spec.block, bad if spec.name == "s_k" else None)


def quantize_rows(spec: Spec, cell: str, x: Tensor, lengths: list[int], recipe: Recipe) -> tuple[Quantized, Tensor]:
    """Rows as the reference encodes them, each run of `lengths` beginning a block; and which of them are not finite."""
    problem = Problem(x, x, x, None, even_documents(lengths, x.device), recipe, 1.0)
    return problem.encoded(spec.name, cell), problem.bad["k"]


class Rows:
    """A tensor that grows at its end and shrinks at both; appending is amortised by doubling."""

    def __init__(self, heads: int, width: int, dtype: torch.dtype, device: torch.device) -> None:
        self._data = torch.empty(0, heads, width, dtype=dtype, device=device)
        self._start = self._end = 0

    def __len__(self) -> int:
        return self._end - self._start

    @property
    def rows(self) -> Tensor:
        return self._data[self._start : self._end]

    @property
    def nbytes(self) -> int:
        return self.rows.numel() * self._data.element_size()

    @torch.inference_mode(False)  # else buffers that grew inside an inference region could not be written outside it
    @torch.no_grad()
    def add(self, x: Tensor) -> None:
        if self._end + len(x) > len(self._data):
            live = self.rows
            self._data = self._data.new_empty(max(64, 2 * (len(live) + len(x))), *live.shape[1:])
            self._data[: len(live)] = live
            self._start, self._end = 0, len(live)
        self._data[self._end : self._end + len(x)] = x
        self._end += len(x)

    def keep(self, count: int) -> None:
        """The first `count` rows; what was behind them may be written over."""
        self._end = min(self._end, self._start + count)

    def drop(self, count: int) -> None:
        """All but the first `count` rows."""
        self._start = min(self._end, self._start + count)


class Operand:
    """K or V of one sequence."""

    def __init__(self, spec: Spec, heads: int, width: int, dtype: torch.dtype, device: torch.device) -> None:
        self.spec, self.heads, self.width = spec, heads, width
        self.layout = parts(spec.full, width, spec.block) if spec.at_once or spec.closes else ()
        self.closed = [Rows(heads, part.width, torch.uint8, device) for part in self.layout]
        self.open = Rows(heads, width, dtype, device)

    @property
    def closed_rows(self) -> int:
        return len(self.closed[0]) if self.closed else 0

    def __len__(self) -> int:
        return self.closed_rows + len(self.open)

    @property
    def nbytes(self) -> int:
        return sum(rows.nbytes for rows in (*self.closed, self.open))

    def add(self, x: Tensor, codes: list[Tensor]) -> None:
        for rows, new in zip(self.closed, codes):
            rows.add(new)
        if not self.spec.at_once:
            self.open.add(x)

    def close(self, end: int, recipe: Recipe) -> None:
        """Encode the open rows before row `end`, which ends a block."""
        count = end - self.closed_rows
        if not self.spec.closes or count <= 0:
            return
        before = self.closed_rows
        try:
            for rows, new in zip(self.closed, encode_rows(self.spec, self.open.rows[:count], [count], recipe)):
                rows.add(new)
        except BaseException:  # out of memory, an interrupt: codes without their scales
            self._keep_closed(before)
            raise
        self.open.drop(count)

    def keep(self, count: int) -> None:
        closed = min(count, self.closed_rows)
        self._keep_closed(closed)
        self.open.keep(count - closed)

    def _keep_closed(self, count: int) -> None:
        for rows, part in zip(self.closed, self.layout):
            rows.keep(-(-count // part.rows))

    def drop(self, count: int) -> None:
        closed = min(count, self.closed_rows)
        for rows, part in zip(self.closed, self.layout):
            rows.drop(closed // part.rows)
        self.open.drop(count - closed)

    def clear(self) -> None:
        self.keep(0)

    def decoded(self) -> Tensor:
        """All rows in 16 bits, NaN where a token is not finite; of codes per token only."""
        codes, scales = (rows.rows for rows in self.closed)
        return token_values(codes, scales, self.open.rows.dtype, self.spec.full)

    def read(self) -> tuple[Quantized | None, Tensor, Tensor]:
        """(closed rows, which of them are not finite, open rows)."""
        if not self.closed:
            return None, torch.zeros(0, self.heads, dtype=torch.bool, device=self.open.rows.device), self.open.rows
        closed, bad = unpack([rows.rows for rows in self.closed], self.spec.full, self.width, self.spec.block)
        return closed, bad, self.open.rows


class Remembered(Problem):
    """A forward call whose keys and values come from a cache."""

    def __init__(
        self, q: Tensor, documents: Documents, recipe: Recipe, scale: float, k: list[Operand], v: list[Operand]
    ) -> None:
        shapes = [(sum(map(len, operand)), operand[0].heads, operand[0].width) for operand in (k, v)]
        blank = [q.new_zeros(()).expand(shape) for shape in shapes]
        super().__init__(q, blank[0], blank[1], None, documents, recipe, scale)
        for operand in (k, v):
            spec = operand[0].spec
            pieces = [each.read() for each in operand]
            opened = torch.cat([rows for _, _, rows in pieces])
            lengths = [len(rows) for _, _, rows in pieces]
            for cell in {spec.full, spec.frontier}:
                fresh, bad = quantize_rows(spec, cell, opened, lengths, recipe)
                key = (spec.name[-1], cell + "/centered" if spec.name == "s_k" else cell)
                closed = [closed for closed, _, _ in pieces]
                self._encoded[key] = interleave(closed, fresh, lengths, shapes[spec.name == "o_v"])
            if spec.name == "s_k":
                marks = zip([bad for _, bad, _ in pieces], bad.split(lengths))
                self.bad["k"] = torch.cat([mark for pair in marks for mark in pair])


def interleave(
    closed: list[Quantized | None], fresh: Quantized, lengths: list[int], shape: tuple[int, int, int]
) -> Quantized:
    """One operand of all sequences: of each its closed rows, then its open ones. Closed rows that the cell at hand is not
    for are there too; the mask and the tables see to it that nothing reads them."""

    def joined(name: str) -> Tensor | None:
        new = getattr(fresh, name)
        if new is None:
            return None
        if name in ("units", "scale"):
            new = new.expand(sum(lengths), shape[1], shape[2])
        rows = []
        for old, part in zip(closed, new.split(lengths)):
            if old is not None:
                given = getattr(old, name)
                if given is None:  # of another cell, and not read
                    given = part.new_zeros(len(old.units), *part.shape[1:])
                rows.append(given.expand(len(old.units), *part.shape[1:]))
            rows.append(part)
        return torch.cat(rows)

    units, scale = joined("units"), joined("scale")
    assert units is not None and scale is not None
    return Quantized(units, scale, joined("exponent"), joined("nonzero"), fresh.bits)
