"""How inputs are disturbed, and why Gaussian noise is not enough.

A shared scale only shows when sharing it hurts. Under a power-of-two scale rule, doubling the largest value of a
group leaves every other code of the group exact as long as it stays normal, so random data and random changes pass
straight over most leaks. Two things are crafted instead.

*Tones* are base inputs in which earlier tokens have something to lose:

* ``plain``    unit noise, rows of flat and of peaked weights (a peaked row looks at itself, so its O is one value,
  bare);
* ``values``   v and dO whose tokens range over 2^-18 .. 1, so that a larger neighbour flushes them;
* ``keys``     tiny k under huge q: logits stay of order one, yet k has the whole range to fall out of; ``queries``
  the other way round;
* ``edge``     v and dO of 2^-20 and 1.125 * 2^-15, which sit at the E4M3 subnormal boundary of a group that holds
  a 1;
* ``fp4``      v and dO of 1.03125, exact under an NVFP4 scale of their own and 1.0 beside a 3.

*Disturbances* change the tokens from a cut onwards, one operand at a time or all: ``redraw``, ``cross`` (times 2:
every amax crosses a power of two), ``lift`` (2^12), ``spike`` (2^20), ``one`` (the value that the tone's boundary
is relative to), and NaN, infinity and 2^126 for ``nonfinite``.

*Cuts* lie strictly inside groups of 16 .. 256 positions, by document and by address; a cut on a group's edge
cannot see that group's scale, and an audit that has no other cuts says so and never answers "clean". ``Settings``
holds all of it, hashable, so that the controls are run under the same probes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from .contract import OPERANDS, SIDE, TENSORS, Change, Packing, Rows, owed, visible
from .targets import Inputs

GROUPS = (16, 32, 64, 128, 256)
TONES = ("plain", "values", "keys", "queries", "edge", "fp4")
# The operand whose scale a tone is made to expose.
NATIVE = {
    "plain": ("all",),
    "values": ("v", "do", "all"),
    "keys": ("k", "all"),
    "queries": ("q", "all"),
    "edge": ("v", "do"),
    "fp4": ("v", "do"),
}
NONFINITE = ("nan", "inf", "2^126")


@dataclass(frozen=True)
class Settings:
    """One audit's probes. ``watched`` is the long document that the cuts divide."""

    lengths: tuple[int, ...]
    watched: int
    cuts: tuple[int, ...]
    truncations: tuple[int, ...]
    leads: tuple[int, ...]
    tones: tuple[str, ...]
    disturbances: tuple[str, ...]
    depth: int  # 0 spot, 1 brief, 2 quick, 3 normal, 4 thorough
    layout: str
    dtype: torch.dtype
    left: int | None
    right: int | None
    seed: int
    queries: tuple[int, ...] | None = None  # numbers of queries, where they differ from ``lengths``, those of keys

    @property
    def packing(self) -> Packing:
        return Packing(self.lengths, self.queries)

    def with_lengths(self, lengths: tuple[int, ...]) -> Settings:
        """The same probes on other documents; the numbers of queries differ from those of keys by as much as before."""
        queries = None
        if self.queries is not None and lengths == self.lengths:
            queries = self.queries
        elif self.queries is not None:
            fewer = max(self.lengths) - self.queries[self.watched]
            queries = tuple(max(n - fewer, 1) for n in lengths)
        return replace(self, lengths=lengths, queries=queries, watched=lengths.index(max(lengths)))


@dataclass(frozen=True, eq=False)
class Check:
    """``rows`` of the base call must equal ``into`` of the changed call in one tensor."""

    contract: str
    tensor: str
    rows: Tensor
    into: Tensor


@dataclass(frozen=True, eq=False)
class Experiment:
    """Two calls and what the second owes to the first."""

    base: Inputs
    changed: Inputs
    tone: str
    operand: str  # q, k, v, do, all; or "layout" when the shape changed
    disturbance: str
    document: int
    cut: int | None
    checks: tuple[Check, ...]
    moved: Tensor = field(default_factory=lambda: torch.arange(0))  # rows that see a NaN and must show it
    scene: str = ""  # which other documents than the audit's own these are

    @property
    def name(self) -> str:
        where = "" if self.cut is None else f" from position {self.cut}"
        return f"{self.tone}: {self.disturbance} {self.operand} in document {self.document}{where}"


def reach(dtype: torch.dtype) -> tuple[int, int, int, float]:
    """Exponents (tone, lift, spike) and the largest magnitude that a dtype has room for. float16 has little."""
    return (8, 8, 12, 2.0**15) if dtype == torch.float16 else (14, 12, 20, 2.0**126)


