"""Other people's attention under audit, with every set of options that it takes and not the default call alone.

A kernel is tested in the way its authors call it. Faults live beside that: a mask that is lost once the LSE is asked
for, a packing that is dropped when a window is set, a window that one dtype ignores. So a *peer* says what it can be
asked (``Axes``: packing, mask, window, grouped heads, unequal lengths, LSE, determinism, dtype), and ``audit_peers`` sweeps the
product. What the peer refuses is listed with its own words; a refusal is honest and costs nothing. Where gradients are
refused, O is audited alone and the row says so.

Isolation alone can be cheated: an attention that returns zeros leaks nothing. Each option set is therefore compared
once with float64 attention under the mask that was asked for, and an O that is somebody else's leaves the verdict
undecided. And where a window is asked for, the ``mask`` contract counts, since a window that is not applied is
nothing but rows that read what they must not see.

The first option set of every packing and dtype gets the whole effort, the others a smaller one. Time is bounded by
``seconds`` for each peer; what did not fit is listed as not run, and the verdict of such a peer is never "clean".
``peer_calls`` has the adapters, ``peer_report`` the table.
"""

from __future__ import annotations

import importlib.metadata
import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from .auditor import audit_callable
from .contract import CAUSAL_ONLY, DEFAULT_CLAIMS, sides, visible
from .controls import attend
from .efforts import settings_for
from .probes import Book, Settings
from .report import Report
from .targets import Inputs, Refused, Target

# Relative error against float64 attention beyond which O is not the attention that was asked for. Four bits reach .2.
FOREIGN = 0.5
# What goes without saying in the words for an option set.
UNSAID = ("no window", "equal lengths", "no LSE", "default")
SHORT = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.float64: "fp64"}


@dataclass(frozen=True)
class Options:
    """One way of asking. ``packing`` names how documents reach the peer: "batched" rows, its own "packed" entry, a
    "loop" over documents, or one block "mask".
    """

    packing: str = "packed"
    causal: bool = True
    windowed: bool = False
    grouped: bool = True
    cross: bool = False  # other numbers of queries than of keys
    lse: bool = False
    deterministic: bool = False
    dtype: torch.dtype = torch.bfloat16

    @property
    def layout(self) -> str:
        return "batched" if self.packing == "batched" else "packed"

    @property
    def heads(self) -> tuple[int, int]:
        return (4, 2) if self.grouped else (2, 2)

    @property
    def window(self) -> tuple[int, int] | None:
        return None if not self.windowed else (40, 0) if self.causal else (40, 24)

    @property
    def reach(self) -> tuple[int | None, int | None]:
        """(left, right), None = open: the mask in two numbers."""
        return sides(self.causal, self.window)

    def words(self) -> tuple[str, ...]:
        """One word for each axis, in the order of the fields."""
        return (
            self.packing,
            "causal" if self.causal else "full",
            "window" if self.windowed else "no window",
            "GQA" if self.grouped else "MHA",
            "cross" if self.cross else "equal lengths",
            "LSE" if self.lse else "no LSE",
            "deterministic" if self.deterministic else "default",
            SHORT.get(self.dtype, str(self.dtype)),
        )

    def __str__(self) -> str:
        return " ".join(word for word in self.words() if word not in UNSAID)

    def as_dict(self) -> dict[str, Any]:
        out: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(self)}
        return out | {"dtype": SHORT.get(self.dtype, str(self.dtype)), "window": self.window, "heads": list(self.heads)}


@dataclass(frozen=True)
class Axes:
    """What a peer can be asked; the first value of each is its ordinary call."""

    packing: tuple[str, ...] = ("packed", "batched")
    causal: tuple[bool, ...] = (True, False)
    windowed: tuple[bool, ...] = (False, True)
    grouped: tuple[bool, ...] = (True, False)
    cross: tuple[bool, ...] = (False,)
    lse: tuple[bool, ...] = (False,)
    deterministic: tuple[bool, ...] = (False,)
    dtype: tuple[torch.dtype, ...] = (torch.bfloat16, torch.float16, torch.float32)

    def combinations(self) -> list[Options]:
        """The whole product, ordinary calls first, so that a budget cuts the exotic ones."""
        names = [f.name for f in fields(self)]
        values = [getattr(self, name) for name in names]
        indexed = itertools.product(*(range(len(v)) for v in values))
        ordered = sorted(indexed, key=lambda i: (sum(map(bool, i)), i))
        return [Options(**{n: v[k] for n, v, k in zip(names, values, i)}) for i in ordered]


