"""The report as a picture: how many times as fast as each peer, workload by workload. Hatched bars are of peers whose
sums are wrong; whiskers are the least and the greatest round."""

from __future__ import annotations

from typing import Any

from .peers import OURS

COLOURS = ("#1b4f72", "#b9770e", "#1e8449", "#922b21", "#6c3483")
TITLES = {"train": "whole training call", "forward": "forward"}


def speed(found: dict[str, Any]) -> Any:
    """A matplotlib figure with a panel for the training call and one for the forward."""
    from matplotlib.figure import Figure

    rows = found["workloads"]
    peers = list(dict.fromkeys(name for row in rows for name in row["ratios"] if name != OURS))
    figure = Figure(figsize=(max(7.0, 1.1 * len(rows) + 2), 6.4), layout="constrained")
    width = 0.8 / max(1, len(peers))
    for axes, (kind, title) in zip(figure.subplots(2, 1, sharex=True), TITLES.items()):
        for index, (name, colour) in enumerate(zip(peers, COLOURS)):
            for x, row in enumerate(rows):
                if (spread := row["ratios"].get(name, {}).get(kind)) is None:
                    continue
                low, middle, high = spread
                eligible = row["contenders"][name]["eligible"]
                axes.bar(
                    x + (index - (len(peers) - 1) / 2) * width, middle, width * 0.92,
                    yerr=[[middle - low], [high - middle]], error_kw={"elinewidth": 0.8},
                    color=colour if eligible else "none", edgecolor=colour, hatch=None if eligible else "///",
                )  # fmt: skip
            axes.plot([], [], color=colour, linewidth=6, label=name)
        axes.axhline(1, color="#7f8c8d", linewidth=1)
        axes.set_title(f"{title}: peer's time / ours (above 1: ours is faster)", fontsize=10, loc="left")
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
        axes.set_xticks(range(len(rows)), [row["name"] for row in rows], rotation=25, ha="right", fontsize=8)
    if peers:
        figure.axes[0].legend(frameon=False, fontsize=8)
    machine = found["machine"]["device"]
    figure.suptitle(f"{machine}, commit {found['commit']}, {found['date'][:10]}", fontsize=9)
    return figure
