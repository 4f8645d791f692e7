"""How much moves: the largest change of O and dQ that each recipe shows under each probe.

    python -m flamia.audit.dependency --out out/dependency-cpu.json

An audit answers yes or no, and stops caring how large once a bit has moved. Here the same experiments (probes.py) are run to
measure: for every recipe, what changing one operand behind a position does to the rows before it, what another document
does, moving, cutting off, and tokens of 2^20, 2^126 or NaN that a row does not see. A size is the largest |change| / |row|
over rows and heads, 0 where no bit moved and infinite where NaN appeared; it depends on the probes, and says how much was
seen to move under these, not how much ever can.

Two scenes: causal, one long document among short ones; and the same with a window of 40 keys, for what lies behind a window.
Rows of dK and dV owe later tokens nothing and are not in this table.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from flamia.jsonable import text as json_text

from .efforts import EFFORTS, settings_for
from .judge import change_size, differs
from .probes import NATIVE, OPERANDS, Book, Experiment
from .recipes import Mask, callable_of, default_recipes
from .targets import Target

HEADS, HEAD_DIM, WINDOW = (4, 2), 32, 40
WATCHED = ("O", "dQ")
CHANNELS = {
    "k": "K of later tokens",
    "v": "V of later tokens",
    "q": "Q alone of later tokens",
    "do": "dO alone of later tokens",
    "document": "another document",
    "offset": "the document elsewhere in the buffer, or alone",
    "truncate": "the document cut off",
    "2^20": "later tokens, or another document, 2^20 times larger",
    "2^126": "later tokens, or another document, 2^126",
    "nan": "later tokens, or another document, NaN",
    "window": "tokens behind a window",
}
OWED = {
    **dict.fromkeys(("k", "v", "q", "do"), ("prefix",)), "document": ("document",), "offset": ("offset",),
    "truncate": ("truncate",), "2^20": ("prefix", "document"), "2^126": ("nonfinite",), "nan": ("nonfinite",),
    "window": ("mask",),
}  # fmt: skip
"""The contracts whose rows a channel is measured on."""

Made = Callable[[], Experiment]


def book(window: int | None, seed: int, effort: str = "quick", dtype: torch.dtype = torch.bfloat16) -> Book:
    settings = settings_for(effort, "packed", dtype, (window, 0), None, None, seed)
    return Book(settings, HEADS, HEAD_DIM)


def later(b: Book, operand: str) -> Iterator[Made]:
    """One operand from a cut onwards, on plain inputs and on those made to expose its scale."""
    for tone in ("plain", *(t for t, native in NATIVE.items() if operand in native)):
        for how in ("one",) if tone in ("edge", "fp4") else ("spike", "cross"):
            for cut in b.settings.cuts:
                yield partial(b.change, tone, operand, how, b.settings.watched, cut)


def others(b: Book, how: str, operands: Iterable[str], tones: Iterable[str]) -> Iterator[Made]:
    """The first and the last of the other documents, whole."""
    lengths = b.settings.lengths
    short = [d for d, n in enumerate(lengths) if n and d != b.settings.watched]
    for document in (short[0], short[-1]):
        for tone in tones:
            for operand in operands:
                yield partial(b.change, tone, operand, how, document, 0)


def experiments(channel: str, seed: int, effort: str = "quick") -> Iterator[Made]:
    b = book(WINDOW if channel == "window" else None, seed, effort)
    watched, cuts = b.settings.watched, b.settings.cuts
    if channel in OPERANDS:
        yield from later(b, channel)
    elif channel == "document":
        yield from others(b, "spike", OPERANDS, ("plain", "values"))
        yield from others(b, "redraw", ("all",), ("plain",))
        yield from others(b, "cross", ("all",), ("values", "keys", "queries"))
    elif channel == "offset":
        for tone in ("values", "keys"):
            yield from b.moved(tone)
    elif channel == "truncate":
        for tone in ("values", "keys"):
            for t in b.settings.truncations:
                yield partial(b.truncated, tone, t)
    elif channel == "window":
        for operand, tone in (("k", "keys"), ("v", "values"), ("all", "plain")):
            for how in ("spike", "redraw"):
                for cut in cuts:
                    yield partial(b.change, tone, operand, how, watched, cut, cut + 3)
    else:
        how = {"2^20": "spike"}.get(channel, channel)
        for tone in ("plain", "values"):
            for cut in cuts:
                yield partial(b.change, tone, "all", how, watched, cut)
        yield from others(b, how, ("all",), ("plain", "values"))


def measure(
    recipe: str, channels: Sequence[str] = tuple(CHANNELS), seed: int = 0, effort: str = "quick"
) -> dict[str, Any]:
    """{channel: {tensor: {"largest", "comparisons", "moved", "by"}}} of one recipe, or control of that name."""
    from flamia.recipe import CONTROLS, Recipe

    chosen = CONTROLS[recipe] if recipe in CONTROLS else Recipe.parse(recipe)
    started, found = time.monotonic(), {}
    for channel in channels:
        window = (WINDOW, 0) if channel == "window" else None
        target = Target(callable_of(chosen, Mask("", True, window, HEADS), "reference"), heads=HEADS, head_dim=HEAD_DIM)
        sizes: dict[str, dict[str, Any]] = {
            t: {"largest": 0.0, "comparisons": 0, "moved": 0, "by": ""} for t in WATCHED
        }
        bases: dict[int, Any] = {}
        for made in experiments(channel, seed, effort):
            experiment = made()
            key = id(experiment.base)
            if key not in bases:
                bases[key] = (experiment.base, target.run(experiment.base))  # kept, so that the id stays its own
            changed = target.run(experiment.changed)
            for check in experiment.checks:
                if check.tensor not in WATCHED or check.contract not in OWED[channel]:
                    continue
                before, after = bases[key][1][check.tensor][check.rows], changed[check.tensor][check.into]
                note(sizes[check.tensor], experiment, before, after)
        found[channel] = sizes
    claims = sorted(chosen.claims)
    return {"recipe": recipe, "claims": claims, "channels": found, "seconds": round(time.monotonic() - started, 1)}


def note(size: dict[str, Any], experiment: Experiment, before: torch.Tensor, after: torch.Tensor) -> None:
    size["comparisons"] += 1
    if bool(differs(before, after).any()):
        largest = float(change_size(before, after)[0].max())
        size["moved"] += 1
        if largest >= size["largest"]:
            size |= {"largest": largest, "by": experiment.name}


def one_thread() -> None:
    torch.set_num_threads(1)


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m flamia.audit.dependency",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("--recipe", action="append", help="may be repeated; default: every preset and the controls")
    made.add_argument("--processes", type=int, default=2)
    made.add_argument("--effort", choices=EFFORTS, default="quick", help="documents, cuts and lengths: as in an audit")
    made.add_argument("--seed", type=int, default=0)
    made.add_argument("--commit", help="what to call this version, where git is not at hand")
    made.add_argument("--out", type=Path, default=Path("out/dependency-cpu.json"))
    return made


def main(arguments: Sequence[str] | None = None) -> None:
    from flamia.bench.report import surroundings
    from flamia.recipe import CONTROLS, Recipe

    options = parser().parse_args(arguments)
    names = options.recipe or [*default_recipes(), *CONTROLS]
    for name in names:
        try:
            _ = CONTROLS[name] if name in CONTROLS else Recipe.parse(name)
        except ValueError as error:
            sys.exit(f"flamia.audit.dependency: {error}")
    started = time.monotonic()
    found: dict[str, Any] = surroundings("cpu", options.commit)
    settings = book(None, options.seed, options.effort).settings
    found |= {"heads": HEADS, "head_dim": HEAD_DIM, "window": WINDOW, "seed": options.seed, "effort": options.effort}
    found |= {"lengths": settings.lengths, "cuts": settings.cuts, "channels": CHANNELS, "rows": []}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    with ProcessPoolExecutor(options.processes, get_context("spawn"), one_thread) as pool:
        for row in pool.map(partial(measure, seed=options.seed, effort=options.effort), names):
            found["rows"].append(row)
            most = max(size["largest"] for sizes in row["channels"].values() for size in sizes.values())
            print(f"{row['recipe']}: at most {most:.2g} ({row['seconds']:.0f} s)", flush=True)
            found["seconds"] = round(time.monotonic() - started, 1)
            options.out.write_text(json_text(found) + "\n", encoding="utf-8")  # after each: a run cut short keeps them
    print(options.out)


if __name__ == "__main__":
    main()
