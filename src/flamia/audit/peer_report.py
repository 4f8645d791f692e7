"""What a sweep over other people's attention found: one table, one JSON document, one exit code.

Exit code 0 if everything that ran is clean, 1 if anything leaks, 2 if something is undecided, time ran out, or nothing
could run. Refused option sets are listed and spoil nothing: a peer that says no has said so.

JSON (``to_json``), version 1::

    schema 1; verdict, exit_code, seconds
    targets [{name, version, about, caution, available, reason, sets, verdicts {verdict: count}}]
    rows [{target, options {packing, causal, windowed, grouped, cross, lse, deterministic, dtype, window, heads}, verdict, moved,
           error, refused, gradients, report}]        report: the schema of ``flamia.audit.report``, or null
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from .contract import CONTRACTS, IMPLIES, TENSORS
from .peers import UNSAID, Peer, PeerRow, audit_peer, choose
from .report import EXIT, Report
from .written import Written

if TYPE_CHECKING:
    from rich.console import Group

COLOURS = {"clean": "green", "leak": "bold red", "undecided": "yellow", "refused": "dim", "not run": "yellow"}


def moved(row: PeerRow, sizes: bool = True) -> str:
    """What moved under the contracts that count, in a few words."""
    report = row.report
    if report is None:
        return row.refused or "out of time"
    parts = [_broken(report, c, sizes) for c in CONTRACTS if c in report.claims and report.statuses.get(c) != "clean"]
    parts += report.doubts
    if row.foreign:
        parts.append(f"O is not the attention asked for (relative error {row.error:.2g})" if sizes else "foreign O")
    if row.gradients:
        parts.append("O alone")
    return "; ".join(parts)


def _broken(report: Report, contract: str, sizes: bool) -> str:
    found = [f for f in report.findings if f.contract in IMPLIES.get(contract, (contract,))]
    if not found:
        return f"{contract} {report.statuses.get(contract, 'untried')}"
    kind = next(k for k in ("leak", "order", "noise") if any(f.kind == k for f in found))
    worst = [f for f in found if f.kind == kind]
    tensors = " ".join(t for t in TENSORS if any(f.tensor == t for f in worst))
    note = {"leak": "", "order": ", order of summation", "noise": ", within the noise"}[kind]
    most = max(f.largest for f in worst)
    size = f"up to {most:.2g} of the row" if math.isfinite(most) else "NaN or infinity appear"
    return f"{contract} {tensors}" + (f" ({size}{note})" if sizes else note)


def largest(row: PeerRow) -> float:
    """The greatest change under a contract that counts."""
    if row.report is None:
        return 0.0
    counted = {part for c in row.report.claims for part in IMPLIES.get(c, (c,))}
    return max((f.largest for f in row.report.findings if f.contract in counted), default=0.0)


def together(rows: Sequence[PeerRow]) -> list[list[PeerRow]]:
    """Rows of one peer that say the same, in the order of their first."""
    groups: dict[tuple[str, str, str], list[PeerRow]] = {}
    for row in rows:
        groups.setdefault((row.peer, row.verdict, moved(row, sizes=False)), []).append(row)
    return list(groups.values())


def sets(rows: Sequence[PeerRow]) -> str:
    """The option sets of a group: for every axis the values that occur, and how many of their product these are."""
    if len(rows) == 1:
        return str(rows[0].options)
    axes = [list(dict.fromkeys(words)) for words in zip(*(row.options.words() for row in rows))]
    product = 1
    for values in axes:
        product *= len(values)
    text = ", ".join("|".join(values) for values in axes if values not in [[word] for word in UNSAID])
    return f"{text}: " + (f"all {product}" if product == len(rows) else f"{len(rows)} of {product}")


@dataclass
class PeerAudit(Written):
    """All rows of all peers, and the peers that are not to be had here with the reason."""

    peers: list[Peer]
    rows: list[PeerRow] = field(default_factory=list)
    missing: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def verdict(self) -> str:
        verdicts = {row.verdict for row in self.rows} - {"refused"}
        if "leak" in verdicts:
            return "leak"
        return "clean" if verdicts == {"clean"} else "undecided"

    @property
    def exit_code(self) -> int:
        return EXIT[self.verdict]

    def of(self, name: str) -> list[PeerRow]:
        return [row for row in self.rows if row.peer == name]

    def summary(self) -> list[tuple[str, str, str, str]]:
        """(target, option sets, verdict, what moved), one line for option sets that say the same."""
        out = []
        for peer in self.peers:
            if peer.name in self.missing:
                out.append((peer.name, "", "not available here", self.missing[peer.name]))
            for group in together(self.of(peer.name)):
                said = moved(max(group, key=largest))
                out.append((peer.name, sets(group), group[0].verdict, said if len(said) < 240 else said[:236] + " ..."))
        return out

    def notes(self) -> list[str]:
        out = [f"{p.name}: {p.caution}" for p in self.peers if p.caution and p.name not in self.missing]
        for name, why in {(r.peer, r.gradients) for r in self.rows if r.gradients}:
            out.append(f"{name}: gradients refused where O is audited alone ({why})")
        kept = {(r.peer, note) for r in self.rows if r.report for note in r.report.notes if "writes into" in note}
        out += [f"{name}: {note}" for name, note in kept]
        return sorted(out)

    def __str__(self) -> str:
        lines = [" | ".join(part for part in line if part) for line in self.summary()]
        return "\n".join([*lines, *self.notes(), f"verdict: {self.verdict}"])

    def __rich__(self) -> Group:
        from rich.console import Group
        from rich.markup import escape
        from rich.table import Table

        ran = [row for row in self.rows if row.report]
        calls = sum(row.report.calls for row in ran if row.report)
        title = f"{len(ran)} option sets audited of {len(self.rows)} asked for, {calls} calls, {self.seconds:.0f} s"
        table = Table("target", "option sets", "verdict", "what moved", title=title, title_justify="left", box=None)
        previous = None
        for name, which, verdict, what in self.summary():
            shown = f"[{COLOURS.get(verdict, 'dim')}]{verdict}[/]"
            table.add_row("" if name == previous else escape(name), escape(which), shown, escape(what))
            previous = name
        return Group(table, *(f"  {escape(note)}" for note in self.notes()), f"verdict: {self.verdict}")

    def to_dict(self) -> dict[str, Any]:
        return {
            "schema": 1,
            "verdict": self.verdict,
            "exit_code": self.exit_code,
            "seconds": round(self.seconds, 3),
            "targets": [
                describe(p, self.missing.get(p.name))
                | {"sets": len(self.of(p.name)), "verdicts": dict(Counter(r.verdict for r in self.of(p.name)))}
                for p in self.peers
            ],
            "rows": [row_dict(r) for r in self.rows],
        }

    def page(self) -> str:
        from .page import render

        return render([r.report for r in self.rows if r.report], title="other people's attention")


def row_dict(row: PeerRow) -> dict[str, Any]:
    """One row of the JSON above."""
    return {
        "target": row.peer,
        "options": row.options.as_dict(),
        "verdict": row.verdict,
        "moved": moved(row),
        "error": row.error,
        "refused": row.refused,
        "gradients": row.gradients,
        "report": row.report.to_dict() if row.report else None,
    }


def describe(peer: Peer, missing: str | None) -> dict[str, Any]:
    return {
        "name": peer.name,
        "version": peer.version,
        "about": peer.about,
        "caution": peer.caution or None,
        "available": missing is None,
        "reason": missing,
    }


def listing(peers: Sequence[Peer]) -> list[dict[str, Any]]:
    """Every peer, with what can be asked of it or why it cannot be had here."""
    out = []
    for peer in peers:
        found = peer.find()
        line = describe(peer, found if isinstance(found, str) else None) | {
            "on_request": peer.on_request,
            "asked": None,
        }
        if not isinstance(found, str):
            every = found[1].combinations()
            axes = [list(dict.fromkeys(words)) for words in zip(*(o.words() for o in every))]
            line["asked"] = ", ".join("|".join(values) for values in axes) + f": {len(every)} sets"
        out.append(line)
    return out


def listing_table(peers: Sequence[Peer]) -> Any:
    from rich.markup import escape
    from rich.table import Table

    table = Table("target", "version", "what it is", "what is swept, or why not", box=None, padding=(0, 2, 0, 0))
    for line in listing(peers):
        what = line["asked"] or f"not available here: {line['reason']}"
        about = ". ".join(part for part in (line["about"], line["caution"]) if part)
        name = line["name"] + (" (by name only)" if line["on_request"] else "")
        table.add_row(escape(name), line["version"] or "-", escape(about), escape(what))
    return table


def audit_peers(
    peers: Sequence[Peer | str],
    *,
    effort: str = "brief",
    seconds: float = 600.0,
    head_dim: int | None = None,
    seed: int = 0,
    device: str = "cpu",
    progress: Callable[[int, int, str], None] | None = None,
) -> PeerAudit:
    """Sweep every peer's option sets. A peer is a ``Peer``, or a name, a family or "all" as on the command line, or
    "module:function"; ``seconds`` bounds each. ``progress``: (sets done, sets in all, what next).
    """
    from . import peer_modules
    from .loading import load_function

    start, chosen = time.monotonic(), list[Peer]()
    for item in peers:
        known = peer_modules.peers() if isinstance(item, str) else []
        load = lambda text: peer_modules.load(text, find=load_function)  # noqa: E731
        chosen += choose([item], known, load) if isinstance(item, str) else [item]
    result = PeerAudit(chosen)
    for peer in chosen:
        found = peer.find()
        if isinstance(found, str):
            result.missing[peer.name] = found
            continue
        result.rows += audit_peer(
            peer, effort=effort, seconds=seconds, head_dim=head_dim, seed=seed, device=device, progress=progress
        )
    result.seconds = time.monotonic() - start
    return result
