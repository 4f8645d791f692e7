"""The blocks of `flamia.bench.parallel`: two cards beside one."""

from __future__ import annotations

from results import block, load, of_rounds, table
from tables_closeness import made_at


@block
def parallel_machine() -> list[str]:
    found = load("parallel-h200")
    heads = found["parallel"][0]["heads"]
    return [
        f"{found['parallel'][0]['ranks']} cards of one host, {heads[0]}/{heads[1]} heads of {heads[2]}, {made_at(found)}."
    ]


@block
def parallel_table() -> list[str]:
    rows = []
    for w in load("parallel-h200")["parallel"]:
        cells = [w["workload"]]
        for kind in ("train", "forward"):
            cells += [f"{w[kind]['one_ms']:.2f}", f"{w[kind]['all_ms']:.2f}", of_rounds(w[kind]["ratio"], 2, bold=True)]
        cells += [" / ".join(f"{w['peak_bytes'][who] / 1e9:.1f}" for who in ("one", "all")), f"{w['plan_ms']:.0f}"]
        rows.append(cells)
    head = "one card | two | one over two"
    return table(
        f"documents | training call, ms: {head} | forward, ms: {head} | peak GB: one / each of two | plan, ms", rows
    )
