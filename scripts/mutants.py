"""How many of forty mutants does the auditor catch, and does it ever accuse one of ten correct, noisy attentions?

    python scripts/mutants.py thorough           one line each; exit code 1 if too few are caught or a sound one is accused
    python scripts/mutants.py quick --whole      without stopping at the first leak: what a user waits for

Mutants and noisy attentions live in tests/audit, which test them at "quick". Some minutes on one core at "thorough".
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests")]

from audit.mutants import LEAST, MUTANTS, SIZES  # noqa: E402
from audit.unsteady import UNSTEADY  # noqa: E402

from flamia.audit import audit_callable  # noqa: E402


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("effort", choices=sorted(LEAST))
    parser.add_argument("--whole", action="store_true", help="do not stop at the first leak")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=("mutants", "unsteady"))
    parser.add_argument(
        "--short", action="store_true", help="documents of 13, 75, 0, 1 and 21 tokens: five times as fast"
    )
    args = parser.parse_args()
    torch.set_num_threads(1)
    sizes = SIZES | {"effort": args.effort, "seed": args.seed, "explain": False}
    if args.short:
        sizes["lengths"] = (13, 75, 0, 1, 21)
    until = None if args.whole else "leak"

    escaped, accused, begin = [], [], time.process_time()
    for mutant in MUTANTS if args.only != "unsteady" else ():
        start = time.process_time()
        report = audit_callable(mutant.make(), until=until, **sizes, **mutant.options)
        leaks = [f for f in report.findings if f.kind == "leak"]
        first = leaks[0].text if leaks else "; ".join(report.reasons)
        seconds = time.process_time() - start
        print(f"{mutant.name:<26}{report.verdict:<10}{report.calls:>5} calls {seconds:6.1f} s  {first}", flush=True)
        escaped += [mutant.name] if report.verdict != "leak" else []
    for name, make in UNSTEADY.items() if args.only != "mutants" else ():
        start = time.process_time()
        report = audit_callable(make(), **sizes)
        seconds = time.process_time() - start
        print(f"{name:<34}{report.verdict:<10}{report.calls:>5} calls {seconds:6.1f} s", flush=True)
        accused += [name] if report.verdict == "leak" else []

    caught = len(MUTANTS) - len(escaped)
    if args.only != "unsteady":
        print(f"{args.effort}: {caught} of {len(MUTANTS)} caught (at least {LEAST[args.effort]}); escaped: {escaped}")
    if args.only != "mutants":
        print(f"{args.effort}: {len(accused)} of {len(UNSTEADY)} sound ones accused {accused}")
    print(f"{time.process_time() - begin:.0f} s of processor time")
    return int(bool(accused) or caught < LEAST[args.effort])


if __name__ == "__main__":
    sys.exit(main())
