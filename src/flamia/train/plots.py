"""Loss curves. Two panels: the losses, and each run's distance to a baseline step by step.

All runs read the same batches in the same order, so the distance is paired: it shows in the fourth digit what the
first panel hides under the noise of the batches.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flamia.console import require
from flamia.train.evaluate import EXACT, TORCH
from flamia.train.loop import Run

COLOURS = ("#1b4f72", "#b9770e", "#6c3483", "#1e8449", "#922b21", "#5d6d7e")
BASELINE = "#7f8c8d"


def smoothed(values: Sequence[float], window: int) -> list[float]:
    """Trailing mean over up to ``window`` values."""
    result, total = [], 0.0
    for index, value in enumerate(values):
        total += value - (values[index - window] if index >= window else 0.0)
        result.append(total / min(index + 1, window))
    return result


def style(axes: Any) -> None:
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color("#aab2b8")
    axes.tick_params(colors="#4a5459", labelsize=9)
    axes.grid(axis="y", color="#e6e9eb", linewidth=0.8)
    axes.set_axisbelow(True)


def loss_curves(runs: Sequence[Run], baselines: Sequence[str] = (EXACT, TORCH)) -> Any:
    """A matplotlib figure of the runs' training losses (smoothed) with validation losses as dots.

    The second panel appears when one of several runs has one of the recipes ``baselines``.
    """
    figure_module = require("matplotlib.figure")
    reference = next((run for run in runs if run.config.recipe in baselines), None)
    paired = reference is not None and len(runs) > 1
    figure = figure_module.Figure(figsize=(10, 3.8) if paired else (6.4, 3.8), layout="constrained")
    left, *rest = figure.subplots(1, 2 if paired else 1, squeeze=False)[0]
    palette = iter(COLOURS)
    for run in runs:
        colour = BASELINE if run is reference else next(palette)
        steps, values = run.series("loss")
        window = max(1, len(values) // 25)
        left.plot(steps, smoothed(values, window), color=colour, linewidth=1.6, label=run.config.recipe)
        left.plot(*run.series("validation"), color=colour, marker="o", markersize=4, linestyle="none")
        if paired and reference is not None and run is not reference:
            base: dict[int, float] = dict(zip(*reference.series("loss"), strict=True))
            shared = [(step, value - base[step]) for step, value in zip(steps, values, strict=True) if step in base]
            difference = smoothed([value for _, value in shared], window)
            rest[0].plot([step for step, _ in shared], difference, color=colour, linewidth=1.4, label=run.config.recipe)
    left.set_xlabel("step")
    left.set_ylabel("loss, nats per byte")
    left.set_title("training (lines) and validation (dots)", fontsize=10, loc="left")
    left.legend(frameon=False, fontsize=9)
    style(left)
    if paired and reference is not None:
        rest[0].axhline(0, color=BASELINE, linewidth=1)
        rest[0].set_xlabel("step")
        rest[0].set_title(
            f"training loss minus that of {reference.config.recipe}, same batches", fontsize=10, loc="left"
        )
        rest[0].legend(frameon=False, fontsize=9)
        style(rest[0])
    return figure


def save(figure: Any, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def svg(figure: Any) -> str:
    """The figure as an <svg> element to stand inside a page, text as text."""
    rc_context = require("matplotlib").rc_context
    buffer = io.StringIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "flamia", "font.family": "sans-serif"}):
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    text = buffer.getvalue()
    return text[text.index("<svg") :]
