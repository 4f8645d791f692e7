"""The pictures of the training studies, for figures.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.ticker import NullFormatter
from tables_study import WINDOW, beside, leak_floor, less, paired, seen, smooth

ACCENT, INK, PALE, BAND = "#c0392b", "#22313f", "#8a99a6", "#e6eaee"
COLOURS = (
    "#22313f", "#c0392b", "#b9770e", "#1e8449", "#8a99a6", "#6c3483", "#1b4f72", "#5d6d7e", "#d68910", "#117a65", "#e84393",
)  # fmt: skip


def plain(axis: Any) -> None:
    axis.spines[["top", "right"]].set_visible(False)
    axis.tick_params(labelsize=8)


def leak(found: dict[str, Any], metadata: dict[str, Any], path: Path) -> None:
    """Each finished model through its own attention and the exact one, and the gap while it was trained."""
    runs = [run for run in found["runs"] if run["study"] == "leak" and not run["diverged_at"]]
    floor = leak_floor(runs).size
    figure, axes = plt.subplots(1, 2, figsize=(9.6, 0.34 * len(runs) + 1.7), width_ratios=(1.35, 1))
    axes[0].axvspan(-floor, floor, color=BAND, linewidth=0)
    for y, run in enumerate(reversed(runs)):
        leaking = seen(run["arithmetic"])
        colour, base = ACCENT if leaking else INK, beside(runs, run)
        (own, e1), (exact, e2) = (paired(run[name], base["exact"]) for name in ("own", "exact"))
        axes[0].plot((own, exact), (y, y), color=colour, linewidth=1, alpha=0.6)
        axes[0].errorbar(own, y, xerr=e1, fmt="o", color=colour, markersize=4)
        axes[0].errorbar(exact, y, xerr=e2, fmt="o", color=colour, markerfacecolor="none", markersize=8)
        steps, gap = ([v["step"] for v in run["validation"]], [v["own"] - v["exact"] for v in run["validation"]])
        dashed = run["arithmetic"].startswith("nvfp4/")
        axes[1].plot(steps, gap, color=colour if leaking or dashed else PALE, linewidth=1.3 if leaking or dashed else 0.9,
                     linestyle="--" if dashed else "-")  # fmt: skip
        if leaking or dashed:
            axes[1].annotate(run["name"], (steps[-1], gap[-1]), fontsize=7, color=colour, xytext=(3, 0), va="center",
                             textcoords="offset points", annotation_clip=False)  # fmt: skip
    axes[0].axvline(0, color=PALE, linewidth=0.8)
    axes[0].set_xscale("symlog", linthresh=0.01, linscale=1.2)
    axes[0].set_xlim(-0.03, 1.8)
    ticks = (-0.02, -0.005, 0, 0.005, 0.02, 0.1, 0.5)
    axes[0].set_xticks(ticks, [f"{x:g}".replace("0.", ".") for x in ticks])
    axes[0].set_yticks(range(len(runs)), [run["name"] for run in reversed(runs)], fontsize=8)
    axes[0].set_title("loss less that of bf16 (same weights at first), exact attention", fontsize=9)
    axes[0].set_xlabel(
        "nats per byte, linear to .01 (full: own attention, hollow: exact;\nbars: a standard error; grey: the noise floor)",
        fontsize=8,
    )
    axes[1].axhline(0, color=PALE, linewidth=0.8)
    axes[1].set_title("own less exact, held-out text", fontsize=10)
    axes[1].set_xlabel("step (red: sees the future; dashed: four bits in every\nproduct; grey: the others)", fontsize=8)
    for axis in axes:
        plain(axis)
    figure.tight_layout()
    figure.savefig(path, metadata=metadata)
    plt.close(figure)


def curves(found: dict[str, Any], metadata: dict[str, Any], path: Path) -> None:
    """Training loss and gradient norm, step by step."""
    runs = [run for run in found["runs"] if run["study"] == "leak"]
    first = [
        run["arithmetic"] for run in runs if run["seed"] == 0
    ]  # other seeds have the colour of the first, and no name
    figure, axes = plt.subplots(1, 2, figsize=(9.6, 3.6))
    for run in runs:
        colour = COLOURS[first.index(run["arithmetic"]) % len(COLOURS)]
        for axis, kind in zip(axes, ("loss", "gradient_norm")):
            values = smooth(run[kind], WINDOW)
            steps = range(4, len(values), 5)  # of means of 25 every fifth is enough
            axis.plot([step + 1 for step in steps], [values[step] for step in steps], color=colour,
                      linewidth=0.7 if run["seed"] else 1.2, label=None if run["seed"] else run["name"])  # fmt: skip
    axes[0].set_ylim(1.1, 3.2)
    axes[1].set_yscale("log")
    for axis, title in zip(axes, ("training loss, nats per byte", "gradient norm before clipping")):
        axis.set_title(title, fontsize=10)
        axis.set_xlabel(f"step (mean of {WINDOW})", fontsize=8)
        plain(axis)
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncols=5, frameon=False, fontsize=7, columnspacing=1.2)
    figure.tight_layout(rect=(0, 0.1, 1, 1))
    figure.savefig(path, metadata=metadata)
    plt.close(figure)


def faults(found: dict[str, Any], metadata: dict[str, Any], path: Path) -> None:
    """Step by step: each fault's training loss less its control's on the same batch, and both gradient norms."""
    runs = {run["name"]: run for run in found["runs"] if run["study"] == "faults"}
    chosen = [run for run in runs.values() if run["control"] in runs and not run["seed"]]
    columns = 3
    rows = -(-len(chosen) // columns)
    figure, axes = plt.subplots(rows, 2 * columns, figsize=(12.5, 1.75 * rows + 0.3), squeeze=False)
    for axis in axes.flat:
        axis.set_visible(False)
    for index, run in enumerate(chosen):
        control = runs[run["control"]]
        left, right = axes[index // columns][2 * (index % columns) : 2 * (index % columns) + 2]
        count = min(len(run["loss"]), len(control["loss"]))
        difference = less(run["loss"][:count], control["loss"][:count])
        left.plot(range(1, count + 1, 4), smooth(difference, WINDOW)[::4], color=ACCENT, linewidth=1)
        left.axhline(0, color=PALE, linewidth=0.8)
        left.set_title(run["name"], fontsize=8, loc="left")
        for each, colour in ((control, PALE), (run, ACCENT)):
            norms = smooth(each["gradient_norm"], 5)
            right.plot(range(1, len(norms) + 1, 4), norms[::4], color=colour, linewidth=0.9)
        right.set_yscale("log")
        right.yaxis.set_minor_formatter(NullFormatter())
        right.set_title("gradient norm", fontsize=8, loc="right")
        for axis in (left, right):
            axis.set_visible(True)
            plain(axis)
    figure.supxlabel(
        f"step; left of each pair: training loss less the control's, same batches, mean of {WINDOW} (grey: control)",
        fontsize=8,
    )
    figure.tight_layout()
    figure.savefig(path, metadata=metadata)
    plt.close(figure)
