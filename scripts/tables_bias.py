"""The block of `python -m flamia.study.bias`: what a loss of mass, of the sizes measured, does to a small model's loss."""

from __future__ import annotations

import math
import statistics
from typing import Any

from results import FP8, block, load, masses, table


def found() -> Any:
    return load("bias-cpu")


def lengths() -> dict[float, int]:
    """The length at which cuDNN's FP8 kept a share of O, by the share as it was asked for."""
    return {row["share"]: m["length"] for row in found()["shares"] for m in masses(FP8) if m["length"] > 1024
            and abs(1 - m["o_bias"] - row["share"]) < 1e-3}  # fmt: skip


def against(losses: list[float], base: list[float]) -> tuple[float, float]:
    """Mean over documents of the difference, and its standard error."""
    differences = [a - b for a, b in zip(losses, base, strict=True)]
    return statistics.fmean(differences), statistics.stdev(differences) / math.sqrt(len(differences))


@block
def bias_machine() -> list[str]:
    f = found()
    s, shape = f["settings"], f["settings"]["shape"]
    return [
        f"{f['parameters'] / 1e6:.2f} million parameters, {shape['layers']} layers of width {shape['width']}, "
        f"{s['steps']:,} steps of {s['documents']} documents of {s['length']} bytes of Python sources with exact sums; judged "
        f"on {s['final_documents']} held-out documents; CPU, torch {f['versions']['torch'].partition('+')[0]}, commit "
        f"{f['commit']}, {f['date'][:10]}."
    ]


@block
def bias_table() -> list[str]:
    base = next(row["losses"] for row in found()["shares"] if row["share"] == 1)
    rows = []
    for row in found()["shares"]:
        share, mean = row["share"], statistics.fmean(row["losses"])
        what = f"{lengths()[share]:,} tokens" if share in lengths() else {1: "exact", 0: "no attention"}[share]
        more, error = against(row["losses"], base)
        rows.append([f"{share:.2f}", what, f"{mean:.4f}", "" if share == 1 else f"{more:+.4f} ({error:.4f})"])
    return table("O keeps | as cuDNN FP8 does at | nats per byte | more than exact (standard error)", rows)


@block
def bias_words() -> list[str]:
    base = next(row["losses"] for row in found()["shares"] if row["share"] == 1)
    more = {row["share"]: against(row["losses"], base)[0] for row in found()["shares"]}
    said = [f"{more[share]:+.4f} at the share of {n:,} tokens" for share, n in lengths().items()]
    return [
        f"In nats per byte a loss of mass is nothing at first and then grows fast: {', '.join(said)}; attention as a whole "
        f"is worth {more[0]:.2f} to this model."
    ]