# None for "batched", one tensor of offsets, or one of the queries' and one of the keys'.
Offsets = Tensor | tuple[Tensor, Tensor] | None
Call = Callable[[Tensor, Tensor, Tensor, Any, Options], Any]  # q, k, v, Offsets, options


@dataclass(frozen=True)
class Peer:
    """Somebody's attention. ``build`` imports it and returns the call and its axes, or raises, in its own words, why it
    is not to be had here.
    """

    name: str
    about: str
    build: Callable[[], tuple[Call, Axes]]
    distribution: str = "torch"
    head_dim: int = 32
    caution: str = ""  # "never run: ..." where nobody has run the adapter, or what must be known about how it ran
    on_request: bool = False  # left out of families and "all"
    square: bool = False  # its memory grows with the square of the length
    promises: Callable[[Options], frozenset[str]] | None = None  # None: the default contracts

    @property
    def version(self) -> str | None:
        try:
            return importlib.metadata.version(self.distribution)
        except importlib.metadata.PackageNotFoundError:
            return None

    def claims(self, options: Options) -> frozenset[str]:
        chosen = self.promises(options) if self.promises else DEFAULT_CLAIMS
        chosen |= {"mask"} if options.windowed and not self.promises else frozenset()
        return chosen if options.causal else chosen - CAUSAL_ONLY

    def find(self) -> tuple[Call, Axes] | str:
        """The call and its axes, or why there is none here."""
        try:
            return self.build()
        except Exception as error:
            return own_words(error)


def own_words(error: BaseException) -> str:
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0][:300] if text else 'no message'}"


@dataclass(frozen=True)
class PeerRow:
    """One option set of one peer: a report, or the words with which it was refused, or neither when time ran out."""

    peer: str
    options: Options
    report: Report | None = None
    refused: str | None = None
    gradients: str | None = None  # why there are none
    error: float | None = None  # relative, of O against float64 attention

    @property
    def verdict(self) -> str:
        """ "clean", "leak", "undecided", "refused" or "not run"."""
        if self.report is None:
            return "not run" if self.refused is None else "refused"
        if self.report.verdict == "clean" and self.foreign:
            return "undecided"
        return self.report.verdict

    @property
    def foreign(self) -> bool:
        return self.error is not None and not self.error <= FOREIGN