def draw(tone: str, packing: Packing, heads: tuple[int, int], dim: int, dtype: torch.dtype, seed: int) -> Inputs:
    """Base inputs of one tone, rounded to ``dtype``; the same seed draws the same tokens."""
    rng = torch.Generator().manual_seed(1_000_003 * seed + 101 * TONES.index(tone) + 7)
    keys, queries, (hq, hk) = packing.total, packing.total_of("q"), heads
    power = reach(dtype)[0]

    def noise(n: int, h: int) -> Tensor:
        return torch.randn(n, h, dim, generator=rng, dtype=torch.float64)

    def uniform(n: int, low: float, high: float) -> Tensor:
        return torch.rand(n, 1, 1, generator=rng, dtype=torch.float64) * (high - low) + low

    k, v, do = noise(keys, hk), noise(keys, hk), noise(queries, hq)
    # A row's own key gets a logit of 0 (flat), 4 (bent) or 12 (peaked) above chance.
    gap = torch.tensor([0.0, 4.0, 12.0], dtype=torch.float64)[torch.randint(3, (queries, 1, 1), generator=rng)]
    own = _own_keys(k, packing).repeat_interleave(hq // hk, 1)
    q = 0.5 * noise(queries, hq) + gap * math.sqrt(dim) * own / own.square().sum(-1, keepdim=True).clamp_min(1e-9)
    if tone == "values":
        low = -18 if power > 8 else -10
        v, do = v * 2.0 ** uniform(keys, low, 0), do * 2.0 ** uniform(queries, low, 0)
    elif tone == "keys":
        k, q = k * 2.0**-power, q * 2.0**power
    elif tone == "queries":
        k, q = k * 2.0**power, q * 2.0**-power
    elif tone in ("edge", "fp4"):
        sizes = torch.tensor(
            [2.0**-20, 1.125 * 2.0**-15] if tone == "edge" else [1.03125, 1.03125], dtype=torch.float64
        )
        v, do = (x.sign() * sizes[torch.arange(x.shape[1]) % 2][None, :, None] for x in (v, do))
    return Inputs(q.to(dtype), k.to(dtype), v.to(dtype), do.to(dtype), packing)


def _own_keys(k: Tensor, packing: Packing) -> Tensor:
    """The key at each query's position; zeros where its document has none."""
    if packing.queries is None:
        return k
    document, position = packing.document_of("q"), packing.position_of("q")
    count, start = torch.tensor(packing.lengths)[document], torch.tensor(packing.offsets)[document]
    nearest = start + torch.minimum(position.clamp_min(0), (count - 1).clamp_min(0))
    return torch.where((count > 0)[:, None, None], k[nearest.clamp_max(max(len(k) - 1, 0))], 0.0)


def disturb(base: Inputs, fresh: Inputs, tone: str, operands: tuple[str, ...], where: Rows, how: str) -> Inputs:
    """``base`` with the named operands of some rows disturbed; ``fresh`` is another draw of the same tone."""
    _, lift, spike, room = reach(base.q.dtype)
    for name in operands:
        rows = where[SIDE[name]]
        x = getattr(base, name)[rows].double()
        if how == "redraw":
            x = getattr(fresh, name)[rows].double()
        elif how == "one":
            x = x.sign() * (3.0 if tone == "fp4" else 1.0)
        elif how == "negate":
            x = -x
        elif how in ("nan", "inf"):
            x = torch.full_like(x, float(how))
        elif how.startswith("times "):
            x = (x * float(how.removeprefix("times "))).clamp(-room, room)
        elif how == "2^126":
            x = torch.full_like(x, room)
        else:
            x = (x * 2.0 ** {"cross": 1, "lift": lift, "spike": spike}[how]).clamp(-room, room)
        base = base.with_rows(name, rows, x)
    return base


class Book:
    """Draws each tone once and knows who sees whom: the experiments of one audit share their base calls."""

    def __init__(self, settings: Settings, heads: tuple[int, int], dim: int) -> None:
        self.settings, self.heads, self.dim = settings, heads, dim
        self._bases: dict[tuple[str, int], Inputs] = {}
        self._sees: dict[Packing, Tensor] = {}

    def base(self, tone: str, variant: int = 0) -> Inputs:
        key = (tone, variant)
        if key not in self._bases:
            s = self.settings
            self._bases[key] = draw(tone, s.packing, self.heads, self.dim, s.dtype, s.seed + 5000 * variant)
        return self._bases[key]

    def disturbed(self, tone: str, operand: str, rows: Rows, how: str) -> Inputs:
        operands = OPERANDS if operand == "all" else (operand,)
        return disturb(self.base(tone), self.base(tone, 1), tone, operands, rows, how)

    def sees(self, packing: Packing) -> Tensor:
        if packing not in self._sees:
            self._sees[packing] = visible(packing, self.settings.left, self.settings.right)
        return self._sees[packing]

    def change(
        self, tone: str, operand: str, how: str, document: int, start: int, stop: int | None = None, scene: str = ""
    ) -> Experiment:
        """Disturb positions start..stop of a document and owe whatever the contracts say."""
        s, base = self.settings, self.base(tone)
        p = base.packing
        rows = p.both(document, start, stop)
        operands = OPERANDS if operand == "all" else (operand,)
        changed = self.disturbed(tone, operand, rows, how)
        keep = owed(Change(rows["k"], frozenset(operands), rows["q"]), self.sees(p))
        if how in NONFINITE:
            keep["LSE"] = keep["O"]  # a token that is not a number may make NaN of all that its row returns
        checks = []
        for tensor, keeps in keep.items():
            side = SIDE[tensor]
            same = p.document_of(side) == document
            if how in NONFINITE:
                regions = {"nonfinite": keeps}
            else:
                causal = s.right == 0 and tensor not in ("dK", "dV")
                early = same & (p.position_of(side) < start) if causal else torch.zeros_like(same)
                regions = {"prefix": keeps & early, "document": keeps & ~same, "mask": keeps & same & ~early}
            for contract, region in regions.items():
                index = region.nonzero().flatten()
                if len(index):
                    checks.append(Check(contract, tensor, index, index))
        moved = torch.arange(0)
        if how == "nan" and operand in ("k", "v", "all"):
            moved = self.sees(p)[:, rows["k"]].any(1).nonzero().flatten()
        return Experiment(base, changed, tone, operand, how, document, start, tuple(checks), moved, scene)

    def rearrange(
        self,
        tone: str,
        what: str,
        parts: list[tuple[Rows, int | None]],
        tensors: tuple[str, ...],
        contract: str,
        document: int,
        cut: int | None = None,
        loud: bool = False,
    ) -> Experiment:
        """Gather pieces of the base call into a new packing. A piece is (base rows, its document or None for a filler
        that owes nothing).
        """
        base = self.base(tone)
        keys, queries = (tuple(len(rows[side]) for rows, _ in parts) for side in "kq")
        packing = Packing(keys, None if base.packing.queries is None else queries)
        changed = base.take({side: torch.cat([rows[side] for rows, _ in parts]) for side in "qk"}, packing)
        if loud:  # fillers that any statistic of the whole call must notice
            fillers = [packing.both(n) for n, (_, d) in enumerate(parts) if d is None]
            rows = {side: torch.cat([x[side] for x in fillers]) for side in "qk"}
            changed = disturb(changed, changed, tone, OPERANDS, rows, "spike")
        checks = []
        for tensor in tensors:
            side = SIDE[tensor]
            rows_of = torch.cat([r[side] for r, d in parts if d is not None])
            into = torch.cat([packing.rows(n, side=side) for n, (_, d) in enumerate(parts) if d is not None])
            if len(rows_of):
                checks.append(Check(contract, tensor, rows_of, into))
        return Experiment(base, changed, tone, "layout", what, document, cut, tuple(checks))

    def truncated(self, tone: str, t: int) -> Experiment:
        """Keep positions < t of the watched document (of every row of a batch)."""
        s, p = self.settings, self.settings.packing
        batched = s.layout == "batched"
        parts = [
            (p.both(d, 0, t if batched or d == s.watched else None), d if batched or d == s.watched else None)
            for d in range(len(s.lengths))
        ]
        return self.rearrange(tone, f"cut at {t}", parts, ("O", "LSE", "dQ"), "truncate", s.watched, t)

    def moved(self, tone: str) -> Iterator[Made]:
        """The same documents elsewhere in the buffer: reversed, alone, after leads of other lengths."""
        s, p = self.settings, self.settings.packing
        whole: list[tuple[Rows, int | None]] = [(p.both(d), d) for d in range(len(s.lengths))]
        yield partial(self.rearrange, tone, "documents reversed", whole[::-1], TENSORS, "offset", s.watched)
        if s.depth == 0:
            return
        yield partial(self.rearrange, tone, "alone", [whole[s.watched]], TENSORS, "offset", s.watched)
        if s.layout == "packed":
            for lead in s.leads:
                filler = (p.both(s.watched, 0, lead), None)
                what, parts = f"after {lead} loud tokens", [filler, whole[s.watched]]
                yield partial(self.rearrange, tone, what, parts, TENSORS, "offset", s.watched, loud=True)


Made = Callable[[], Experiment]  # an experiment that is built when it is run: a list of built ones holds gigabytes


def planned(book: Book) -> list[Made]:
    """Every experiment of an audit."""
    # Non-finite values last, because one may stay behind in a callable that keeps state.
    parts = (_suffixes, _steps, _elsewhere, _shapes, _nonfinite)
    return [made for part in parts for made in part(book)]


def _suffixes(book: Book) -> Iterator[Made]:
    """Everything from a cut onwards. A tone's native operands meet every disturbance; with depth, the others take
    their turns.
    """
    s, turn = book.settings, 0
    # Both sides of every edge of 32, where tiles meet: a mask that is off by one there reads one token in a whole tile,
    # and shows from no other cut. Tiles of other multiples of 16 have edges among these.
    for edge in range(32, s.lengths[s.watched], 32) if s.depth > 0 else ():
        yield partial(book.change, "plain", "all", "redraw", s.watched, edge)
    for tone in s.tones:
        special = tone in ("edge", "fp4")
        hows = ("one",) if special else s.disturbances
        for operand in (*OPERANDS, "all"):
            native = operand in NATIVE[tone]
            if s.depth == 0 and (special or (operand == "all" and tone != "plain")):
                continue
            if not native and s.depth < (4 if special else 2):
                continue
            for cut in s.cuts:
                turn += 1
                for how in hows if native or s.depth == 4 else (hows[turn % len(hows)],):
                    yield partial(book.change, tone, operand, how, s.watched, cut)


def _steps(book: Book) -> Iterator[Made]:
    """A short document alone, cut at every position: one row that reads one token ahead shows from no other cut, and short
    calls cost little.
    """
    s = book.settings
    if s.depth < 2:
        return
    length = 66 if s.depth < 4 else 130
    if all(n % 128 == 0 for n in s.lengths):  # whoever takes nothing else
        length = 128
    longest = max(s.lengths)
    short = Book(s.with_lengths((min(length, longest),) * (1 if s.layout == "packed" else 2)), book.heads, book.dim)
    for cut in range(1, min(length, longest)):
        yield partial(short.change, "plain", "all", "redraw", 0, cut, scene=f"{short.settings.lengths[0]} tokens alone")


def _elsewhere(book: Book) -> Iterator[Made]:
    """Other documents, whole; and a few tokens in the middle of the watched one: what windows hide, and the mirror
    for dK and dV.
    """
    s = book.settings
    others = [d for d, n in enumerate(s.lengths) if n and d != s.watched]
    homes = {"k": "keys", "q": "queries", "v": "values", "do": "values", "all": "plain"}
    # Every other document is disturbed; the first, the watched one's neighbour and the last one operand at a time.
    near = {others[0], next((d for d in others if d > s.watched), others[-1]), others[-1]} if others else set()
    for d in others if s.depth > 1 else others[:1]:
        for operand in ("all",) if s.depth == 0 or d not in near else homes:
            yield partial(book.change, homes[operand], operand, "spike", d, 0)
        if s.depth > 1:
            yield partial(book.change, "plain", "all", "redraw", d, 0)
        if s.depth > 1 and s.lengths[d] > 1:  # short documents may take another path than long ones
            yield partial(book.change, "plain", "all", "redraw", d, (s.lengths[d] + 1) // 2)
    for operand, tone in homes.items():
        if s.depth > 0 or operand != "all":
            for cut in s.cuts if len(s.cuts) < 3 else s.cuts[::2]:
                yield partial(book.change, tone, operand, "spike", s.watched, cut, cut + 3)


def _shapes(book: Book) -> Iterator[Made]:
    """Calls of other shapes: the document cut short, and the documents moved."""
    s, tones = book.settings, ("plain", "values", "keys")
    for n, t in enumerate(s.truncations):
        for tone in tones if s.depth == 4 else (tones[n % 3],):
            yield partial(book.truncated, tone, t)
    for tone in ("values", "plain", "keys")[: max(1, s.depth)]:
        yield from book.moved(tone)


def _nonfinite(book: Book) -> Iterator[Made]:
    """Three poisoned tokens, so that later rows with sound queries see them; a poisoned suffix; a poisoned document."""
    s = book.settings
    others = [d for d, n in enumerate(s.lengths) if n and d != s.watched]
    for how in NONFINITE[:1] if s.depth == 0 else NONFINITE:
        for operand in OPERANDS if s.depth > 1 else ("all",):
            for cut in s.cuts if s.depth == 4 else s.cuts[-1:]:
                yield partial(book.change, "plain", operand, how, s.watched, cut, cut + 3)
                yield partial(book.change, "plain", operand, how, s.watched, cut)
            if others and s.depth > 0:
                yield partial(book.change, "plain", operand, how, others[0], 0)


def blunt_groups(cuts: tuple[int, ...], longest: int) -> list[int]:
    """Candidate group sizes that no cut divides strictly inside: leaks through such groups cannot be seen."""
    return [g for g in GROUPS if g < longest and not any(0 < c < longest and c % g for c in cuts)]
