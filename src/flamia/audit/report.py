"""What an audit found, for people, for terminals and for machines.

Verdicts: ``clean`` (exit code 0) means that everything claimed was tried, nothing moved, and every control was
caught under the same probes. ``leak`` (1): a claimed contract was broken. ``undecided`` (2): nothing was found
broken, but the audit cannot vouch for it: the callable is not repeatable, a control was missed, cuts lie on edges
only, a claim could not be tried, or bits follow the shape in the way of a summation order.

JSON schema (``to_json``), version 1::

    schema 1; verdict, exit_code; target {name, layout, heads, head_dim, dtype, device, causal, window, cross,
    effort, seed}
    claims [contract]; statuses {contract: clean|leak|undecided|untried}; reasons [text]
    tried [{contract, tensor, operand, comparisons, moved, largest}]
        largest: relative to the row; null if nothing moved, "inf" if NaN appeared
    findings [{contract, tensor, operand, disturbance, tone, document, cut, where, first, rows, owed, largest, overall,
               kind, units, scene}]
        units: the largest change in what another order of summation moves; scene: other documents than the audit's own
    diagnosis {carriers {tensor: [operand]}, sentences, group, alignment, reach, channel, smallest} or null
    mass [{length, o_bias, o_worst, dv_bias, dq_equal, dq_common, tail, refused}]
    controls [{name, caught, missed [[contract, tensor, operand]], group}]
    blind_spots [text]; notes [text]; calls; seconds
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from .contract import CONTRACTS, IMPLIES, OPERANDS, TENSORS
from .diagnose import Diagnosis
from .judge import Finding
from .mass import Mass
from .written import Written

if TYPE_CHECKING:
    from rich.console import Group

EXIT = {"clean": 0, "leak": 1, "undecided": 2}


@dataclass(frozen=True)
class ControlResult:
    name: str
    caught: bool
    missed: tuple[tuple[str, str, str], ...]
    group: int | None


@dataclass
class Report(Written):
    """One audited callable."""

    target: dict[str, Any]
    claims: frozenset[str]
    statuses: dict[str, str]
    findings: list[Finding]
    tried: dict[tuple[str, str, str], int]
    masses: list[Mass] = field(default_factory=list)
    mass_reasons: list[str] = field(default_factory=list)
    controls: list[ControlResult] = field(default_factory=list)
    blind_spots: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    doubts: list[str] = field(default_factory=list)  # what forbids "clean" besides the contracts
    diagnosis: Diagnosis | None = None
    calls: int = 0
    seconds: float = 0.0
    stopped: bool = False  # at the first leak, as asked: what no leak was seen in is "untried", without a complaint

    @property
    def verdict(self) -> str:
        claimed = {self.statuses[c] for c in self.claims}
        if "leak" in claimed:
            return "leak"
        return "undecided" if claimed - {"clean"} or self.doubts else "clean"

    @property
    def exit_code(self) -> int:
        return EXIT[self.verdict]

    @property
    def reasons(self) -> list[str]:
        """Why the verdict is what it is, the worst finding of each broken contract first."""
        out, below = [], []
        for contract in CONTRACTS:
            if contract not in self.claims or self.statuses[contract] == "clean":
                continue
            worst = self.worst(contract)
            if contract == "mass":
                out += self.mass_reasons
            elif self.statuses[contract] == "untried":
                out += [] if self.stopped else [f"{contract}: claimed, and could not be tried"]
            elif contract == "repeat" and worst is not None and worst.kind == "leak":
                out.append(f"the call before decides bits of this one. {worst.text}")
            elif contract == "repeat" and worst is not None:
                out.append(f"not repeatable: no bitwise verdict. {worst.text}")
            elif worst is None or worst.kind == "noise":
                below.append(contract)
            elif worst.kind == "order":
                out.append(f"{worst.text}; within the order of summation, and contents cross nothing")
            else:
                out.append(worst.text)
        if below:
            out.append(f"nothing above the noise, and so undecided: {', '.join(below)}")
        return out + self.doubts

    @property
    def paragraph(self) -> str:
        """The verdict for somebody who reads nothing else."""
        name = self.target["name"]
        broken = [c for c in CONTRACTS if c in self.claims and self.statuses[c] == "leak"]
        fine = [c for c in CONTRACTS if c in self.claims and self.statuses[c] == "clean"]
        says = {
            "leak": f"{name} breaks what was asked of it: {'; '.join(f'{c} ({CONTRACTS[c]})' for c in broken)}.",
            "undecided": f"Nobody can vouch for {name}: nothing claimed was seen broken, and not all of it could be judged.",
            "clean": f"{name} kept everything that was asked of it.",
        }[self.verdict]
        said = self.diagnosis.sentences if self.diagnosis else self.reasons[:2]
        parts = [says, *map(sentence, said)]
        parts += held(fine, sum(n for (c, _, _), n in self.tried.items() if c in fine))
        caught = sum(c.caught for c in self.controls)
        if self.controls:
            parts.append(
                f"Of {len(self.controls)} attentions known to leak or not, {caught} were told under the same probes."
            )
        return " ".join(parts)

    def worst(self, contract: str) -> Finding | None:
        """The finding that tells most: a leak before anything weaker, one operand before all, then by size."""
        parts = IMPLIES.get(contract, (contract,))
        found = [f for f in self.findings if f.contract in parts]
        return max(found, key=lambda f: (f.kind == "leak", f.operand != "all", f.largest, f.rows), default=None)

    def cells(self) -> list[dict[str, Any]]:
        """Contract x tensor x operand: comparisons made, how many moved, and the largest relative change."""
        out = []
        for (contract, tensor, operand), count in sorted(
            self.tried.items(), key=lambda x: (list(CONTRACTS).index(x[0][0]), TENSORS.index(x[0][1]), x[0][2])
        ):
            moved = [f for f in self.findings if (f.contract, f.tensor, f.operand) == (contract, tensor, operand)]
            largest = max((f.largest for f in moved), default=None)
            out.append(
                {
                    "contract": contract,
                    "tensor": tensor,
                    "operand": operand,
                    "comparisons": count,
                    "moved": len(moved),
                    "largest": largest,
                }
            )
        return out

    def __str__(self) -> str:
        t = self.target
        lines = [
            f"{t['name']}: {self.verdict.upper()}  ({t['layout']}, heads {t['heads'][0]}/{t['heads'][1]}, head_dim "
            f"{t['head_dim']}, {t['dtype']}, "
            f"causal={t['causal']}, window={t['window']}, {self.calls} calls, {self.seconds:.1f} s)"
        ]
        for contract, status in self.statuses.items():
            count = sum(n for (c, _, _), n in self.tried.items() if c == contract)
            amount = f"{len(self.masses)} lengths" if contract == "mass" else f"{count} comparisons"
            lines.append(f"  {contract:<10}{status:<11}{'' if contract in self.claims else '(not claimed) '}{amount}")
        lines += [f"  - {reason}" for reason in self.reasons]
        if self.diagnosis:
            lines += [f"  = {sentence}" for sentence in self.diagnosis.sentences]
        for m in self.masses:
            lines.append("  mass " + mass_text(m))
        caught = sum(c.caught for c in self.controls)
        if self.controls:
            lines.append(f"  controls: {caught} of {len(self.controls)} as they must be")
        lines += [f"  ~ blind: {spot}" for spot in self.blind_spots] + [f"  ~ note: {note}" for note in self.notes]
        return "\n".join(lines)

    def __rich__(self) -> Group:
        return rich_report(self)

    def to_dict(self) -> dict[str, Any]:
        d = self.diagnosis
        return {
            "schema": 1,
            "verdict": self.verdict,
            "exit_code": self.exit_code,
            "target": self.target,
            "claims": sorted(self.claims),
            "statuses": self.statuses,
            "reasons": self.reasons,
            "tried": self.cells(),
            "findings": [{k: v for k, v in asdict(f).items() if k != "positions"} for f in self.findings],
            "diagnosis": None
            if d is None
            else {
                "carriers": d.carriers,
                "sentences": d.sentences,
                "group": d.group,
                "alignment": d.alignment,
                "reach": d.reach,
                "channel": d.channel,
                "smallest": d.smallest,
            },
            "mass": [m.as_dict() for m in self.masses],
            "controls": [asdict(c) for c in self.controls],
            "blind_spots": self.blind_spots,
            "notes": self.notes,
            "calls": self.calls,
            "seconds": round(self.seconds, 3),
        }

    def page(self) -> str:
        from .page import render

        return render([self])


def sentence(text: str) -> str:
    """With a capital, unless it begins with the name of a tensor, and with a full stop."""
    return (text if text[1:2].isupper() else text[:1].upper() + text[1:]) + "."


def held(contracts: list[str], comparisons: int) -> list[str]:
    """The sentence about what did not move."""
    if not contracts:
        return []
    return [f"Nothing moved, in any bit, under {', '.join(contracts)} in {comparisons} comparisons."]


def mass_text(m: Mass) -> str:
    if m.refused:
        return f"{m.length} tokens: refused ({m.refused})"
    parts = (
        ("O", m.o_bias),
        ("O worst row", m.o_worst),
        ("dV", m.dv_bias),
        ("dQ at equal keys", m.dq_equal),
        ("dQ under a common key", m.dq_common),
        ("tail", m.tail),
    )
    return f"{m.length} tokens: " + ", ".join(f"{name} {value:.2g}" for name, value in parts if value is not None)


def rich_report(report: Report) -> Group:
    """Verdict, then contract x tensor with what moved, then the diagnosis, sums, controls and blind spots."""
    from rich.console import Group
    from rich.panel import Panel
    from rich.table import Table

    colour = {"clean": "green", "leak": "red", "undecided": "yellow", "untried": "dim"}
    table = Table(box=None, pad_edge=False)
    tensors = [t for t in TENSORS if any(tensor == t for _, tensor, _ in report.tried)]
    for column in ("contract", "status", *tensors, "worst"):
        table.add_column(column, overflow="fold")
    cells = report.cells()
    for contract, status in report.statuses.items():
        row = []
        for tensor in tensors:
            mine = [c for c in cells if c["contract"] == contract and c["tensor"] == tensor]
            moved = "".join(f"{c['operand']} " for c in mine if c["moved"] and c["operand"] in (*OPERANDS, "layout"))
            row.append(
                ""
                if not mine
                else f"[red]{moved or 'all '}[/]"
                if any(c["moved"] for c in mine)
                else f"0 of {sum(c['comparisons'] for c in mine)}"
            )
        worst = report.worst(contract)
        shown = "" if worst is None else f"{worst.largest:.2g}, first at {worst.first}"
        claim = status if contract in report.claims else f"{status} (not claimed)"
        table.add_row(contract, f"[{colour[status]}]{claim}[/]", *row, shown)
    t = report.target
    title = f"{t['name']}: [{colour[report.verdict]}]{report.verdict}[/]"
    lines = [
        *report.reasons,
        *(report.diagnosis.sentences if report.diagnosis else ()),
        *(f"mass, {mass_text(m)}" for m in report.masses),
        f"controls: {sum(c.caught for c in report.controls)} of {len(report.controls)} as they must be",
        *(f"blind spot: {s}" for s in report.blind_spots),
        *(f"note: {n}" for n in report.notes),
    ]
    from rich.markup import escape

    return Group(Panel(table, title=title, title_align="left"), *(f"  {escape(line)}" for line in lines))
