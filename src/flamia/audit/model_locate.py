"""Where in a model a leak enters, what carries it, which other layers have it, and how large its groups are.

Every probe that moved earlier logits is run again under a ``Trace``; the origin is the earliest module, in the order
of execution, that was given what it had before and answered otherwise. Then three questions to the origin alone. *What
carries it*: each of its children is disturbed by itself; those that move earlier logits feed the leak (``v_proj``,
say, and not ``q_proj``). *Which other layers*: the same child of each module of the same class is disturbed; layers
before it are then untouched, so a leak in the first layer does not hide one in the third. *Which groups*: one position
at a time, read as in ``diagnose``.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor, nn

from .diagnose import Map, positions_for, read_groups
from .model_judge import ModelJudge, Probe
from .model_report import Location
from .probes import GROUPS
from .targets import Refused
from .trace import Move, Trace, first_moves

MOST = 64  # layers that are looked into one by one


class Looker:
    """Runs probes under a trace; the undisturbed traces are kept."""

    def __init__(self, judge: ModelJudge, module: nn.Module) -> None:
        self.judge, self.module = judge, module
        self._base: dict[int, Trace] = {}

    def _trace(self, tokens: Tensor, cut: int) -> Trace:
        with Trace(self.module, len(tokens), tokens.shape[1], cut) as trace:
            self.judge.target.logits(tokens)
        return trace

    @property
    def first(self) -> Trace:
        """Any undisturbed trace: which modules were called."""
        return next(iter(self._base.values()))

    def look(self, probe: Probe) -> tuple[Move | None, Move | None, int]:
        """First module to show it, first to cause it, and when that one completed."""
        cut = probe.cut or self.judge.tokens.shape[1]
        if cut not in self._base:
            self._base[cut] = self._trace(self.judge.tokens, cut)
        base = self._base[cut]
        with probe.hooks(self.module):  # first, so that digests see what the disturbance left
            changed = self._trace(probe.tokens, cut)
        shown, origin = first_moves(base, changed, probe.row, probe.cut)
        order = [e.module for e in base.events]
        found = origin or shown
        return shown, origin, order.index(found.module) if found else len(order)

    def at(self, origin: str, name: str, cut: int, stop: int | None = None) -> Move | None:
        """What ``origin`` does when the output of module ``name`` alone is disturbed, or its own input if that is its
        name; None if no leak enters there.
        """
        probe = self.judge.spiked(name.rpartition(".")[2], [name], cut, stop=stop)
        probe = replace(probe, given=name == origin)
        try:
            found = self.look(probe)[1]
        except Refused:
            return None
        return found if found is not None and found.module == origin else None


def locate(judge: ModelJudge) -> Location:
    """Look into a module whose logits moved at equal shape; empty where there is no module to look into."""
    module = judge.target.module
    if module is None or not judge.probes:
        return Location()
    if not judge.stable:
        return Location(sentences=["not repeatable, so no module can be named bit for bit"])
    out = Location()
    if all(p.operand != "tokens" for p in judge.probes):
        out.sentences.append("no change of tokens moved earlier logits here; changes of what modules give did")
    leads: dict[str, Probe] = {}
    for probe in judge.probes:
        leads.setdefault(probe.operand, probe)
    looker = Looker(judge, module)
    try:
        out.shown_by, out.origin, _ = min((looker.look(p) for p in leads.values()), key=lambda m: m[2])
    except Refused as refusal:
        out.sentences.append(f"the model refused to be looked into: {refusal}")
        return out
    shown, origin = out.shown_by, out.origin
    if shown is None:
        out.sentences.append(
            "no module's output moved although logits did: it happens outside the modules, or where positions cannot "
            "be told from shapes"
        )
        return out
    if origin is None:
        out.sentences.append(
            f"the first module whose output moved is {shown.name}, {_where(shown)}; what it was given had moved already"
        )
        return out
    said = f"it enters in {origin.name}: given what it had before, it answers otherwise, {_where(origin)}"
    if shown.module != origin.module:
        said += f"; the first output to show it is that of {shown.name}, which was handed it"
    out.sentences.append(said)
    cut = next((p.cut for p in judge.probes if p.cut), judge.tokens.shape[1] // 2)
    _carriers(looker, origin, cut, out)
    if origin.module:
        _affected(looker, origin, cut, out)
        _groups(looker, origin, out)
    return out


def _where(move: Move) -> str:
    return f"first at position {move.positions[0]}" if move.positions else "in other sequences only"


def _carriers(looker: Looker, origin: Move, cut: int, out: Location) -> None:
    leaves = [n for names in looker.judge.groups.values() for n in names]
    inside = [n for n in leaves if n.startswith(origin.module + ".")] if origin.module else []
    if not inside or len(inside) > MOST:
        return
    out.carriers = [name for name in inside if looker.at(origin.module, name, cut)]
    short = [n.removeprefix(origin.module + ".") for n in out.carriers]
    rest = [n.removeprefix(origin.module + ".") for n in inside if n not in out.carriers]
    if out.carriers:
        other = f"; not by {' or '.join(rest)}" if rest else ""
        out.sentences.append(f"carried by {' and by '.join(short)}{other}")


def _affected(looker: Looker, origin: Move, cut: int, out: Location) -> None:
    """Modules of the origin's class that leak when their own child, or without one their input, is disturbed."""
    module = looker.module
    kind = type(module.get_submodule(origin.module))
    children = [c.removeprefix(origin.module) for c in out.carriers] or [""]
    there = {e.module for e in looker.first.events}
    alike = [n for n, m in module.named_modules() if type(m) is kind and n + children[0] in there]
    if len(alike) > MOST:
        out.sentences.append(f"{len(alike)} modules of this class were not looked into one by one")
    if not 1 < len(alike) <= MOST:
        return
    out.affected = [n for n in alike if any(n + c in there and looker.at(n, n + c, cut) for c in children)]
    if len(out.affected) == len(alike):
        out.sentences.append(f"all {len(alike)} {origin.kind} modules leak")
    else:
        names = ", ".join(out.affected)
        out.sentences.append(f"{len(out.affected)} of {len(alike)} {origin.kind} modules leak: {names}")


