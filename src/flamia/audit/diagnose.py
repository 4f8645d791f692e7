"""What a leak looks like from outside: who carries it, how far it reaches, and what its groups are.

The judge says *that* earlier rows moved. Four more questions can be put to a callable whose inside nobody knows.

* *Which operand?* Experiments that disturb one operand alone name the carriers of each tensor.
* *Values or magnitudes?* Negating the later tokens keeps every amax. Rows that move under a spike and not under a
  negation read a scale; rows that move under both read values (a mean, a filter, a lost mask).
* *How little shows it?* The same tokens times 1 + 2^-7, 2, 4 ... 2^20: a mask that lets something through shows at the
  first, a power-of-two scale not before its exponent moves.
* *Which groups?* Disturbing one token j at a time gives a map: the earlier rows that it moves. Members of one
  group move together, so the first moved row is the group's first, and the group size whose starts fit best is the
  group. The watched document starts at an unaligned offset, so groups counted by document
  and groups counted by buffer address give different maps.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from .contract import OPERANDS, SIDE, TENSORS
from .judge import Finding, Judge, differs
from .probes import GROUPS
from .targets import Refused


@dataclass(frozen=True)
class Map:
    """Rows of ``tensor`` moved by disturbing single tokens of ``operand``: ``columns[j]`` are the positions moved by
    position j (j itself left out).
    """

    tensor: str
    operand: str
    disturbance: str
    tone: str
    length: int
    offset: int
    columns: dict[int, tuple[int, ...]]
    elsewhere: dict[int, int]  # rows moved in other documents

    def earlier(self, j: int) -> list[int]:
        return [i for i in self.columns[j] if i < j]


CHANNELS = {
    "scale": "magnitudes cross: something is rounded under a scale that other tokens share",
    "statistic": "values cross, of one operand: a mean, a filter, an order or a choice over tokens",
    "mask": "keys and values cross: rows attend to what they must not see",
    "other document": "documents read one another",
    "length": "no contents cross: a length, padding or the place in the buffer decides bits",
}
FACTORS = (1 + 2.0**-7, 1.125, 2.0, 4.0, 16.0, 64.0, 2.0**12, 2.0**20)


@dataclass(frozen=True)
class Diagnosis:
    """Facts in words, and the map that they were read from."""

    carriers: dict[str, list[str]]
    sentences: list[str] = field(default_factory=list)
    group: int | None = None
    alignment: str | None = None  # "document", "address" or None
    reach: str | None = None  # "group", "document", "call", "lookahead"
    map: Map | None = None
    channel: str | None = None  # one of CHANNELS
    smallest: str | None = None  # the smallest disturbance of those tried that shows it


def carriers(findings: list[Finding], contracts: frozenset[str]) -> dict[str, list[str]]:
    """Per tensor, the operands whose disturbance alone moved it against one of the contracts."""
    out: dict[str, list[str]] = {}
    leaks = [f for f in findings if f.kind == "leak" and f.contract in contracts and f.operand != "layout"]
    for tensor in TENSORS:
        single = [o for o in OPERANDS if any(f.tensor == tensor and f.operand == o for f in leaks)]
        if single:
            out[tensor] = single
        elif any(f.tensor == tensor for f in leaks):
            out[tensor] = ["all"]
    return out


def dependency_map(judge: Judge, lead: Finding, positions: list[int]) -> Map | None:
    """Disturb the tokens at ``positions`` one at a time, in the way of ``lead``."""
    # A map needs rows that have something to lose; the lead's own tone and disturbance are known to show it.
    packing = judge.book.settings.packing
    columns, elsewhere, side = {}, {}, SIDE[lead.tensor]
    where, at = packing.document_of(side), packing.position_of(side)
    try:
        before = judge.base(judge.book.base(lead.tone))[lead.tensor]
        for j in positions:
            changed = judge.book.disturbed(
                lead.tone, lead.operand, packing.both(lead.document, j, j + 1), lead.disturbance
            )
            moved = differs(before, judge.target.run(changed)[lead.tensor]).nonzero().flatten()
            mine = at[moved[where[moved] == lead.document]]
            columns[j] = tuple(p for p in mine.tolist() if p != j and p >= 0)
            elsewhere[j] = int((where[moved] != lead.document).sum())
    except Refused:
        return None
    return Map(
        lead.tensor,
        lead.operand,
        lead.disturbance,
        lead.tone,
        packing.lengths[lead.document],
        packing.start(lead.document),
        columns,
        elsewhere,
    )


def positions_for(length: int, dense: bool) -> list[int]:
    """Both sides of every candidate edge, and a grid in between."""
    edges = {g * n + d for g in GROUPS for n in range(1, length // g + 1) for d in (-1, 0, 1)} if dense else set()
    grid = set(range(5, length, 5 if dense else 9)) | {length - 1, 15, 16, 31, 32, 33, 63, 64}
    return sorted(p for p in edges | grid if 0 < p < length)


def read_groups(m: Map) -> tuple[str | None, int | None, str | None, bool]:
    """(reach, group size, alignment, whether a larger size fits as well) from the first row that each token moves."""
    firsts = {j: m.earlier(j)[0] for j in m.columns if m.earlier(j)}
    if not firsts:
        return None, None, None, False
    spans = [j - first for j, first in firsts.items()]
    # The same distance wherever the token stands: no group, but a mask that lets so many tokens through.
    if len(spans) > 3 and spans.count(max(spans)) > len(spans) / 2:
        return "lookahead", max(spans), None, False
    # Row 0 sees one key, so it cannot tell what that key's logit is: a group may seem to begin one row late there.
    if all(first <= 2 for first in firsts.values()) and len(firsts) > 0.8 * len([j for j in m.columns if j > 2]):
        return ("call" if any(m.elsewhere.values()) else "document"), None, None, False
    fits = []
    for size in {*GROUPS, *range(2, 129)}:
        for alignment, phase in (("document", 0), ("address", m.offset % size)):
            late = [first - max((j + phase) // size * size - phase, 0) for j, first in firsts.items()]
            # Containment alone would accept any size that is large: the rows near a group's start must really move.
            if min(late) >= 0 and sum(n <= 2 for n in late) > len(late) / 2:
                fits.append((sum(late), size not in GROUPS, size, alignment))
    if fits:
        late_rows, _, size, alignment = min(fits)
        more = any(f[0] == late_rows and f[2] in GROUPS and f[2] > size and f[3] == alignment for f in fits)
        return "group", size, alignment, more
    return None, None, None, False


def diagnose(judge: Judge, claims: frozenset[str], dense: bool) -> Diagnosis:
    """Explain the leaks on record. The gradients of keys and values are mentioned only where somebody owes them."""
    leaks = [f for f in judge.findings if f.kind == "leak"]
    asked = frozenset({"prefix", "document"} | (claims & {"mask"}))
    carry = carriers(leaks, asked)
    said = [
        f"{tensor} is moved by "
        + (" and by ".join(names) if names != ["all"] else "several operands at once (one alone was not seen to)")
        for tensor, names in carry.items()
    ]
    watched = judge.book.settings.watched
    inside = [f for f in leaks if f.contract in asked - {"document"} and f.operand != "layout"]
    content = [f for f in inside if f.document == watched and not f.scene]
    outside = [f for f in leaks if f.contract == "document"]
    if not content or not judge.stable:
        if outside:
            said.append("documents read one another: " + _sizes(outside))
            return Diagnosis(carry, said, reach="call", channel="other document")
        elif inside and not content:
            f = max(inside, key=lambda f: f.largest)
            said.append(f"position {f.first} reads what comes after it, seen from a cut at {f.cut} in " + _where(f))
        elif not content and any(
            f.contract == "offset" or (f.contract == "truncate" and judge.book.settings.right == 0) for f in leaks
        ):
            said.append(
                "no content crosses at equal lengths; the length or the place in the buffer itself decides bits"
            )
            return Diagnosis(carry, said, channel="length")
        return Diagnosis(carry, said)
    # The lead: a single operand if one leaks alone, then the experiment that moved the most rows.
    lead = max(
        content,
        key=lambda f: (
            f.contract == "prefix",
            f.operand != "all",
            # O is linear in v: negating v keeps every amax on the way. On the way to dQ it does not: E moves, D does not.
            (f.tensor, f.operand) == ("O", "v"),
            f.operand in ("v", "do"),
            f.disturbance in ("spike", "one", "redraw"),
            f.rows,
        ),
    )
    m = dependency_map(judge, lead, positions_for(judge.book.settings.lengths[lead.document], dense))
    values = _moves(judge, lead, "negate")
    if values is not None:
        said.append(VALUES if values else MAGNITUDES)
    smallest = _smallest(judge, lead)
    if smallest:
        said.append(f"the smallest change of those tokens that shows it, of those tried: {smallest}")
    reach, group, alignment, more = read_groups(m) if m else (None, None, None, False)
    if reach == "group":
        said.append(
            f"tokens share something in groups of {group}{' or more' if more else ''}, counted from the start of the "
            + {"address": "buffer"}.get(str(alignment), "document")
        )
    elif reach == "lookahead":
        said.append(f"rows read {group} token{'s' if group != 1 else ''} ahead")
        group = None
    elif reach == "document":
        said.append(
            "every later token moves rows from the document's first on: shared by the whole document, or a larger group"
        )
    elif reach == "call":
        said.append("one token moves rows from the first on, in other documents too: shared by the whole call")
    behind = _behind(m, judge.book.settings.left)
    said += behind
    said.append("it crosses documents" if outside else "it stays inside the document")
    channel = None
    if values is False:
        channel = "scale"
    elif behind or reach == "lookahead" or {"k", "v"} <= set(carry.get("O", ())):
        channel = "mask"
    elif lead.operand != "all":
        channel = "statistic"
    if channel:
        said.append(f"channel: {channel} ({CHANNELS[channel]})")
    return Diagnosis(carry, said, group, alignment, reach, m, channel, smallest)


def _behind(m: Map | None, left: int | None) -> list[str]:
    """Rows behind a token that should no longer see it."""
    if m is None or left is None:
        return []
    far = max((i - j for j, moved in m.columns.items() for i in moved), default=0)
    return [f"rows up to {far} positions behind a token read it, and the window ends at {left}"] if far > left else []


def _where(f: Finding) -> str:
    return f.scene or f"document {f.where}"


def _sizes(found: list[Finding]) -> str:
    worst = max(found, key=lambda f: f.largest)
    return f"{worst.tensor} of document {worst.where} moves with document {worst.document}, in {worst.rows} rows"


VALUES = "negating the tokens, which keeps every amax, moves rows too: values cross, not only magnitudes"
MAGNITUDES = "negating the tokens moves nothing: what crosses is a magnitude, as a shared scale does"


def _moves(judge: Judge, lead: Finding, how: str) -> bool | None:
    """Does another disturbance of the same tokens move what the lead moved? None: nobody can tell."""
    if lead.cut is None or lead.operand == "layout":
        return None
    stop = None if lead.contract == "prefix" else lead.cut + 3
    e = judge.book.change(lead.tone, lead.operand, how, lead.document, lead.cut, stop)
    try:
        base, changed = judge.base(e.base), judge.target.run(e.changed)
    except Refused:
        return None
    checks = [c for c in e.checks if (c.contract, c.tensor) == (lead.contract, lead.tensor)]
    if not checks:
        return None
    return any(bool(differs(base[c.tensor][c.rows], changed[c.tensor][c.into]).any()) for c in checks)


def _smallest(judge: Judge, lead: Finding) -> str | None:
    for factor in FACTORS:
        if _moves(judge, lead, f"times {factor:g}"):
            return f"{lead.operand} times {factor:g} from position {lead.cut}"
    return None if lead.cut is None else f"none of its multiples up to 2^20, but {lead.disturbance} of {lead.operand}"


def heat(m: Map) -> torch.Tensor:
    """(length, columns): 1 where the n-th disturbed token moves an earlier row, .25 where a later one, as it may."""
    out = torch.zeros(m.length, len(m.columns))
    for n, (j, moved) in enumerate(m.columns.items()):
        for i in moved:
            out[i, n] = 1.0 if i < j else 0.25
    return out
