"""One target of ``peers_run``, in a process of its own: a kernel that reads past a buffer takes its process with it, and
no other target's verdict.

The work is a list that the target's axes decide, in an order in which a budget cuts the exotic first: the ordinary call
at the whole effort for every head size, then the sums of the ``mass`` contract length by length, then every other option
set at "spot" for every head size, other dtypes last. Records go to a file, one JSON object a line, flushed: what is
begun is written down before it runs, so that whoever reads the file knows where a process ended that did not say so.

    {"kind": "target", "name", "version", "about", "words" (null, or why it cannot be had), "items", "head_dims"}
    {"kind": "begin", "item", "what", "at"}
    {"kind": "row", "item", "head_dim", "effort", "words", "alike", and a row of peer_report}
    {"kind": "mass", "item", "head_dim", "options", and the numbers of mass.Mass, or why the length was not asked}
    {"kind": "end", "why"}
"""

from __future__ import annotations

import faulthandler
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TextIO

import torch

from flamia import jsonable

from . import mass
from .loading import load_function
from .peer_modules import load, peers
from .peer_report import moved, row_dict
from .peers import SHORT, Axes, Call, Options, Peer, audit_options, determinism, own_words
from .targets import Target

LENGTHS = (1024, 4096, 16384, 65536, 131072)
SQUARE_LIMIT = 16384  # the longest for a target whose memory grows with the square: 131072 would be 64 GiB a head
FEW_HEADS = (2, 1)
FATAL = 3  # exit code after an error that leaves the device unusable for the process


@dataclass(frozen=True)
class Item:
    """An option set to audit, or a length whose sums to read."""

    head_dim: int
    options: Options
    effort: str = "spot"
    length: int | None = None

    def __str__(self) -> str:
        what = f"sums at {self.length} tokens" if self.length else f"{self.effort} {self.options}"
        return f"D {self.head_dim}: {what}"


def find(name: str) -> Peer:
    known = {peer.name: peer for peer in peers()}
    return known[name] if name in known else load(name, find=load_function)


def plan(
    axes: Axes, head_dims: tuple[int, ...], effort: str, lengths: tuple[int, ...], dtypes: tuple[str, ...] | None = None
) -> list[Item]:
    """Everything there is to do, the ordinary before the exotic; ``dtypes`` by their short names, None for all."""
    sets = [o for o in axes.combinations() if dtypes is None or SHORT[o.dtype] in dtypes]
    if not sets:
        return []
    first = sets[0]
    rest = sorted(sets[1:], key=lambda o: axes.dtype.index(o.dtype))  # stable: ordinary first within a dtype
    items = [Item(d, first, effort) for d in head_dims]
    items += [Item(head_dims[0], first, length=n) for n in sorted(lengths)]
    return items + [Item(d, options) for options in rest for d in head_dims]


def fatal(words: str | None) -> bool:
    """After these every call of the process fails in the same words, and means nothing."""
    return words is not None and (
        "CUDA error" in words or "illegal memory access" in words or "AcceleratorError" in words
    )


class Worker:
    """Runs a plan and writes its records."""

    def __init__(self, peer: Peer, out: TextIO, deadline: float, device: str, seed: int) -> None:
        self.peer, self.out, self.deadline, self.device, self.seed = peer, out, deadline, device, seed

    def write(self, kind: str, **fields: Any) -> None:
        self.out.write(jsonable.text({"kind": kind} | fields, indent=None) + "\n")
        self.out.flush()

    def run(
        self, head_dims: tuple[int, ...], effort: str, lengths: tuple[int, ...], skip: int = 0,
        dtypes: tuple[str, ...] | None = None,
    ) -> int:  # fmt: skip
        """Exit code: 0 at the end of the plan or of the time, ``FATAL`` when a new process has to go on."""
        found = self.peer.find()
        items = [] if isinstance(found, str) else plan(found[1], head_dims, effort, lengths, dtypes)
        self.write(
            "target", name=self.peer.name, version=self.peer.version, about=self.peer.about,
            words=found if isinstance(found, str) else None, items=[str(item) for item in items],
            head_dims=list(head_dims),
        )  # fmt: skip
        if isinstance(found, str):
            self.write("end", why="not available")
            return 0
        for n, item in enumerate(items):
            if n < skip:
                continue
            if time.time() > self.deadline:
                self.write("end", why="out of time")
                return 0
            self.write("begin", item=n, what=str(item), at=time.time())
            words = self.sums(n, item, found[0]) if item.length else self.row(n, item, found[0])
            if fatal(words):
                self.write("end", why=words)
                return FATAL
        self.write("end", why="done")
        return 0

    def row(self, n: int, item: Item, call: Call) -> str | None:
        start = time.time()
        with determinism(item.options.deterministic):
            row = audit_options(self.peer, call, item.options, item.effort, item.head_dim, self.seed, self.device)
        broken = next((spot for spot in row.report.blind_spots if fatal(spot)), None) if row.report else None
        if broken:  # the device died on the way: nothing compared after that was compared
            row = replace(row, report=None, refused=f"raised under audit: {broken}")
        self.write(
            "row", item=n, head_dim=item.head_dim, effort=item.effort, words=item.options.words(),
            alike=moved(row, sizes=False), seconds=round(time.time() - start, 2), **row_dict(row),
        )  # fmt: skip
        return row.refused

    def sums(self, n: int, item: Item, call: Call) -> str | None:
        start, options, length = time.time(), item.options, item.length or 0
        if self.peer.square and length > SQUARE_LIMIT:
            words = "not asked: this target's memory grows with the square of the length"
            self.write("mass", item=n, head_dim=item.head_dim, **mass.Mass(length, refused=words).as_dict())
            return None

        def fn(q: Any, k: Any, v: Any, *cu: Any) -> Any:
            return call(q, k, v, cu[0] if cu else None, options)

        got = mass.Mass(length)
        for backward in ("autograd", None):  # what has no gradients here may have an O
            try:
                target = Target(
                    fn, layout=options.layout, backward=backward, heads=FEW_HEADS, head_dim=item.head_dim,
                    dtype=options.dtype, device=self.device,
                )  # fmt: skip
                got = mass.measure(target, length, options.reach[0], self.seed)
            except Exception as error:  # what a stranger's code may raise
                got = mass.Mass(length, refused=own_words(error))
            if got.refused is None or fatal(got.refused):
                break
        self.write("mass", item=n, head_dim=item.head_dim, options=str(options), heads=list(FEW_HEADS),
                   seconds=round(time.time() - start, 2), **got.as_dict())  # fmt: skip
        return got.refused


def work(
    name: str, path: Path, deadline: float, device: str, seed: int, head_dims: tuple[int, ...], effort: str,
    lengths: tuple[int, ...], skip: int, threads: int, dtypes: tuple[str, ...] | None = None,
) -> int:  # fmt: skip
    """What the process does: append records to ``path``, return its exit code."""
    faulthandler.enable()  # so that a crash has words
    torch.set_num_threads(threads)
    with path.open("a", encoding="utf-8") as out:
        peer = find(name)
        own_first = tuple(sorted(head_dims, key=lambda d: d != peer.head_dim))
        return Worker(peer, out, deadline, device, seed).run(own_first, effort, lengths, skip, dtypes)
