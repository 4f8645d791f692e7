"""Running experiments and telling leaks from arithmetic.

Three rules decide what a difference means.

1. *Same shape, repeatable callable: any difference is a leak*, one bit of one row included. With the shapes fixed
   nothing but the disturbed values can have moved the bits; there is no rounding "noise" to excuse it, because
   noise repeats.
2. *Other shape* (``truncate``, ``offset``): libraries choose blocks and orders of summation by length, and an
   honest attention then differs in the last bits without a single value having crossed. Such a difference is
   called ``order`` if it is small, at most one unit in the last place of the output relative to the row and to the
   largest terms summed in it, and if the contents of later tokens and other documents were seen to move nothing at
   equal shape (rule 1 on the same tensor). It is reported, and the verdict on that contract is "undecided": the
   length decides bits, contents do not. A larger
   difference is a leak of the length: a scale group or a statistic that ends where the buffer ends.
3. *Unstable callable*: no bitwise verdict. The spread of repeated calls is the floor; a difference of more than
   eight times the floor is still reported as a leak, anything below as undecided. Both are counted in ``units`` of what
   another order of summation may move in that row (rule 2), not relative to the row: dQ of a document's first row is
   zero but for noise, and noise relative to nothing is everything.
4. *What is found is found again.* Dice that fall once in a hundred calls pass the first repeats, and their spread is
   wider than two calls show. So before a tensor is accused, both calls are made twice more, in turn: some row must
   keep its calls of one kind eight times closer together than they are to those of the other kind.

Other sizes are relative to the row: ``largest`` is the greatest |change| / |row| over rows and heads (2 at most,
infinite if NaN appears), ``overall`` the same ratio for all compared rows together.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, replace
from itertools import combinations

import torch
from torch import Tensor

from .contract import CONTRACTS, IMPLIES, SIDE, TENSORS
from .probes import NONFINITE, Book, Check, Experiment
from .targets import Inputs, Outputs, Refused, Target

ABOVE_NOISE = 8.0


@dataclass(frozen=True)
class Finding:
    """One tensor that moved in one experiment. Positions are counted inside ``where``, the document of the first
    changed row.
    """

    contract: str
    tensor: str
    operand: str
    disturbance: str
    tone: str
    document: int
    cut: int | None
    where: int
    first: int
    rows: int
    owed: int
    largest: float
    overall: float
    kind: str  # "leak"; "order" (summation order follows the shape); "noise" (below the floor of an unstable callable)
    units: float  # the greatest change of a row in what another order of summation may move there
    positions: tuple[int, ...] = ()
    scene: str = ""  # which other documents than the audit's own these were

    @property
    def text(self) -> str:
        cut = "" if self.cut is None else f" from position {self.cut}" if self.operand != "layout" else ""
        what = (
            self.disturbance
            if self.operand == "layout"
            else f"{self.disturbance} of {self.operand} in document {self.document}{cut}"
        )
        size = (
            "not finite"
            if math.isinf(self.largest)
            else f"largest {self.largest:.3g} of the row, {self.overall:.2g} overall"
        )
        where = f"of document {self.where}" if not self.scene else f"of {self.scene}"
        return (
            f"{self.contract}: {self.tensor} moved in {self.rows} of {self.owed} rows, first position {self.first} "
            f"{where} ({size}); {what} [{self.tone}]"
        )


def differs(x: Tensor, y: Tensor) -> Tensor:
    """(rows,) bool: some entry has another value; NaN equals NaN."""
    return ((x != y) & ~(x.isnan() & y.isnan())).flatten(1).any(1)


def change_size(x: Tensor, y: Tensor) -> tuple[Tensor, float]:
    """Relative change per (row, head), and over everything."""
    x, y = x.double(), y.double()
    delta = torch.where((x == y) | (x.isnan() & y.isnan()), 0.0, x - y)
    norm = torch.maximum(x.norm(dim=-1), y.norm(dim=-1))
    size = torch.where(delta.abs().sum(-1) == 0, 0.0, delta.norm(dim=-1) / norm)
    size = torch.where(size.isfinite(), size, math.inf)
    total = float(delta.norm() / torch.maximum(x.norm(), y.norm())) if bool((delta != 0).any()) else 0.0
    return size, total if math.isfinite(total) else math.inf


def distance(x: Tensor, y: Tensor) -> Tensor:
    """(rows, heads): |x - y|, 0 where NaN meets NaN and infinite where it meets anything else."""
    x, y = x.double(), y.double()
    delta = torch.where((x == y) | (x.isnan() & y.isnan()), 0.0, x - y)
    return torch.nan_to_num(delta, math.inf).norm(dim=-1)


def unit(dtype: torch.dtype) -> float:
    """What another order of summation may leave, relative to the terms: one unit of 16 bits, 64 of a longer format."""
    info = torch.finfo(dtype)
    return info.eps if info.bits == 16 else 64 * info.eps


def order_bound(inputs: Inputs, sees: Tensor, through_lse: bool = False) -> Outputs:
    """(rows,) per tensor: the size of the largest terms of each row's sums, of which reordering moves a rounding."""

    def largest(x: Tensor) -> Tensor:
        return x.double().norm(dim=-1).amax(1)

    q, k, v, do = (largest(getattr(inputs, n)) for n in ("q", "k", "v", "do"))
    scale = inputs.q.shape[-1] ** -0.5
    over_keys = {name: torch.where(sees, x[None, :], 0.0).amax(1) for name, x in (("k", k), ("v", v))}
    over_rows = {name: torch.where(sees, x[:, None], 0.0).amax(0) for name, x in (("q", q), ("do", do))}
    # E_ij - D_i reaches |dO_i| times twice the largest v that row i sees; a dLSE joins it, which is an entry of dO_i.
    e = do * (over_keys["v"] + (0.5 if through_lse else 0.0))
    reach_e = torch.where(sees, e[:, None], 0.0).amax(0)
    return {
        "O": over_keys["v"],
        "LSE": 1 + scale * q * over_keys["k"],
        "dQ": scale * 2 * e * over_keys["k"],
        "dK": scale * 2 * reach_e * over_rows["q"],
        "dV": over_rows["do"],
    }


