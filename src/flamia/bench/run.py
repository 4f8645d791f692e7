"""Time attention on packed workloads: interleaved rounds, medians, ratios round by round.

    python -m flamia.bench.run --contenders hopper,fa4 --workloads 4x4096,1x16384 --rounds 9

A figure is one call between two CUDA events, the stream drained before it (`--calls n`: n calls between the events,
divided by n, so that what the host does for one call hides behind the work of another, as in training). In a round every
contender runs once; the ratio is taken within the round, so that a card that slows down slows both. The last contender is
the one that the others are divided into.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Callable

import torch

from .peers import CONTENDERS
from .workloads import WORKLOADS, Workload


def timed(fn: Callable[[], object], calls: int) -> float:
    """Milliseconds of one call."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    start.record()
    for _ in range(calls):
        fn()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / calls


def commit() -> str:
    found = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    return found.stdout.strip() or "unknown"


def measure(workload: Workload, names: list[str], rounds: int, calls: int) -> dict:
    q, k, v, do, cu = workload.inputs()
    contenders = [CONTENDERS[name](q, k, v, do, cu, max(workload.lengths)) for name in names]
    result: dict = {"workload": workload.name, "tokens": workload.tokens, "contenders": [c.name for c in contenders]}
    for kind, factor in (("forward", 1.0), ("train", 3.5)):
        fns = [getattr(c, kind) for c in contenders]
        for fn in fns:
            fn(), fn()
        times = [[timed(fn, calls) for fn in fns] for _ in range(rounds)]
        ms = [statistics.median(column) for column in zip(*times)]
        ratios = [sorted(row[-1] / row[i] for row in times) for i in range(len(fns) - 1)]
        result[kind] = {
            "ms": ms,
            "tflops": [factor * workload.forward_flops / t * 1e-9 for t in ms],
            "ratio": [[r[0], statistics.median(r), r[-1]] for r in ratios],
        }
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contenders", default="hopper,graph,fa4", help=", ".join(CONTENDERS))
    parser.add_argument("--workloads", default=";".join(WORKLOADS), help="names, separated by semicolons")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--calls", type=int, default=1)
    parser.add_argument("--json", help="write the figures to this file too")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("flamia.bench.run times kernels on a GPU; this machine has none that torch can see")
    names = options.contenders.split(",")
    print(
        f"# {torch.cuda.get_device_name()}, torch {torch.__version__}, commit {commit()}, calls per figure {options.calls}"
    )
    results = []
    for name in options.workloads.split(";"):
        result = measure(WORKLOADS[name], names, options.rounds, options.calls)
        results.append(result)
        for kind in ("forward", "train"):
            row = result[kind]
            cells = [f"{c} {ms:.3f} ms {tf:.0f}" for c, ms, tf in zip(names, row["ms"], row["tflops"])]
            ratio = [f"{c} {low:.3f}/{mid:.3f}/{high:.3f}" for c, (low, mid, high) in zip(names, row["ratio"])]
            print(f"{name:20s} {kind:8s} {' | '.join(cells)} | ratio {', '.join(ratio)}", flush=True)
    if options.json:
        with open(options.json, "w") as stream:
            json.dump(results, stream, indent=1)


if __name__ == "__main__":
    main()
