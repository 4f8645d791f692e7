"""Pictures of closeness and of what the nine packs do not tell; ``figures.py`` hands over a committed file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt

INK, ACCENT, PALE = "#22313f", "#c0392b", "#d7dee5"
FORMATS = {"e4m3:feature32": "MXFP8", "nvfp4:feature16": "NVFP4", "e2m1:feature32": "MXFP4"}
PARTS = {
    "lists": ("lists of work", "#7b241c"),
    "encode": ("encoding Q, K, V", "#c0392b"),
    "encode_gradient": ("encoding dO", "#e8a49c"),
    "forward": ("forward", "#22313f"),
    "dkv": ("dK, dV", "#66788a"),
    "dq": ("dQ", "#b3bfca"),
}


def parts(found: dict[str, Any], metadata: dict[str, Any], path: Path) -> None:
    """What a training call's time goes to, workload by workload, as shares of the parts' sum."""
    rows = found["share"][::-1]
    figure, axis = plt.subplots(figsize=(7.6, 2.9))
    for y, row in enumerate(rows):
        whole, start = sum(row["ms"].values()), 0.0
        for name, (_, colour) in PARTS.items():
            width = row["ms"][name] / whole
            axis.barh(y, width, left=start, color=colour, height=0.62)
            start += width
        axis.annotate(f"{row['train_ms']:.1f} ms", (1.01, y), va="center", fontsize=9, annotation_clip=False)
    axis.set_yticks(range(len(rows)), [row["name"] for row in rows], fontsize=9)
    axis.set(xlim=(0, 1), xlabel="share of a training call (red: quantisation)")
    axis.spines[["top", "right"]].set_visible(False)
    for label, colour in PARTS.values():
        axis.barh(0, 0, color=colour, label=label)
    figure.legend(loc="lower center", ncols=6, frameon=False, fontsize=8)
    figure.tight_layout(rect=(0, 0.08, 0.96, 1))
    figure.savefig(path, metadata=metadata)
    plt.close(figure)


def rotation(found: dict[str, Any], metadata: dict[str, Any], path: Path) -> None:
    """Cosine of O against the factor of K's outliers, scores alone in low bits: without and with rotation."""
    lines: dict[tuple[str, bool], list[tuple[int, float]]] = {}
    for row in found["rows"]:
        if row["inputs"].startswith("outlier") and row["backend"] == "reference":
            key = FORMATS[row["who"].rpartition("=")[2]], "rotate=True" in row["who"]
            lines.setdefault(key, []).append((int(row["inputs"].partition(":")[2]), row["cosine"]["o"]))
    figure, axes = plt.subplots(1, 3, figsize=(7.6, 2.8), sharey=True)
    for axis, name in zip(axes, FORMATS.values()):
        for turned, colour, label in ((False, INK, "as it is"), (True, ACCENT, "rotated")):
            x, y = zip(*lines[name, turned])
            axis.plot(x, y, "o--" if turned else "s-", color=colour, label=label, markersize=5)
        axis.set_xticks(x)
        axis.set_title(f"scores in {name}", fontsize=10)
        axis.set_xlabel("factor of K's outliers")
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("cosine of O")
    axes[0].legend(frameon=False, fontsize=9, loc="lower left")
    figure.tight_layout()
    figure.savefig(path, metadata=metadata)
    plt.close(figure)
