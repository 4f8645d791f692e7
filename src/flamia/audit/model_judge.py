"""What a difference between two calls of a language model means.

Two calls of one shape whose tokens agree before a cut owe
each other the same logits before the cut, *bit for bit*: nothing but the later tokens can have moved them. Besides
tokens, outputs of modules are disturbed at later positions (see ``trace``), which shows shared scales that tokens alone
pass over. Only the logits are judged; what moves inside and does not reach them is a note.

Calls of another shape (shorter, without the rest of the batch, in chunks or token by token through a cache) cannot be
held to bits: libraries choose the order of their sums by shape. They are held to *rounding*, and how much that is in
this model is measured: every entry that a module without children gives is moved by one unit in the last place, in all
layers at once, and what this does to a row of logits is the room. (A model of which nothing but the callable is known
has only a guess; what lies between that guess and a tenth of the row is called undecided.) As in ``judge``, a small
difference between shapes is innocent only if contents move nothing at equal shape.

The full call is what training sees, so more than rounding under ``chunked`` or ``decode`` is train/serve skew: verdict
``skew``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn

from .judge import ABOVE_NOISE, change_size, differs
from .model_report import SERVED, SHAPES, ModelControl, ModelFinding
from .model_target import ModelTarget
from .targets import Refused
from .trace import PLANTED_GROUP, Trace, altered, groups_of, nudged, planted, times

EFFORTS = ("spot", "brief", "quick", "normal", "thorough")
HOWS = {"spot": ("redraw",), "brief": ("redraw", "one token")}
SHORTER = {"spot": (33,), "brief": (33, 64), "quick": (1, 31, 33, 64, 100, 129)}
DECODED = {"spot": 4, "brief": 8, "quick": 16, "normal": 48, "thorough": 299}
CHUNKS = (7, 26, 1)  # and the rest in one
NOT_ROUNDING = 0.1  # of a row of logits, where the model's own rounding could not be measured


@dataclass(frozen=True, eq=False)
class Probe:
    """Disturb one sequence from a position on: its tokens, or (with ``names``) outputs of modules."""

    tokens: Tensor
    row: int
    cut: int
    operand: str
    text: str
    names: tuple[str, ...] = ()
    factor: float = 1.0
    stop: int | None = None
    given: bool = False  # disturb what the modules are given, not what they give

    def hooks(self, module: nn.Module | None) -> ExitStack:
        stack = ExitStack()
        if self.names and module is not None:
            batch, length = self.tokens.shape
            change = times(self.factor, batch, length, self.row, self.cut, self.stop or length)
            stack.enter_context(altered(module, self.names, change, self.given))
        return stack


class ModelJudge:
    """Runs probes on one model and keeps the record."""

    def __init__(self, target: ModelTarget, tokens: Tensor, effort: str) -> None:
        self.target, self.tokens, self.effort = target, tokens, effort
        self.base = target.logits(tokens)
        self.watched = len(tokens) - 1  # behind the others, so that groups by address differ from groups by position
        self.findings: list[ModelFinding] = []
        self.probes: list[Probe] = []  # those that moved logits, to be looked into
        self.tried: Counter[tuple[str, str]] = Counter()
        self.refusals: dict[str, str] = {}
        self.floor, self.stable = 0.0, True
        self.rounding: float | None = None
        floats = (
            [p.dtype for p in target.module.parameters() if p.is_floating_point()] if target.module is not None else []
        )
        self.dtype = max(floats or [self.base.dtype], key=lambda d: torch.finfo(d).eps)  # the coarsest there is
        info = torch.finfo(self.dtype)
        self.eps = info.eps
        # A sum of many terms in 32 bits: see judge.py.
        self.room = info.eps if info.bits <= 16 else 64 * info.eps
        self.groups: dict[str, list[str]] = {}
        if target.module is not None:
            with Trace(target.module, len(tokens), tokens.shape[1], tokens.shape[1]) as trace:
                target.logits(tokens)
            self.groups = groups_of(trace)

    @property
    def allowed(self) -> float:
        """What a call of another shape may move, relative to a row of logits: rounding, and noise where there is any."""
        return max(self.room, ABOVE_NOISE * self.floor)

    def compare(
        self, contract: str, operand: str, text: str, x: Tensor, y: Tensor, start: int = 0, cut: int | None = None
    ) -> bool:
        """Rows of logits (..., positions, V), the first at position ``start``; records a finding if they moved."""
        self.tried[contract, operand] += 1
        positions = torch.arange(start, start + x.shape[-2], device=x.device).expand(x.shape[:-1]).flatten()
        x, y = x.flatten(0, -2), y.flatten(0, -2)
        moved = differs(x, y)
        if not bool(moved.any()):
            return False
        sizes = change_size(x, y)[0]
        largest, beyond = float(sizes.max()), False
        if contract == "repeat":
            kind = "noise"
        elif contract not in SHAPES:
            kind = "leak" if self.stable or largest > ABOVE_NOISE * self.floor else "noise"
        elif largest <= self.allowed:
            kind = "rounding"
        elif self.rounding is None and largest <= NOT_ROUNDING:
            kind = "noise"
        else:
            kind = "skew" if contract in SERVED else "leak"
            moved, beyond = sizes > self.allowed, True  # the rows that tell something
        a, b = x[moved], y[moved]
        gap = (a.double() - b.double()).abs()
        self.findings.append(
            ModelFinding(
                contract,
                operand,
                text,
                cut,
                int(positions[moved].min()),
                int(moved.sum()),
                len(x),
                largest,
                float(gap.nan_to_num(torch.inf).max()),
                int((a.argmax(-1) != b.argmax(-1)).sum()),
                kind,
                beyond,
                tuple(positions[moved].unique().tolist()),
            )
        )
        return True

    def repeat(self, text: str) -> None:
        self._steady(text, self.base, self.target.logits(self.tokens))

    def _steady(self, text: str, x: Tensor, y: Tensor) -> None:
        if self.compare("repeat", "tokens", text, x, y):
            self.stable = False
            self.floor = max(self.floor, self.findings[-1].largest)

    def measure_rounding(self) -> None:
        """What one unit in the last place of every module's output does to the logits."""
        names = [name for members in self.groups.values() for name in members]
        if not names or self.target.module is None:
            self.room *= ABOVE_NOISE  # a guess, and so a generous one
            return
        for seed in (1, 2):
            with altered(self.target.module, names, nudged(self.eps, seed)):
                nudge = self.target.logits(self.tokens)
            found = change_size(self.base.flatten(0, 1), nudge.flatten(0, 1))[0].max()
            self.rounding = max(self.rounding or 0.0, float(found))
        self.room = max(self.room, self.rounding or 0.0)

    def run(self, probe: Probe) -> bool:
        """One probe: earlier rows of the disturbed sequence owe ``prefix``, all other sequences ``batch``."""
        try:
            with probe.hooks(self.target.module):
                out = self.target.logits(probe.tokens)
        except Refused as refusal:
            self.refusals.setdefault(probe.text, str(refusal))
            return False
        row, cut = probe.row, probe.cut
        if probe.names and not bool(out[row, cut:].isfinite().all()):
            # 0 * infinity crosses a mask in exact attention as well, so this would prove nothing.
            if probe.factor > 2:
                return self.run(
                    replace(probe, factor=2.0, text=probe.text.replace(f"times {probe.factor:g}", "times 2"))
                )
            self.refusals.setdefault(probe.text, "later logits were not finite any more")
            return False
        moved = False
        if cut:
            moved = self.compare("prefix", probe.operand, probe.text, self.base[row, :cut], out[row, :cut], 0, cut)
        others = [b for b in range(len(self.tokens)) if b != row]
        moved |= self.compare("batch", probe.operand, probe.text, self.base[others], out[others], 0, cut)
        if moved:
            self.probes.append(probe)
        return moved

    def redrawn(self, how: str, row: int, cut: int) -> Tensor:
        """Other tokens from a position on."""
        rng = torch.Generator().manual_seed(7919 + 31 * cut + row)
        tokens, size = self.tokens.clone(), self.target.vocabulary
        # Adding 1 .. size - 1 modulo the size changes every token.
        other = (tokens[row, cut:] + torch.randint(1, size, tokens[row, cut:].shape, generator=rng)) % size
        if how == "one token":
            other = other[:1].expand_as(other)
        elif how == "the next token":
            other = torch.cat([other[:1], tokens[row, cut + 1 :]])
        tokens[row, cut:] = other
        return tokens

    def probes_for(self, cuts: Sequence[int]) -> Iterator[Probe]:
        """Tokens first, then one group of modules after the other, in all layers at once."""
        watched = self.watched
        for cut in cuts:
            for how in HOWS.get(self.effort, ("redraw", "one token", "the next token")):
                tokens = self.redrawn(how, watched, cut)
                yield Probe(tokens, watched, cut, "tokens", f"{how} from position {cut}")
        yield Probe(self.redrawn("redraw", 0, 0), 0, 0, "tokens", "the first sequence of the batch redrawn")
        spikes = [self.spike] if EFFORTS.index(self.effort) < 3 else [self.spike, 2.0]
        for cut in cuts if EFFORTS.index(self.effort) > 1 else cuts[-1:]:
            for group, names in self.groups.items():
                for factor in spikes:
                    yield self.spiked(group, names, cut, factor)

    @property
    def spike(self) -> float:
        return 2.0**6 if self.dtype == torch.float16 else 2.0**12

    def spiked(
        self, group: str, names: Sequence[str], cut: int, factor: float | None = None, stop: int | None = None
    ) -> Probe:
        factor = factor or self.spike
        where = f"from position {cut}" if stop is None else f"at positions {cut}..{stop - 1}"
        text = f"output of {group if len(names) > 1 else names[0]} times {factor:g} {where}"
        return Probe(self.tokens, self.watched, cut, group, text, tuple(names), factor, stop)

    def shapes(self) -> None:
        """Shorter calls, and one sequence without the others."""
        length = self.tokens.shape[1]
        asked = {t for t in SHORTER.get(self.effort, range(1, length, 9)) if t < length}
        for t in sorted(asked or {length // 2 + 1}):
            self._other("truncate", f"cut at {t}", partial(self.target.logits, self.tokens[:, :t]))
        one = slice(self.watched, self.watched + 1)
        self._other("alone", "the last sequence alone", lambda: self.target.logits(self.tokens[one]), one)

    def serve(self) -> None:
        """Through the cache."""
        length = self.tokens.shape[1]
        sizes = [n for n in CHUNKS if n < length]
        chunks = [*sizes, length - sum(sizes)] if sum(sizes) < length else [1, length - 1]
        self._other("chunked", f"chunks of {', '.join(map(str, chunks))} tokens", lambda: self._served(chunks))
        single = min(DECODED[self.effort], length - 1)
        text = f"{length - single} tokens at once, then {single} one by one"
        self._other("decode", text, lambda: self._served([length - single] + [1] * single))

    def _served(self, sizes: list[int]) -> Tensor:
        return self.target.served(self.tokens, sizes)

    def _other(self, contract: str, text: str, call: Callable[[], Tensor], rows: slice = slice(None)) -> None:
        try:
            out = call()
        except Refused as refusal:
            self.refusals.setdefault(f"{contract}: {text}", str(refusal))
            return
        operand = "cache" if contract in SERVED else "shape"
        self.compare(contract, operand, text, self.base[rows, : out.shape[1]], out)

    def settle(self) -> None:
        """Last word on kinds: what repeats at the end have shown, and rounding as an excuse only if contents move
        nothing.
        """
        for probe in self.probes[:3]:  # before anybody is accused, both calls are made again
            self.repeat("the same call once more")
            try:
                with probe.hooks(self.target.module):
                    once, again = (self.target.logits(probe.tokens) for _ in range(2))
            except Refused:
                continue
            self._steady("the same call once more", once, again)
        content = any(f.kind == "leak" and f.contract not in SHAPES for f in self.findings)
        for n, f in enumerate(self.findings):
            if not self.stable and f.kind == "leak" and f.largest <= ABOVE_NOISE * self.floor:
                self.findings[n] = replace(f, kind="noise")
            elif f.kind == "rounding" and content and self.stable and f.contract in ("truncate", "alone"):
                self.findings[n] = replace(f, kind="leak")

    def controls(self, cuts: Sequence[int]) -> list[ModelControl]:
        """A leak planted into one module of each group (a few of them at low effort), under the same cuts; a callable
        is given tokens in which the first of every 32 reads the last.
        """
        if self.target.module is None or not self.groups:
            peeking = [
                self._peeking(self.tokens),
                *(self._peeking(self.redrawn("redraw", self.watched, c)) for c in cuts),
            ]
            base, *changed = (self.target.logits(t) for t in peeking)
            caught = any(
                bool(differs(base[self.watched, :c], x[self.watched, :c]).any()) for c, x in zip(cuts, changed)
            )
            return [ModelControl(f"tokens that read the last of their {PLANTED_GROUP}", caught)]
        names = [members[len(members) // 2] for members in self.groups.values()]
        if EFFORTS.index(self.effort) < 2:
            names = names[1:-1][:: max(1, len(names) // 2)] or names[:1]
        return [ModelControl(f"a scale over {PLANTED_GROUP} positions in {n}", self._seen(n, cuts)) for n in names]

    def _seen(self, name: str, cuts: Sequence[int]) -> bool:
        """Is a leak planted into one module seen in the logits?"""
        module = self.target.module
        assert module is not None
        plant = planted(*self.tokens.shape)
        try:
            with altered(module, [name], plant):
                base = self.target.logits(self.tokens)
            for cut in cuts:
                with self.spiked(name, [name], cut).hooks(module), altered(module, [name], plant):
                    changed = self.target.logits(self.tokens)
                if bool(differs(base[self.watched, :cut], changed[self.watched, :cut]).any()):
                    return True
        except Refused:
            pass
        return False

    def _peeking(self, tokens: Tensor) -> Tensor:
        tokens = tokens.clone()
        for g in range(0, tokens.shape[1], PLANTED_GROUP):
            tokens[:, g] = tokens[:, min(g + PLANTED_GROUP, tokens.shape[1]) - 1]
        return tokens
