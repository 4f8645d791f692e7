"""What the nine packs do not tell, in one run: `python -m flamia.bench.more`, with torch and Triton alone.

    share      what quantisation takes of a training call, in time and traffic (share.py)
    memory     the peak of a call, packed against padded (memory.py)
    workloads  other orders and lengths of the same work, tiny documents, head size 64, windows, no mask (workloads.py)
    model      a whole model's step, packed against padded (model.py)

Sections run in that order, none is begun when the seconds are over, and OUT.json is written after each, so that a run
that is cut short keeps what it has. The kernels are compiled first, in processes of their own, side by side.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from . import memory, model, report, run, share, timing
from .peers import CONTENDERS, OURS
from .workloads import WORKLOADS, Workload, chosen

SECTIONS = ("share", "memory", "workloads", "model")
SHARED = ("16x4096", "1x32768", "8192+224x256", "64x1024", "1024x64")
GROUPS = "log-uniform,16x4096,order,skewed,tiny,shapes"
CONFIGURATIONS = [(dim, window, causal) for dim in (128, 64) for window, causal in ((None, True), (100, True))]
CONFIGURATIONS += [(128, None, False)]
FOR_A_MODEL = 22.0
"""Seconds that the workloads leave for the model."""


def warm(dim: int, window: int | None, causal: bool) -> None:
    """Compile the kernels of one configuration into Triton's cache."""
    tiny = Workload("tiny", (200,), 2, 2, dim, causal, window=window)
    CONTENDERS[OURS](tiny, tiny.inputs()).train()
    torch.cuda.synchronize()


def start_warming() -> list[subprocess.Popen[bytes]]:
    said = [f"{dim},{window or 0},{int(causal)}" for dim, window, causal in CONFIGURATIONS]
    return [subprocess.Popen([sys.executable, "-m", "flamia.bench.more", "--warm", text]) for text in said]


def await_warming(jobs: list[subprocess.Popen[bytes]], seconds: float) -> None:
    """One that fails or is late is left to the sections, which compile what they need themselves."""
    end = time.monotonic() + seconds
    for job in jobs:
        try:
            job.wait(timeout=max(0.1, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            job.kill()


def measure(
    sections: Sequence[str],
    names: Sequence[str],
    groups: str,
    rounds: int,
    seconds: float,
    commit: str | None,
    say: Callable[[str], None],
    keep: Callable[[dict[str, Any]], None] = lambda found: None,
    device: str = "cuda",
) -> dict[str, Any]:
    """The sections asked for, as plain values. keep: given the report so far after each of its rows."""
    started = time.monotonic()

    def left() -> float:
        return seconds - (time.monotonic() - started)

    found: dict[str, Any] = report.surroundings(device, commit)
    found |= {"settings": {"rounds": rounds, "seconds": seconds, "contenders": list(names), "sections": list(sections)}}
    found |= {"share": [], "memory": [], "workloads": [], "model": [], "not_run": [], "failed": {}}

    def attempt(section: str, name: str, reserved: float, row: Callable[[], dict[str, Any]], text: Any) -> None:
        """One row, if there is time. What fails is kept with its words, and the next row is still measured."""
        if left() <= reserved:
            found["not_run"].append(f"{section}: {name}")
            return
        try:
            made = row()
        except Exception as error:
            found["failed"][f"{section}: {name}"] = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
            say(f"{section}: {name} FAILED: {error}")
        else:
            found[section].append(made)
            say(f"[{time.monotonic() - started:.0f} s] {text(made)}")
        timing.release()
        found["seconds"] = time.monotonic() - started
        keep(found)

    for name in SHARED if "share" in sections else ():
        attempt("share", name, 0.0, partial(share.measure, WORKLOADS[name], rounds, 2.0, device), share.lines)
    for case in memory.CASES if "memory" in sections else ():
        attempt("memory", case.name, 0.0, partial(memory.measure, case, tuple(names), device), memory.lines)
    reserved = FOR_A_MODEL if "model" in sections else 0.0
    for w in chosen(groups.split(",")) if "workloads" in sections else ():
        attempt("workloads", w.name, reserved, partial(run.measure, w, names, rounds, 2.5, device, say), report.lines)
    if "model" in sections:
        attempt("model", "step", 0.0, partial(model.measure, rounds, min(15.0, max(3.0, left())), device), model.lines)
    found["seconds"] = time.monotonic() - started
    keep(found)
    return found


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m flamia.bench.more", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--sections", default=",".join(SECTIONS), help="of " + ", ".join(SECTIONS))
    made.add_argument("--workloads", default=GROUPS, help="names or groups for the section of that name")
    made.add_argument("--contenders", default=f"{OURS},flash-attn-4", help="of " + ", ".join(CONTENDERS))
    made.add_argument("--rounds", type=int, default=7, help="at most; three are always run")
    made.add_argument("--seconds", type=float, default=150.0, help="for everything, compilation included")
    made.add_argument("--out", default="out/bench-more", help="writes OUT.json and OUT.csv (the workloads)")
    made.add_argument("--commit", help="what to call this version, where git is not at hand")
    made.add_argument("--warm", metavar="DIM,WINDOW,CAUSAL", help=argparse.SUPPRESS)
    return made


def main(arguments: Sequence[str] | None = None) -> None:
    options = parser().parse_args(arguments)
    sections, names = options.sections.split(","), options.contenders.split(",")
    for name in sections:
        if name not in SECTIONS:
            sys.exit(f"flamia.bench.more: section {name!r} is not known: take {', '.join(SECTIONS)}")
    try:
        run.known(names)
        chosen(options.workloads.split(","))
    except ValueError as error:
        sys.exit(f"flamia.bench.more: {error}")
    if not torch.cuda.is_available():
        sys.exit("flamia.bench.more times kernels on a GPU; this machine has none that torch can see")
    if options.warm:
        dim, window, causal = map(int, options.warm.split(","))
        return warm(dim, window or None, bool(causal))
    out = Path(options.out)
    out.parent.mkdir(parents=True, exist_ok=True)

    def keep(found: dict[str, Any]) -> None:
        out.with_name(out.name + ".json").write_text(json.dumps(found, indent=1), encoding="utf-8")
        out.with_name(out.name + ".csv").write_text(report.table(found), encoding="utf-8")

    started = time.monotonic()
    await_warming(start_warming(), 60.0)
    seconds = options.seconds - (time.monotonic() - started)
    print(f"compiled in {time.monotonic() - started:.0f} s", file=sys.stderr)
    found = measure(
        sections, names, options.workloads, options.rounds, seconds, options.commit,
        lambda text: print(text, file=sys.stderr, flush=True), keep,
    )  # fmt: skip
    if found["not_run"]:
        print(f"no time for: {', '.join(found['not_run'])}")
    print(out.with_name(out.name + ".json"))
    if found["failed"]:
        sys.exit("\n".join(f"{name} failed: {why}" for name, why in found["failed"].items()))


if __name__ == "__main__":
    main()
