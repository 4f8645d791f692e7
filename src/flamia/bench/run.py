"""Time our attention beside others', workload by workload.

    python -m flamia.bench.run --workloads packed,ragged,grouped --contenders flamia,flash-attn-4 --seconds 140 --out out/bench
    python -m flamia.bench.run --plot out/bench.json

Needs torch and Triton; peers are those that this machine has. Before anything is timed, everybody's sums are checked on
the same tensors (checks.py). If ours are wrong there is no report, only what is wrong; a peer whose sums are wrong is
timed all the same, marked as ineligible with the figure, and counts in no mean.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from . import checks, report, timing
from .peers import CONTENDERS, OURS, Contender, Inputs, Refused
from .workloads import Workload, chosen

DEFAULT = "packed,ragged,grouped"
KINDS = {"forward": 1.0, "train": 3.5}
"""What is timed of each contender, in units of the forward's FLOPs."""


class WrongSums(Exception):
    """Our own results fail their check: no figure of speed is worth telling."""


def measure(
    workload: Workload,
    names: Sequence[str],
    rounds: int,
    seconds: float,
    device: str = "cuda",
    say: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Check and time the contenders on one workload. seconds: for the rounds alone."""
    started = time.monotonic()
    inputs = workload.inputs(device)
    row: dict[str, Any] = {"name": workload.name, "group": workload.group, "tokens": workload.tokens}
    row |= {"documents": len(workload.lengths), "longest": max(workload.lengths), "causal": workload.causal}
    row |= {"window": workload.window, "pairs": workload.pairs}
    row |= {"heads": workload.heads, "kv_heads": workload.kv_heads, "dim": workload.dim}
    row |= {"contenders": {}, "refused": {}, "ratios": {}}
    timed: dict[str, dict[str, timing.Timed]] = {}
    for name in names:
        begun = time.monotonic()
        try:
            entry, calls = _prepare(name, workload, inputs)
        except Exception as error:  # a peer may fail in any way it likes; we may not
            if name == OURS:
                raise
            row["refused"][name] = _first_line(error)
            timing.release()
            continue
        row["contenders"][name], timed[name] = entry, calls
        say(f"{workload.name}: {name} ready after {time.monotonic() - begun:.1f} s")
    everything = [call for calls in timed.values() for call in calls.values()]
    row["rounds"] = timing.interleave(everything, rounds, seconds)
    for name, calls in timed.items():
        for kind, call in calls.items():
            tflops = KINDS[kind] * workload.forward_flops / call.median * 1e-9
            row["contenders"][name][kind] = {"ms": call.median, "tflops": tflops, "how": call.how, "samples": call.ms}
            if name != OURS and OURS in timed:
                ratios = [theirs / own for theirs, own in zip(call.ms, timed[OURS][kind].ms)]
                spread = [min(ratios), statistics.median(ratios), max(ratios)]
                row["ratios"].setdefault(name, {})[kind] = spread
    row["seconds"] = time.monotonic() - started
    return row


def _prepare(name: str, workload: Workload, inputs: Inputs) -> tuple[dict[str, Any], dict[str, timing.Timed]]:
    """Build a contender, check it, measure its memory, capture its calls."""
    contender: Contender = CONTENDERS[name](workload, inputs)
    verdict = checks.check(contender, workload, inputs)
    if name == OURS and verdict.faults:
        raise WrongSums(f"{workload.name}: {'; '.join(verdict.faults)}")
    entry: dict[str, Any] = {"label": contender.name, "inside": contender.inside, "check": verdict.to_dict()}
    entry |= {"eligible": not verdict.faults, "peak_bytes": timing.peak(contender.train)}
    return entry, {kind: timing.capture(getattr(contender, kind)) for kind in KINDS}


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:160]}".removeprefix("Refused: ")


def known(names: Sequence[str]) -> list[str]:
    for name in names:
        if name not in CONTENDERS:
            raise ValueError(f"contender {name!r} is not known: take {', '.join(CONTENDERS)}")
    return list(names)


def bench(
    workloads: Sequence[Workload],
    names: Sequence[str],
    rounds: int = 9,
    seconds: float = 600.0,
    device: str = "cuda",
    commit: str | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """A whole report as plain values. Raises WrongSums, and then there is none.

    seconds: for everything, compilation and checks included. No workload is begun after them; those are listed.
    """
    known(names)
    started = time.monotonic()
    found: dict[str, Any] = report.surroundings(device, commit)
    found |= {"settings": {"rounds": rounds, "seconds": seconds, "contenders": list(names)}, "workloads": []}
    left = list(workloads)
    while left and (remaining := seconds - (time.monotonic() - started)) > 0:
        row = measure(left[0], names, rounds, remaining / len(left) / 2, device, say)
        timing.release()
        found["workloads"].append(row)
        say(report.lines(row))
        left.pop(0)
    found["not_run"] = [w.name for w in left]
    found["seconds"] = time.monotonic() - started
    return found


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="flamia bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--workloads", default=DEFAULT, help="names or groups, separated by commas, or all")
    made.add_argument(
        "--contenders", default=",".join(CONTENDERS), help="separated by commas; default: all that are here"
    )
    made.add_argument("--rounds", type=int, default=9, help="at most; three are always run")
    made.add_argument("--seconds", type=float, default=600.0, help="for everything, compilation included")
    made.add_argument("--out", help="writes OUT.json, OUT.csv and, with matplotlib, OUT.png; default: out/bench")
    made.add_argument("--commit", help="what to call this version, where git is not at hand")
    made.add_argument(
        "--plot", metavar="JSON", help="draw an earlier report, as OUT.png or beside it, and time nothing"
    )
    return made


def main(arguments: Sequence[str] | None = None) -> None:
    options = parser().parse_args(arguments)
    if options.plot:
        source = Path(options.plot)
        try:
            earlier = json.loads(source.read_text(encoding="utf-8"))
            picture = Path(options.out + ".png") if options.out else source.with_suffix(".png")
            picture.parent.mkdir(parents=True, exist_ok=True)
            print(report.plot(earlier, picture))
        except (OSError, UnicodeDecodeError) as error:
            sys.exit(f"flamia bench: --plot: {error}")
        except (json.JSONDecodeError, KeyError, TypeError, IndexError, AttributeError):
            sys.exit(f"flamia bench: --plot: {source} is no report of flamia bench")
        return
    try:
        workloads = chosen([name.strip() for name in options.workloads.split(",")])
        names = known([name.strip() for name in options.contenders.split(",")])
        if not torch.cuda.is_available():
            sys.exit("flamia bench times kernels on a GPU; this machine has none that torch can see")
        found = bench(
            workloads, names, options.rounds, options.seconds, commit=options.commit,
            say=lambda text: print(text, file=sys.stderr, flush=True),
        )  # fmt: skip
    except WrongSums as error:
        sys.exit(f"flamia bench refuses to report: our own results are wrong. {error}")
    except (Refused, ValueError) as error:
        sys.exit(f"flamia bench: {error}")
    print(report.text(found))
    for path in report.write(found, Path(options.out or "out/bench")):
        print(path)


if __name__ == "__main__":
    main()
