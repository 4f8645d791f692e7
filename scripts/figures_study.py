"""The pictures of the training studies: python scripts/figures.py docs/figures study_leak.svg study_faults.svg."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from tables_study import paired

ACCENT, INK, PALE = "#c0392b", "#22313f", "#8a99a6"
COLOURS = ("#c0392b", "#1b4f72", "#b9770e", "#6c3483", "#1e8449", "#5d6d7e")


def seen(run: dict[str, Any]) -> bool:
    import flamia

    return "prefix" not in flamia.Recipe.parse(run["arithmetic"]).claims


def smooth(values: list[float], window: int) -> list[float]:
    """Trailing means; the first ones are of what there is."""
    return [statistics.fmean(values[max(0, i + 1 - window) : i + 1]) for i in range(len(values))]


def leak(found: dict[str, Any], metadata: dict[str, Any], path: Path) -> None:
    """Each finished model through its own attention and the exact one, and the gap while it was trained."""
    runs = [run for run in found["runs"] if run["study"] == "leak" and not run["diverged_at"]]
    base = next(run for run in runs if run["name"] == "bf16")
    figure, axes = plt.subplots(1, 2, figsize=(9.6, 0.34 * len(runs) + 1.7), width_ratios=(1.35, 1))
    for y, run in enumerate(reversed(runs)):
        colour = ACCENT if seen(run) else INK
        (own, e1), (exact, e2) = (paired(run[name], base["exact"]) for name in ("own", "exact"))
        axes[0].plot((own, exact), (y, y), color=colour, linewidth=1, alpha=0.6)
        axes[0].errorbar(own, y, xerr=e1, fmt="o", color=colour, markersize=6)
        axes[0].errorbar(exact, y, xerr=e2, fmt="o", color=colour, markerfacecolor="white", markersize=6)
        if run["validation"]:
            axes[1].plot([v["step"] for v in run["validation"]], [v["own"] - v["exact"] for v in run["validation"]],
                         color=colour if seen(run) else PALE, linewidth=1.3 if seen(run) else 0.9)  # fmt: skip
            if seen(run):
                last = run["validation"][-1]
                axes[1].annotate(run["name"], (last["step"], last["own"] - last["exact"]), fontsize=7, color=colour,
                                 xytext=(3, 0), textcoords="offset points", annotation_clip=False)  # fmt: skip
    axes[0].axvline(0, color=PALE, linewidth=0.8)
    axes[0].set_yticks(range(len(runs)), [run["name"] for run in reversed(runs)], fontsize=8)
    axes[0].set_title("loss less that of bf16 through exact attention", fontsize=10)
    axes[0].set_xlabel("nats per byte (full: own attention, hollow: exact; bars: a standard error)", fontsize=8)
    axes[1].axhline(0, color=PALE, linewidth=0.8)
    axes[1].set_title("own less exact, held-out text", fontsize=10)
    axes[1].set_xlabel("step (red: recipes that see the future)", fontsize=8)
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
        axis.tick_params(labelsize=8)
    figure.tight_layout()
    figure.savefig(path, metadata=metadata)
    plt.close(figure)


def faults(found: dict[str, Any], metadata: dict[str, Any], path: Path) -> None:
    """Step by step: each fault's training loss less its control's on the same batch, and both gradient norms."""
    runs = {run["name"]: run for run in found["runs"] if run["study"] == "faults"}
    chosen = [run for run in runs.values() if run["control"] in runs]
    columns = 3
    rows = -(-len(chosen) // columns)
    figure, axes = plt.subplots(rows, 2 * columns, figsize=(12.5, 1.75 * rows + 0.3), squeeze=False)
    for axis in axes.flat:
        axis.set_visible(False)
    for index, run in enumerate(chosen):
        control = runs[run["control"]]
        left, right = axes[index // columns][2 * (index % columns) : 2 * (index % columns) + 2]
        count = min(len(run["loss"]), len(control["loss"]))
        difference = [a - b for a, b in zip(run["loss"][:count], control["loss"][:count])]
        steps = range(1, count + 1)
        left.plot(steps, smooth(difference, 25), color=ACCENT, linewidth=1)
        left.axhline(0, color=PALE, linewidth=0.8)
        left.set_title(run["name"], fontsize=8, loc="left")
        for each, colour in ((control, PALE), (run, ACCENT)):
            norms = smooth(each["gradient_norm"], 5)
            right.plot(range(1, len(norms) + 1), norms, color=colour, linewidth=0.9)
        right.set_yscale("log")
        right.set_title("gradient norm", fontsize=8, loc="left")
        for axis in (left, right):
            axis.set_visible(True)
            axis.spines[["top", "right"]].set_visible(False)
            axis.tick_params(labelsize=7)
    figure.supxlabel(
        "step; left of each pair: training loss less the control's, same batches, mean of 25 (grey: control)",
        fontsize=8,
    )
    figure.tight_layout()
    figure.savefig(path, metadata=metadata)
    plt.close(figure)