class Judge:
    """Runs experiments on one target and keeps the record."""

    def __init__(self, target: Target, book: Book) -> None:
        self.target, self.book = target, book
        self.findings: list[Finding] = []
        self.tried: Counter[tuple[str, str, str]] = Counter()
        self.refusals: dict[str, str] = {}
        self.floor: dict[str, float] = dict.fromkeys(TENSORS, 0.0)  # in units
        self.stable = True
        self.keeps_state = False  # repeats itself at once, but not after other calls
        self._confirmed: set[tuple[str, str]] = set()  # (contract, tensor) of leaks that showed again
        self._base: dict[int, tuple[Inputs, Outputs]] = {}
        self._bounds: dict[tuple[int, bool], Outputs] = {}
        self.eps = unit(target.dtype)

    def base(self, inputs: Inputs) -> Outputs:
        key = id(inputs)
        if key not in self._base:
            self._base[key] = (inputs, self.target.run(inputs))  # the inputs are kept so that the id stays theirs
        return self._base[key][1]

    def repeat(self, tones: tuple[str, ...], what: str) -> None:
        """Call each tone again. Asked a second time after all experiments, this also catches state that a callable
        keeps between calls.
        """
        for tone in tones:
            inputs = self.book.base(tone)
            first, again = self.base(inputs), self.target.run(inputs)
            for tensor in first:
                self.tried["repeat", tensor, "layout"] += 1
            if self._spread(inputs, first, again, tone, what):
                self.keeps_state |= all(torch.equal(again[t], x) for t, x in self.target.run(inputs).items())

    def _spread(self, inputs: Inputs, first: Outputs, again: Outputs, tone: str, what: str) -> bool:
        """Two calls with the same inputs: whatever differs raises the floor."""
        watched, some = self.book.settings.watched, False
        for tensor, x in first.items():
            rows = torch.arange(len(x))
            found = self._compare(inputs, "repeat", tensor, x, again[tensor], rows, tone, "layout", what, watched, None)
            if found:
                self.stable, some = False, True
                self.floor[tensor] = max(self.floor[tensor], found.units)
                self.findings.append(found)
        return some

    def history(self) -> None:
        """Dice or memory? The same call after a quiet and a loud one, in an irregular order: if its bits follow the
        call before every time, that call leaks into it.
        """
        quiet, inputs = self.book.base("plain"), self.book.base("values")
        others = (quiet, self.book.disturbed("plain", "all", quiet.packing.all_rows(), "spike"))
        runs: tuple[list[Outputs], list[Outputs]] = ([], [])
        for n in (0, 1, 1, 0, 1, 0, 0, 0, 1, 1):
            self.target.run(others[n])
            runs[n].append(self.target.run(inputs))
        if any(bool(differs(x, again[t]).any()) for same in runs for again in same[1:] for t, x in same[0].items()):
            return
        for tensor, x in runs[0][0].items():
            rows, watched = torch.arange(len(x)), self.book.settings.watched
            y, what = runs[1][0][tensor], "the same call after another one"
            found = self._compare(inputs, "repeat", tensor, x, y, rows, "values", "layout", what, watched, None)
            if found:
                self.findings.append(replace(found, kind="leak"))

    def run(self, e: Experiment) -> list[Finding]:
        """One experiment; the findings are recorded and returned."""
        if not e.checks or (e.operand == "do" and not self.target.has_gradients):
            return []
        try:
            base = self.base(e.base)
            changed = self.target.run(e.changed)
        except Refused as refusal:
            self.refusals.setdefault(e.disturbance if e.disturbance in NONFINITE else e.name, str(refusal))
            return []
        found: list[Finding] = []
        suspects: list[tuple[int, Check]] = []
        for check in e.checks:
            if check.tensor not in base:
                continue
            self.tried[check.contract, check.tensor, e.operand] += 1
            finding = self._compare(
                e.base,
                check.contract,
                check.tensor,
                base[check.tensor][check.rows],
                changed[check.tensor][check.into],
                check.rows,
                e.tone,
                e.operand,
                e.disturbance,
                e.document,
                e.cut,
                e.scene,
            )
            if finding:
                found.append(finding)
                if finding.kind == "leak" and (check.contract, check.tensor) not in self._confirmed:
                    suspects.append((len(found) - 1, check))
        if suspects:
            self._confirm(e, base, changed, found, suspects)
        if len(e.moved):
            found += self._must_show_nan(e, changed["O"])
        self.findings += found
        return found

    def _confirm(
        self, e: Experiment, base: Outputs, changed: Outputs, found: list[Finding], suspects: list[tuple[int, Check]]
    ) -> None:
        """Rule 4: what does not show again becomes noise in ``found``."""
        bases, others = [base], [changed]
        try:
            for _ in range(2):
                bases.append(self.target.run(e.base))
                others.append(self.target.run(e.changed))
        except Refused as refusal:  # of a call that was taken before: there is no telling what it does
            self.refusals.setdefault(e.name, str(refusal))
        for inputs, runs in ((e.base, bases), (e.changed, others)):
            for again in runs[1:]:
                self._spread(inputs, runs[0], again, e.tone, "the same call again")
        for n, check in suspects:
            x = [run[check.tensor][check.rows] for run in bases]
            y = [run[check.tensor][check.into] for run in others]
            within = [distance(a, b) for runs in (x, y) for a, b in combinations(runs, 2)]
            between = torch.stack([distance(a, b) for a in x for b in y]).amin(0)
            spread = torch.stack(within).amax(0) if within else torch.full_like(between, math.inf)
            if bool((between > ABOVE_NOISE * spread).any()) and self._above_floor(found[n]):
                self._confirmed.add((check.contract, check.tensor))
            else:
                found[n] = replace(found[n], kind="noise")
                self.stable = False
                self.floor[check.tensor] = max(self.floor[check.tensor], found[n].units)

    def _above_floor(self, f: Finding) -> bool:
        return self.stable or f.units > ABOVE_NOISE * self.floor[f.tensor]

    def _must_show_nan(self, e: Experiment, out: Tensor) -> list[Finding]:
        self.tried["nonfinite", "O", e.operand] += 1
        hidden = e.moved[~out[e.moved].isnan().flatten(1).all(1)]
        if not len(hidden):
            return []
        doc, pos = e.base.packing.document_of("q")[hidden], e.base.packing.position_of("q")[hidden]
        return [
            Finding(
                "nonfinite",
                "O",
                e.operand,
                "nan hidden",
                e.tone,
                e.document,
                e.cut,
                int(doc[0]),
                int(pos[0]),
                len(hidden),
                len(e.moved),
                math.inf,
                math.inf,
                "leak",
                math.inf,
            )
        ]

    def _compare(
        self,
        inputs: Inputs,
        contract: str,
        tensor: str,
        x: Tensor,
        y: Tensor,
        rows: Tensor,
        tone: str,
        operand: str,
        how: str,
        document: int,
        cut: int | None,
        scene: str = "",
    ) -> Finding | None:
        moved = differs(x, y)
        if not bool(moved.any()):
            return None
        size, overall = change_size(x[moved], y[moved])
        _, overall = change_size(x, y)
        largest = float(size.max())
        kind = "leak"
        if contract == "repeat":
            kind = "noise"
        units = float((distance(x[moved], y[moved]) / self._room(inputs, tensor, x, y, rows, moved)).max())
        if contract in ("truncate", "offset"):
            kind = "order" if units <= 1 else "leak"
        if kind == "leak" and not self.stable and units <= ABOVE_NOISE * self.floor[tensor]:
            kind = "noise"
        hit = rows[moved]
        side = SIDE[tensor]
        docs, positions = inputs.packing.document_of(side)[hit], inputs.packing.position_of(side)[hit]
        # Where the disturbed document itself moved, that is the interesting place.
        where = document if bool((docs == document).any()) else int(docs[0])
        positions = positions[docs == where]
        return Finding(
            contract,
            tensor,
            operand,
            how,
            tone,
            document,
            cut,
            where,
            int(positions.min()),
            int(moved.sum()),
            len(x),
            largest,
            overall,
            kind,
            units,
            tuple(positions.tolist()),
            scene,
        )

    def _room(self, inputs: Inputs, tensor: str, x: Tensor, y: Tensor, rows: Tensor, moved: Tensor) -> Tensor:
        """(moved rows, heads): what another order of summation may move."""
        eps = unit(x.dtype) if tensor == "LSE" else self.eps  # an LSE is float32 beside 16 bits
        key = id(inputs), self.target.through_lse
        bound = self._bounds.get(key) or order_bound(inputs, self.book.sees(inputs.packing), key[1])
        if key[0] in self._base:  # whose inputs are kept, so that the id stays theirs
            self._bounds[key] = bound
        sizes = (torch.nan_to_num(z[moved].double().norm(dim=-1), 0.0, 0.0) for z in (x, y))
        room = bound[tensor][rows[moved]][:, None] + torch.maximum(*sizes)
        return (eps * room).clamp_min(torch.finfo(torch.float64).tiny)

    def settle(self) -> None:
        """Last word on kinds, once everything is known.

        Small differences between shapes are innocent only if contents move nothing at equal shape; and if the last
        repeats showed a callable to be unstable after all, what was called a leak before must rise above that
        floor as well.
        """
        content = {f.tensor for f in self.findings if f.kind == "leak" and f.contract in ("prefix", "document")}
        for n, f in enumerate(self.findings):
            if f.contract == "repeat":
                continue
            if f.kind == "order" and f.tensor in content and self.stable:
                self.findings[n] = replace(f, kind="leak")
            elif f.kind != "noise" and not self._above_floor(f):
                self.findings[n] = replace(f, kind="noise")

    def status(self, contract: str) -> str:
        """ "clean", "leak", "undecided" or "untried" for one contract."""
        kinds = {f.kind for f in self.findings if f.contract in IMPLIES.get(contract, (contract,))}
        if "leak" in kinds:
            return "leak"
        if kinds or not (self.stable or contract == "mass"):
            return "undecided"
        return "clean" if any(c == contract for c, _, _ in self.tried) else "untried"

    def statuses(self) -> dict[str, str]:
        return {contract: self.status(contract) for contract in CONTRACTS if contract != "mass"}
