"""The document of ``peers_run`` as Markdown: verdicts, what moved, the sums by length, and every refusal in its own words."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from .peers import UNSAID

VERDICTS = ("clean", "undecided", "leak", "refused", "not run")


def table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> list[str]:
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return [*lines, *("| " + " | ".join(cell(x) for x in row) + " |" for row in rows)] if rows else ["None."]


def cell(x: Any) -> str:
    text = "" if x is None else f"{x:.2g}" if isinstance(x, float) else str(x)
    return text.replace("|", "\\|").replace("\n", " ")


def sets(rows: Sequence[dict[str, Any]]) -> str:
    """For every axis the values that occur, and how many of their product these are."""
    sizes = list(dict.fromkeys(r["head_dim"] for r in rows))
    axes = [[f"D {d}" for d in sizes], *(list(dict.fromkeys(words)) for words in zip(*(r["words"] for r in rows)))]
    product = 1
    for values in axes:
        product *= len(values)
    text = ", ".join("/".join(values) for values in axes if values not in [[word] for word in UNSAID])
    return text if len(rows) == product == 1 else f"{text}: " + (
        f"all {product}" if product == len(rows) else f"{len(rows)} of {product}"
    )  # fmt: skip


def alike(rows: Sequence[dict[str, Any]], keys: Sequence[str]) -> list[list[dict[str, Any]]]:
    """Rows that agree in ``keys``, in the order of their first."""
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault(tuple(row[k] for k in keys), []).append(row)
    return list(groups.values())


def number(x: Any) -> float:
    """A number of the document; what JSON cannot hold is a string there."""
    return float("inf") if isinstance(x, str) or x is None else float(x)


def counts(found: dict[str, Any]) -> list[str]:
    lines = []
    for name, target in found["targets"].items():
        rows = [r for r in found["rows"] if r["target"] == name]
        if target["words"]:
            lines.append([f"`{name}`", target["version"], *[""] * 5, "", "", "not available"])
            continue
        tally = Counter(r["verdict"] for r in rows)
        unbegun = len([i for i in target["items"] if "sums at" not in i]) - len(rows)
        tally["not run"] += max(0, unbegun)
        ran = [r for r in rows if r["report"]]
        o_alone = sum(bool(r["gradients"]) for r in ran)
        gradients = "" if not ran else "no" if o_alone == len(ran) else "yes" if not o_alone else f"{o_alone} without"
        errors = [number(r["error"]) for r in ran if r["error"] is not None]
        lines.append([f"`{name}`", target["version"], *(tally[v] or "0" for v in VERDICTS), gradients,
                      max(errors, default=None), "; ".join(target["ended"])])  # fmt: skip
    return table(("target", "version", *VERDICTS, "gradients", "error of O, at most", "how it ended"), lines)


def what_moved(found: dict[str, Any]) -> list[str]:
    lines = []
    for group in alike([r for r in found["rows"] if r["report"]], ("target", "verdict", "alike")):
        lines.append([f"`{group[0]['target']}`", sets(group), group[0]["verdict"], group[0]["moved"]])
    return table(("target", "option sets", "verdict", "what moved (numbers: of the first of them)"), lines)


def sums(found: dict[str, Any]) -> list[str]:
    columns = ("o_bias", "o_worst", "dv_bias", "dq_equal", "dq_common", "tail")
    lines = [
        [f"`{m['target']}`", m["head_dim"], m["length"], *(m[c] for c in columns), m["refused"]] for m in found["mass"]
    ]
    return table(("target", "D", "tokens", *columns, "refused"), lines)


def refusals(found: dict[str, Any]) -> list[str]:
    lines = [[f"`{name}`", "everything", t["words"]] for name, t in found["targets"].items() if t["words"]]
    for group in alike([r for r in found["rows"] if r["refused"]], ("target", "refused")):
        lines.append([f"`{group[0]['target']}`", sets(group), group[0]["refused"]])
    for group in alike([r for r in found["rows"] if r["gradients"]], ("target", "gradients")):
        lines.append([f"`{group[0]['target']}`", f"gradients of {sets(group)}", group[0]["gradients"]])
    return table(("target", "option sets", "its own words"), lines)


def markdown(found: dict[str, Any]) -> str:
    facts = ", ".join(f"{name} {text}" for name, text in found["machine"].items())
    parts = [
        "# Attention audited on one machine", "",
        f"{facts}. Seed {found['seed']}; the ordinary call of each target at \"{found['effort']}\", every other option "
        f"set at \"spot\"; {found['seconds']} s in all. Verdict: {found['verdict']}.", "",
        "## Verdicts", "", *counts(found), "",
        "## What moved", "", *what_moved(found), "",
        "## Sums (V = 1, dO = 1, equal keys)", "",
        "`o_bias`, `dv_bias`: how far the mean of O, and dV summed over keys, are from what they must be (limit 2^-8 = "
        "0.0039). `dq_equal`: dQ at equal keys against |dO||v||k|. `dq_common`: what a large vector common to all keys "
        "moves in dQ. `tail`: what a long tail under one peak keeps of its weight (1 is right).", "",
        *sums(found), "",
        "## Refused, in their own words", "", *refusals(found),
    ]  # fmt: skip
    return "\n".join(parts) + "\n"