@contextmanager
def determinism(wanted: bool) -> Iterator[None]:
    """Ask torch for deterministic algorithms, backward included, which is how its own attention is told."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(wanted)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def probe(fn: Callable[..., Any], options: Options, head_dim: int, effort: str, seed: int, device: str) -> PeerRow:
    """Does the peer take these options, with gradients or without, and is its O the attention that was asked for?"""
    settings = settings_for(effort, options.layout, options.dtype, options.reach, None, None, seed, options.cross)
    words: list[str] = []
    for backward in ("autograd", None):
        target = Target(
            fn, layout=options.layout, backward=backward, heads=options.heads, head_dim=head_dim, dtype=options.dtype,
            device=device,
        )  # fmt: skip
        for lengths in packings(settings):
            trial = settings.with_lengths(lengths)
            base = Book(trial, options.heads, head_dim).base("plain")
            try:
                got = target.run(base)["O"].double()
            except Refused as refusal:
                said = str(refusal)
            except Exception as error:  # what a stranger's code may raise
                said = own_words(error)
            else:
                size = difference(got, base, options.reach)
                lost = next((note for note in target.notes if note.startswith("gradients: ")), None)
                return PeerRow("", options, gradients=lost if backward else words[0], error=size)
        words.append(said)  # about the plainest packing
    same = words[0] == words[1]
    return PeerRow("", options, refused=words[0] if same else f"{words[0]}; without gradients: {words[1]}")


def packings(settings: Settings) -> list[tuple[int, ...]]:
    """From the most demanding to the plainest: with an empty document, without, multiples of 128."""
    if settings.layout == "batched":
        return [settings.lengths, (384, 384)]
    return [settings.lengths, tuple(n for n in settings.lengths if n), (128, 384, 128)]


def difference(out: Tensor, inputs: Inputs, reach: tuple[int | None, int | None]) -> float:
    """Relative error of O against float64 attention under the mask that was asked for."""
    q, k, v = (x.double() for x in (inputs.q, inputs.k, inputs.v))
    cu = torch.tensor(inputs.packing.offsets)
    exact = attend(q, k, v, cu, seen=visible(inputs.packing, *reach))
    return float((out - exact).norm() / exact.norm())


def audit_peer(
    peer: Peer,
    *,
    effort: str = "brief",
    seconds: float = 600.0,
    head_dim: int | None = None,
    seed: int = 0,
    device: str = "cpu",
    progress: Callable[[int, int, str], None] | None = None,
) -> Iterator[PeerRow]:
    """Every option set of one peer, ordinary ones first. A peer that cannot be had yields nothing: see ``find``."""
    found = peer.find()
    if isinstance(found, str):
        return
    call, axes = found
    start, deep = time.monotonic(), set()
    combinations = axes.combinations()
    for n, options in enumerate(combinations):
        if progress:
            progress(n, len(combinations), f"{peer.name} {options}")
        if time.monotonic() - start > seconds:
            yield PeerRow(peer.name, options)
            continue
        depth = lesser(effort) if (options.packing, options.dtype) in deep else effort
        with determinism(options.deterministic):
            row = audit_options(peer, call, options, depth, head_dim or peer.head_dim, seed, device)
        if row.report:
            deep.add((options.packing, options.dtype))
        yield row
    if progress:
        progress(len(combinations), len(combinations), peer.name)


def audit_options(
    peer: Peer, call: Call, options: Options, effort: str, head_dim: int, seed: int, device: str
) -> PeerRow:
    """One option set: tried, and audited if it is taken."""

    def fn(q: Tensor, k: Tensor, v: Tensor, *cu: Tensor) -> Any:
        return call(q, k, v, cu if len(cu) > 1 else cu[0] if cu else None, options)

    row = replace(probe(fn, options, head_dim, effort, seed, device), peer=peer.name)
    if row.refused is not None:
        return row
    try:
        report = audit_callable(
            fn, layout=options.layout, causal=options.causal, window=options.window, heads=options.heads,
            head_dim=head_dim, dtype=options.dtype, claims=peer.claims(options), effort=effort, seed=seed,
            device=device, backward=None if row.gradients else "autograd", name=f"{peer.name} {options}",
            explain=effort != "spot", cross=options.cross,
        )  # fmt: skip
    except Exception as error:  # one peer's crash must not cost the others their verdict
        return replace(row, refused=f"raised under audit: {own_words(error)}")
    return replace(row, report=report)


def lesser(effort: str) -> str:
    """What the further option sets of a packing and dtype get: enough to catch every control."""
    return "brief" if effort in ("normal", "thorough") else "spot"


def choose(targets: Sequence[str], peers: Iterable[Peer], load: Callable[[str], Peer]) -> list[Peer]:
    """Peers by name, by family (what stands before the colon) or "all"; anything else with a colon is handed to
    ``load``.
    """
    known = {peer.name: peer for peer in peers}
    chosen: dict[str, Peer] = {}
    for text in targets:
        usual = [p for p in known.values() if not p.on_request]
        family = [p for p in usual if text == "all" or p.name.partition(":")[0] == text]
        if text in known:
            family = [known[text]]
        if not family:
            if ":" not in text:
                families = sorted({name.partition(":")[0] for name in known})
                raise ValueError(
                    f"target = {text!r}: neither a target nor a family of them. Families are {', '.join(families)}; "
                    'see --list-targets, or write module:function, or "all"'
                )
            family = [load(text)]
        chosen |= {peer.name: peer for peer in family}
    return list(chosen.values())
