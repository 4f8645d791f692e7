"""From the document of ``flamia.audit.peers_run`` (megabytes: every comparison of every option set) to what a page quotes.

    python scripts/reduce_peers.py out/peers/peers.json --date D --commit C --command "..." > docs/results/peers-h200.json

Nothing is judged again: rows that agree are counted and grouped as ``peers.md`` groups them, words and numbers are copied.

    targets    counts of option sets by verdict, the largest error of O, how the target ended
    rows       option sets with the same verdict and the same things moved; ``moved`` has the numbers of the first of them
    refused    option sets, or their gradients, refused in the same words
    contracts  per target and contract, counted or not: option sets by status
    operands   per target, with an explicit mask (a window or a block mask) or without, and with torch's deterministic mode
               or without: how many comparisons after disturbing one operand moved a bit, noise included
    probes     what leaked among what is counted (and what is not finite, counted nowhere), by the disturbance that showed
               it; ``largest`` relative to the row, "inf" where NaN or infinity came; ``units`` as in flamia.audit.judge
    mass       every row of the sums
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flamia.audit.peers_table import VERDICTS, alike, number, sets

CONTENTS = ("prefix", "document", "mask")  # contracts that change contents at equal shape


def target(found: dict[str, Any], name: str) -> dict[str, Any]:
    facts, rows = found["targets"][name], [r for r in found["rows"] if r["target"] == name]
    tally = Counter(r["verdict"] for r in rows)
    tally["not run"] += max(0, len([i for i in facts["items"] if "sums at" not in i]) - len(rows))
    ran = [r for r in rows if r["report"]]
    return {
        "name": name, "version": facts["version"], "about": facts["about"], "words": facts["words"],
        **{verdict: tally[verdict] for verdict in VERDICTS}, "ran": len(ran),
        "without_gradients": sum(bool(r["gradients"]) for r in ran),
        "error": max((number(r["error"]) for r in ran if r["error"] is not None), default=None),
        "ended": "; ".join(facts["ended"]),
    }  # fmt: skip


def groups(found: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        {"target": g[0]["target"], "sets": sets(g), "count": len(g), "verdict": g[0]["verdict"], "moved": g[0]["moved"]}
        for g in alike([r for r in found["rows"] if r["report"]], ("target", "verdict", "alike"))
    ]


def refusals(found: dict[str, Any]) -> list[dict[str, Any]]:
    out = []
    for what, prefix in (("refused", ""), ("gradients", "gradients of ")):
        for g in alike([r for r in found["rows"] if r[what]], ("target", what)):
            out.append({"target": g[0]["target"], "sets": prefix + sets(g), "count": len(g), "words": g[0][what]})
    return out


def contracts(found: dict[str, Any]) -> dict[str, dict[str, dict[str, int]]]:
    out: dict[str, dict[str, Counter[str]]] = defaultdict(lambda: defaultdict(Counter))
    for row in found["rows"]:
        for contract, status in (row["report"] or {"statuses": {}})["statuses"].items():
            out[row["target"]][contract][status] += 1
    return {name: {c: dict(sorted(n.items())) for c, n in kinds.items()} for name, kinds in out.items()}


def operands(found: dict[str, Any]) -> list[dict[str, Any]]:
    tally: dict[tuple[Any, ...], list[int]] = {}
    for row in found["rows"]:
        options = row["options"]
        masked = options["packing"] == "mask" or options["windowed"]
        for tried in (row["report"] or {"tried": []})["tried"]:
            kind = "contents" if tried["contract"] in CONTENTS else tried["contract"]
            if kind in ("contents", "nonfinite"):
                key = (row["target"], masked, options["deterministic"], kind, tried["operand"])
                sums = tally.setdefault(key, [0, 0])
                sums[0] += tried["comparisons"]
                sums[1] += tried["moved"]
    names = ("target", "masked", "deterministic", "kind", "operand")
    return [dict(zip(names, key)) | {"comparisons": n, "moved": m} for key, (n, m) in tally.items()]


def probes(found: dict[str, Any]) -> list[dict[str, Any]]:
    seen: dict[tuple[str, ...], dict[str, Any]] = {}
    for n, row in enumerate(found["rows"]):
        report = row["report"] or {"findings": [], "claims": []}
        for f in report["findings"]:
            if f["kind"] != "leak" or f["contract"] not in (*report["claims"], "nonfinite"):
                continue
            key = (row["target"], f["contract"], f["disturbance"], f["operand"], f["tone"])
            entry = seen.setdefault(key, {"tensors": set(), "in": set(), "largest": 0.0, "units": 0.0})
            entry["tensors"].add(f["tensor"])
            entry["in"].add(n)
            for size in ("largest", "units"):
                entry[size] = max(entry[size], number(f[size]))
    names = ("target", "contract", "disturbance", "operand", "tone")
    return [
        dict(zip(names, key))
        | {"tensors": sorted(e["tensors"]), "sets": len(e["in"])}
        | {size: "inf" if e[size] == float("inf") else e[size] for size in ("largest", "units")}
        for key, e in seen.items()
    ]


def reduce(found: dict[str, Any], **source: str) -> dict[str, Any]:
    return {
        "schema": 1, "source": source, "machine": found["machine"], "seed": found["seed"], "effort": found["effort"],
        "seconds": found["seconds"], "verdict": found["verdict"],
        "targets": [target(found, name) for name in found["targets"]], "rows": groups(found),
        "refused": refusals(found), "contracts": contracts(found), "operands": operands(found), "probes": probes(found),
        "mass": found["mass"],
    }  # fmt: skip


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Reduce peers.json to what a page quotes; to standard output.")
    parser.add_argument("found", type=Path)
    for name in ("date", "commit", "command"):
        parser.add_argument(f"--{name}", required=True)
    args = parser.parse_args(argv)
    found = json.loads(args.found.read_text())
    small = reduce(found, date=args.date, commit=args.commit, command=args.command)
    parts = []
    for key, value in small.items():  # one line for each entry, so that a diff can be read
        rows = value if isinstance(value, list) else None
        text = json.dumps(value) if rows is None else "[\n" + ",\n".join("  " + json.dumps(r) for r in rows) + "\n ]"
        parts.append(f" {json.dumps(key)}: {text}")
    sys.stdout.write("{\n" + ",\n".join(parts) + "\n}\n")


if __name__ == "__main__":
    main()
