"""The blocks made from docs/results/peers-h200.json: sums by length, and the verdicts of the audit on a card."""

from __future__ import annotations

import re

from results import FP8, OURS_AUDITED, block, load, masses, small, table

# --- mass -----------------------------------------------------------------------------------------------------------


@block
def mass_table() -> list[str]:
    found, rows = load("peers-h200"), []
    lengths = sorted({m["length"] for m in found["mass"]})
    for name in (t["name"] for t in found["targets"]):
        had = {m["length"]: m for m in masses(name)}
        if had:
            cells = [
                f"{small(had[n]['o_bias'])} / {small(had[n]['dv_bias'])}" if n in had else "not asked" for n in lengths
            ]
            rows.append([f"`{name}`", next(iter(had.values()))["head_dim"], *cells])
    return table("target | D | " + " | ".join(f"{n:,}" for n in lengths), rows)


@block
def mass_words() -> list[str]:
    found = load("peers-h200")
    longest = max(m["length"] for m in found["mass"])
    fp8 = {m["length"]: m for m in masses(FP8)}
    others = [m for t in found["targets"] if not t["name"].startswith(FP8) for m in masses(t["name"])]
    most = max(others, key=lambda m: m["dv_bias"])
    tested = load("bench-h200-dense")["workloads"][0]["contenders"]["cudnn-fp8"]["check"]
    parts = ", ".join(f"{1 - m['o_bias']:.2f} / {1 - m['dv_bias']:.2f} at {n:,}" for n, m in fp8.items() if n > 1024)
    return [
        f"`{FP8}` keeps, of O / of dV: {parts} tokens; in its worst entry O is off by {fp8[longest]['o_worst']:.2f} at "
        f"{longest:,}. (The file has sizes without a sign; the benchmark's check of the same kernels, other inputs, has one: "
        f"{tested['mass_o']:.3f} and {tested['mass_dv']:.3f} at 8,192 tokens.) For all {len({m['target'] for m in others})} "
        f"others that answered the mean of O is off by at most {small(max(m['o_bias'] for m in others))}, its worst entry by "
        f"{small(max(m['o_worst'] for m in others))} (entries are bfloat16), the sum of dV by at most "
        f"{small(most['dv_bias'])} (`{most['target']}` at {most['length']:,} tokens); the limit of the contract, 2^-8, is 0.0039."
    ]


# --- isolation ------------------------------------------------------------------------------------------------------


def rounded(text: str) -> str:
    return re.sub(r"\d+\.\d{3,}", lambda m: f"{float(m[0]):.2g}", text)


@block
def audit_machine() -> list[str]:
    found = load("peers-h200")
    m, source = found["machine"], found["source"]
    return [
        f"`{source['command']}` on an {m['device']} with {m['cores']} cores: {found['seconds']:.0f} s; torch {m['torch']}, "
        f"Triton {m['triton']}, cuDNN {m['cudnn']}, Python {m['python']}; commit {source['commit']}; {source['date']}, seed "
        f"{found['seed']}, bfloat16, head sizes 64 and 128."
    ]


@block
def verdicts() -> list[str]:
    rows = []
    for t in load("peers-h200")["targets"]:
        without = t["without_gradients"]
        gradients = "" if not t["ran"] else "yes" if not without else f"{without} without"
        counts = [t[v] for v in ("clean", "undecided", "leak", "refused", "not run")]
        rows.append([f"`{t['name']}`", t["version"] or "", *counts, gradients, small(t["error"])])
    return table(
        "target | version | clean | undecided | leak | refused | not run | gradients | error of O, at most", rows
    )


@block
def leaks() -> list[str]:
    rows: dict[tuple[str, str], list[str]] = {}
    for r in load("peers-h200")["rows"]:
        if r["verdict"] == "leak":
            rows.setdefault((r["sets"], rounded(r["moved"])), []).append(f"`{r['target']}`")
    head = "target | option sets | what moved (sizes: of the first of them)"
    return table(head, [[", ".join(targets), *key] for key, targets in rows.items()])


@block
def undecided() -> list[str]:
    rows = []
    for name in dict.fromkeys(r["target"] for r in load("peers-h200")["rows"] if r["verdict"] == "undecided"):
        mine = [r for r in load("peers-h200")["rows"] if r["target"] == name and r["verdict"] == "undecided"]
        reasons = {w for r in mine for w in ("order of summation", "within the noise") if w in r["moved"]}
        contracts = sorted({part.split()[0] for r in mine for part in r["moved"].split("; ")} & set(CONTRACTS))
        rows.append([f"`{name}`", sum(r["count"] for r in mine), ", ".join(contracts), " and ".join(sorted(reasons))])
    return table("target | undecided | contracts | because of", rows)


CONTRACTS = ("repeat", "prefix", "truncate", "document", "offset", "mask")


@block
def masked_operands() -> list[str]:
    found, rows = load("peers-h200"), []
    for name in ("sdpa:cudnn", "sdpa:default", "sdpa:efficient", "sdpa:math", "varlen", "flash:4", OURS_AUDITED):
        for deterministic in (False, True):
            mine = {o["operand"]: o for o in found["operands"] if o["target"] == name and o["masked"]
                    and o["deterministic"] == deterministic and o["kind"] == "contents"}  # fmt: skip
            if mine:
                cells = [f"{mine[x]['moved']} of {mine[x]['comparisons']}" for x in ("q", "k", "v", "do", "all")]
                rows.append([f"`{name}`", "deterministic" if deterministic else "default", *cells])
    return table("target | mode | q | k | v | dO | all four", rows)


@block
def offset_words() -> list[str]:
    found = [p for p in load("peers-h200")["probes"] if p["contract"] == "offset"]
    names = " and ".join(f"`{p['target']}`" for p in found)
    return [
        f"With the same documents in reverse order the rows of a document differ by at most "
        f"{max(p['units'] for p in found):.2f} of what another order of summation may move ({names})."
    ]


@block
def nonfinite() -> list[str]:
    rows = []
    for name, statuses in load("peers-h200")["contracts"].items():
        n = statuses["nonfinite"]
        rows.append([f"`{name}`", n.get("clean", 0), n.get("leak", 0), n.get("undecided", 0)])
    return table("target | NaN stays with the rows that see it | does not | undecided", rows)
