"""What the audit of a whole model found.

Verdicts and exit codes are those of ``report``: ``clean`` 0, ``leak`` 1, ``undecided`` 2; and ``skew``, also 1: no
future is seen, but the model serves other logits than it trains with.

JSON schema (``to_json``), version 1::

    schema 1; kind "model"; verdict, exit_code, reasons [text]
    target {name, batch, tokens, vocabulary, dtype, device, cuts, effort, seed, mode, exact}
    claims [contract]; statuses {contract: clean|rounding|leak|skew|undecided|untried}
    tried [{contract, operand, comparisons, moved}]
    findings [{contract, operand, disturbance, cut, first, rows, owed, largest, logits, flips, kind, beyond}]
        largest: relative to the row of logits; logits: the largest difference of one logit; flips: rows in which
        another token became the likeliest
    rounding: what one unit in the last place, everywhere, does to a row of logits, or null; room: what calls of
        another shape are allowed
    origin {module, kind, positions, elsewhere} or null; shown_by: the first module whose output moved, the same or null
    carriers [module]; affected [module] or null; group or null; sentences [text]
    controls [{name, caught}]; blind_spots [text]; notes [text]; calls; seconds
"""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from .diagnose import Map
from .report import EXIT, held, sentence
from .trace import Move
from .written import Written

if TYPE_CHECKING:
    from rich.console import Group

MODEL_CONTRACTS: dict[str, str] = {
    "repeat": "the same tokens give the same bits, whatever was computed in between",
    "prefix": "later tokens leave the logits of earlier positions alone",
    "batch": "the other sequences of a batch leave this one's logits alone",
    "truncate": "a shorter call gives the logits of the longer one, up to rounding",
    "alone": "a sequence without the rest of its batch has the same logits, up to rounding",
    "chunked": "prefill in chunks through the cache gives the logits of one full call, up to rounding",
    "decode": "so does decoding token by token through the cache",
}
SHAPES = frozenset({"truncate", "alone", "chunked", "decode"})  # calls of another shape: rounding is excused
SERVED = frozenset({"chunked", "decode"})
MODEL_EXIT = EXIT | {"skew": 1}
RANK = ("leak", "skew", "noise", "rounding")


@dataclass(frozen=True)
class ModelFinding:
    """Logits that moved in one comparison."""

    contract: str
    operand: str  # "tokens", a group of modules such as "v_proj", "shape" or "cache"
    disturbance: str
    cut: int | None
    first: int  # position
    rows: int
    owed: int
    largest: float
    logits: float
    flips: int
    kind: str  # "leak", "skew", "rounding", "noise" (nothing that can be told apart from noise or from rounding)
    beyond: bool = False  # a call of another shape: only rows that moved by more than rounding are counted
    positions: tuple[int, ...] = ()

    @property
    def text(self) -> str:
        beyond = " beyond rounding" if self.beyond else ""
        flips = f", another likeliest token in {self.flips}" if self.flips else ""
        return (
            f"{self.contract}: logits moved{beyond} in {self.rows} of {self.owed} rows, first position {self.first} (by up to "
            f"{self.logits:.3g} in one logit, {self.largest:.3g} of the row{flips}); {self.disturbance}"
        )


@dataclass(frozen=True)
class ModelControl:
    name: str
    caught: bool


@dataclass
class Location:
    """Where in a model a leak begins, as far as that was found (``model_locate``)."""

    shown_by: Move | None = None
    origin: Move | None = None
    carriers: list[str] = field(default_factory=list)
    affected: list[str] | None = None
    group: int | None = None
    sentences: list[str] = field(default_factory=list)
    map: Map | None = None  # who moves whom inside the origin