def _groups(looker: Looker, origin: Move, out: Location) -> None:
    """Disturb one position of the first carrier at a time; the first row that each moves tells the group."""
    length = looker.judge.tokens.shape[1]
    carrier = out.carriers[0] if out.carriers else origin.module
    columns, elsewhere = {}, {}
    for j in positions_for(length, False):
        found = looker.at(origin.module, carrier, j, j + 1)
        columns[j] = found.positions if found else ()
        elsewhere[j] = found.elsewhere if found else 0
    firsts = {j: moved[0] for j, moved in columns.items() if moved}
    if len(firsts) == 1:
        out.sentences.append(f"of the {len(columns)} positions tried, {next(iter(firsts))} alone moves earlier ones")
    if len(firsts) < 2:
        return
    start = looker.judge.watched * length
    out.map = Map(origin.name, carrier, "louder output", "", length, start, columns, elsewhere)
    reach, group, alignment, more = read_groups(out.map)
    if reach == "group" and (group in GROUPS or len(set(firsts.values())) > 2):  # odd sizes fit by chance
        out.group = group
        origin_of = "the flattened batch" if alignment == "address" else "the sequence"
        out.sentences.append(
            f"positions share something in groups of {group}{' or more' if more else ''}, counted from the start of "
            f"{origin_of}"
        )
    elif reach == "lookahead":
        out.sentences.append(f"rows read {group} position{'s' if group != 1 else ''} ahead")
    elif reach in ("document", "call"):
        whole = "call" if reach == "call" else "sequence"
        out.sentences.append(f"every later position moves rows from the first on: shared by the whole {whole}")