@dataclass(kw_only=True)
class ModelReport(Location, Written):
    """One audited model."""

    target: dict[str, Any]
    claims: frozenset[str]
    findings: list[ModelFinding]
    tried: Counter[tuple[str, str]]
    stable: bool = True
    rounding: float | None = None
    room: float = 0.0
    controls: list[ModelControl] = field(default_factory=list)
    blind_spots: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    doubts: list[str] = field(default_factory=list)
    calls: int = 0
    seconds: float = 0.0

    def status(self, contract: str) -> str:
        """clean, rounding, leak, skew, undecided or untried."""
        kinds = {f.kind for f in self.findings if f.contract == contract}
        for kind in ("leak", "skew"):
            if kind in kinds:
                return kind
        if "noise" in kinds or (not self.stable and contract not in SHAPES):
            return "undecided"
        if "rounding" in kinds:
            return "rounding"
        return "clean" if any(c == contract for c, _ in self.tried) else "untried"

    @property
    def statuses(self) -> dict[str, str]:
        return {c: self.status(c) for c in MODEL_CONTRACTS}

    @property
    def verdict(self) -> str:
        claimed = {self.status(c) for c in self.claims}
        for broken in ("leak", "skew"):
            if broken in claimed:
                return broken
        fine = {"clean"} if self.target["exact"] else {"clean", "rounding"}
        return "undecided" if claimed - fine or self.doubts else "clean"

    @property
    def exit_code(self) -> int:
        return MODEL_EXIT[self.verdict]

    def worst(self, contract: str) -> ModelFinding | None:
        """A leak before anything weaker; a change of tokens before one inside; then by size."""
        found = [f for f in self.findings if f.contract == contract]
        return max(found, key=lambda f: (-RANK.index(f.kind), f.operand == "tokens", f.largest, f.rows), default=None)

    @property
    def reasons(self) -> list[str]:
        """Why the verdict is what it is."""
        out = []
        for contract in MODEL_CONTRACTS:
            status, worst = self.status(contract), self.worst(contract)
            if contract not in self.claims or status in ("clean", *(() if self.target["exact"] else ("rounding",))):
                continue
            if status == "untried":
                out.append(f"{contract}: claimed, and could not be tried")
            elif worst is None:
                out.append(f"{contract}: nothing moved, but the model does not repeat itself")
            elif contract == "repeat":
                out.append(f"not repeatable: no bitwise verdict. {worst.text}")
            elif worst.kind == "noise":
                out.append(f"{worst.text}; not to be told from noise or rounding")
            elif worst.kind == "rounding":
                out.append(f"{worst.text}; within rounding, and exact=True asks for equal bits")
            else:
                out.append(worst.text)
        return out + self.doubts

    @property
    def paragraph(self) -> str:
        """The verdict for somebody who reads nothing else."""
        name = self.target["name"]
        broken = [c for c in MODEL_CONTRACTS if c in self.claims and self.status(c) in ("leak", "skew")]
        fine = [c for c in MODEL_CONTRACTS if c in self.claims and self.status(c) == "clean"]
        close = [c for c in MODEL_CONTRACTS if c in self.claims and self.status(c) == "rounding"]
        says = {
            "leak": f"{name} leaks: its logits depend on tokens that they must not depend on ({', '.join(broken)}).",
            "skew": f"{name} sees no future, and serves other logits than it trains with ({', '.join(broken)}).",
            "undecided": f"Nobody can vouch for {name}: nothing claimed was seen broken, and not all of it could be judged.",
            "clean": f"{name} kept everything that was asked of it.",
        }[self.verdict]
        parts = [says, *map(sentence, self.sentences)]
        if self.verdict == "undecided":
            parts += map(sentence, self.reasons[:2])
        parts += held(fine, sum(n for (c, _), n in self.tried.items() if c in fine))
        if close:
            parts.append(f"Other shapes of the call moved logits by no more than rounding does ({', '.join(close)}).")
        seen = sum(c.caught for c in self.controls)
        parts.append(f"Of {len(self.controls)} leaks planted under the same probes, {seen} were seen.")
        return " ".join(parts)

    def _skews(self) -> list[str]:
        """Sizes of what rounding excuses: nobody should have to guess them."""
        found = [self.worst(c) for c in MODEL_CONTRACTS if c in SHAPES and self.status(c) == "rounding"]
        return [
            f"{f.text}; within rounding{'' if self.stable else ' and noise'} ({self.room:.2g} of the row)"
            for f in found
            if f
        ]

    def lines(self) -> list[str]:
        """Everything below the headline and the table."""
        caught = sum(c.caught for c in self.controls)
        return [
            *(f"- {reason}" for reason in self.reasons),
            *(f"= {sentence}" for sentence in self.sentences),
            *([] if self.target["exact"] else [f"+ {skew}" for skew in self._skews()]),
            f"controls: {caught} of {len(self.controls)} planted leaks were seen",
            *(f"~ blind: {spot}" for spot in self.blind_spots),
            *(f"~ note: {note}" for note in self.notes),
        ]

    def headline(self) -> str:
        t = self.target
        return (
            f"{t['batch']} sequences of {t['tokens']} tokens, {t['vocabulary']} logits, {t['dtype']}, {self.calls} "
            f"calls, {self.seconds:.1f} s"
        )

    def table(self) -> list[tuple[str, str, str, str]]:
        """(contract, status, comparisons, largest difference of one logit)."""
        out = []
        for contract, status in self.statuses.items():
            count = sum(n for (c, _), n in self.tried.items() if c == contract)
            sizes = [f.logits for f in self.findings if f.contract == contract]
            claim = "" if contract in self.claims else " (not claimed)"
            out.append((contract, status + claim, str(count), f"{max(sizes):.3g}" if sizes else ""))
        return out

    def __str__(self) -> str:
        head = f"{self.target['name']}: {self.verdict.upper()}  ({self.headline()})"
        rows = [
            f"  {contract:<10}{status:<24}{count:>4} comparisons" + (f", logits by up to {size}" if size else "")
            for contract, status, count, size in self.table()
        ]
        return "\n".join([head, *rows, *(f"  {line}" for line in self.lines())])

    def __rich__(self) -> Group:
        from rich.console import Group
        from rich.markup import escape
        from rich.panel import Panel
        from rich.table import Table

        colours = {"clean": "green", "rounding": "green", "leak": "red", "skew": "red", "undecided": "yellow"}
        grid = Table(box=None, pad_edge=False)
        for column in ("contract", "status", "comparisons", "largest change of a logit"):
            grid.add_column(column)
        for contract, status, count, size in self.table():
            grid.add_row(contract, f"[{colours.get(status.split()[0], 'dim')}]{status}[/]", count, size)
        title = f"{escape(self.target['name'])}: [{colours[self.verdict]}]{self.verdict}[/]"
        panel = Panel(grid, title=title, title_align="left", subtitle=self.headline(), subtitle_align="left")
        return Group(panel, *(f"  {escape(line)}" for line in self.lines()))

    def to_dict(self) -> dict[str, Any]:
        tried = [
            {
                "contract": contract,
                "operand": operand,
                "comparisons": count,
                "moved": sum((f.contract, f.operand) == (contract, operand) for f in self.findings),
            }
            for (contract, operand), count in sorted(self.tried.items())
        ]
        return {
            "schema": 1,
            "kind": "model",
            "verdict": self.verdict,
            "exit_code": self.exit_code,
            "reasons": self.reasons,
            "target": self.target,
            "claims": sorted(self.claims),
            "statuses": self.statuses,
            "tried": tried,
            "findings": [{k: v for k, v in asdict(f).items() if k != "positions"} for f in self.findings],
            "rounding": self.rounding,
            "room": self.room,
            "origin": asdict(self.origin) if self.origin else None,
            "shown_by": asdict(self.shown_by) if self.shown_by else None,
            "carriers": self.carriers,
            "affected": self.affected,
            "group": self.group,
            "sentences": self.sentences,
            "controls": [asdict(c) for c in self.controls],
            "blind_spots": self.blind_spots,
            "notes": self.notes,
            "calls": self.calls,
            "seconds": round(self.seconds, 3),
        }

    def page(self) -> str:
        from .model_page import render

        return render(self)
