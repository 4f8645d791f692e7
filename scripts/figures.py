"""Draw the pictures of README and docs: python scripts/figures.py [folder [mass.svg ...]].

``two_tokens`` and ``leaks`` show what the library computes here; the others are drawn from docs/results, and say in their
metadata from which bytes.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
import figures_more
import figures_study
import matplotlib.pyplot as plt
import torch
from matplotlib.patches import Patch

import flamia

RESULTS = Path(__file__).parents[1] / "docs" / "results"
INK, ACCENT, PALE = "#22313f", "#c0392b", "#d7dee5"
plt.rcParams.update({"svg.hashsalt": "flamia", "font.size": 10, "axes.edgecolor": INK, "text.color": INK})


def two_tokens(path: Path) -> None:
    """The first of two tokens that share a scale, beside a small and a large neighbour."""
    figure, axes = plt.subplots(1, 2, figsize=(7.2, 2.2), sharey=True)
    for axis, second in zip(axes, (0.5, 3.0)):
        scale = max(1.0, second)
        reads = [round(value / scale) * scale for value in (1.0, second)]
        colours = [ACCENT if reads[0] != 1.0 else INK, PALE]
        axis.bar((0, 1), (1.0, second), width=0.55, fill=False, edgecolor=INK, linestyle=":")
        axis.bar((0, 1), reads, width=0.35, color=colours)
        axis.set_xticks((0, 1), ("token 0", "token 1\n(the future)"))
        axis.set_title(f"second value {second:g}: token 0 reads {reads[0]:g}", fontsize=10)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].plot([], [], color=INK, linestyle=":", label="value")
    axes[0].plot([], [], color=INK, linewidth=6, label="what is read")
    axes[0].legend(frameon=False, fontsize=9)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


def dependency(recipe: str, length: int = 96) -> torch.Tensor:
    """How much O of row i changes, relative to its norm, when V of token j becomes large: (row, token)."""
    generator = torch.Generator().manual_seed(0)
    draw = lambda: torch.randn(length, 1, 32, generator=generator).bfloat16()  # noqa: E731
    q, k, v = draw(), draw(), (draw().float() * 2.0**-8).bfloat16()
    cu = torch.tensor([0, length], dtype=torch.int32)
    call = lambda v: flamia.attention_varlen(q, k, v, cu, causal=True, recipe=recipe).float()  # noqa: E731
    base, change = call(v), torch.zeros(length, length)
    for token in range(length):
        disturbed = v.clone()
        disturbed[token] = 8.0
        change[:, token] = ((call(disturbed) - base).norm(dim=(1, 2)) / base.norm(dim=(1, 2))).clamp(max=1)
    return change


def leaks(path: Path) -> None:
    """Which token reaches which row: scales over 32 tokens beside the default."""
    figure, axes = plt.subplots(1, 2, figsize=(7.6, 3.7), sharey=True)
    for axis, recipe, title in zip(
        axes, ("mxfp8/fast", str(flamia.Recipe.strict())), ("scales over 32 tokens", "flamia, the default")
    ):
        change = dependency(recipe)
        row, token = torch.meshgrid(torch.arange(len(change)), torch.arange(len(change)), indexing="ij")
        picture = torch.full((*change.shape, 3), 1.0)
        picture[(token <= row) & (change > 0)] = torch.tensor([0.84, 0.87, 0.90])
        picture[(token > row) & (change > 0)] = torch.tensor([0.75, 0.22, 0.17])
        seen = int(((token > row) & (change > 0)).sum())
        axis.imshow(picture, interpolation="nearest")
        axis.set_title(f"{title}\n{seen} pairs see the future", fontsize=10, color=ACCENT if seen else INK)
        axis.set_xlabel("token whose V changes")
    axes[0].set_ylabel("row of O that moves")
    squares = [
        Patch(color="#d6dee6", label="sees the token, and moves"),
        Patch(color="#bf382b", label="does not see it, and moves"),
    ]
    figure.legend(handles=squares, loc="lower center", ncols=2, frameon=False, fontsize=9)
    figure.tight_layout(rect=(0, 0.06, 1, 1))
    figure.savefig(path, metadata={"Date": None})


def results(name: str) -> tuple[Any, dict[str, Any]]:
    """A committed file, and the metadata of a picture drawn from it."""
    raw = (RESULTS / f"{name}.json").read_bytes()
    return json.loads(raw), {"Date": None, "Description": f"docs/results/{name}.json {hashlib.sha256(raw).hexdigest()}"}


def mass(path: Path) -> None:
    """What O keeps of its sum with V = 1, and dV with dO = 1, by length; the file has distances from 1."""
    found, metadata = results("peers-h200")
    rows: dict[str, list[dict[str, Any]]] = {}
    for m in found["mass"]:
        if m["refused"] is None:
            rows.setdefault(m["target"], []).append(m)
    ours, others = "flamia:mxfp8_scores/strict", [name for name in rows if not name.startswith(("flamia", "cudnn"))]
    figure, axes = plt.subplots(1, 2, figsize=(7.6, 3.6), sharey=True)
    for axis, column, title in zip(axes, ("o_bias", "dv_bias"), ("mean of O where V = 1", "sum of dV where dO = 1")):
        draw = lambda name, **style: axis.plot(  # noqa: B023, E731
            [m["length"] for m in rows[name]], [1 - m[column] for m in rows[name]], **style  # noqa: B023
        )  # fmt: skip
        for name in others:
            draw(name, color="#8a99a6", linewidth=1, marker="|", markersize=9, label=name)
        draw(ours, color=INK, linewidth=2, marker="o", markersize=4, label=ours)
        draw("cudnn:fp8", color=ACCENT, linewidth=2, marker="s", markersize=4, label="cudnn:fp8")
        draw("cudnn:fp8-current", color="#e8a49c", linewidth=1.2, linestyle="--", label="cudnn:fp8-current")
        axis.set_xscale("log", base=2)
        axis.set_xticks([m["length"] for m in rows[ours]], [f"{m['length'] // 1024}k" for m in rows[ours]])
        axis.set(title=title, xlabel="tokens", ylim=(0, 1.08))
        axis.title.set_fontsize(10)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("share that is kept (1 is right)")
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncols=4, frameon=False, fontsize=8)
    figure.tight_layout(rect=(0, 0.17, 1, 1))
    figure.savefig(path, metadata=metadata)
    plt.close(figure)


def speed(path: Path) -> None:
    """Training call against flash-attn-4, workload by workload: the median of the rounds, least and greatest."""
    found, metadata = results("bench-h200")
    loads = found["workloads"][::-1]
    figure, axis = plt.subplots(figsize=(7.2, 3.6))
    for y, load in enumerate(loads):
        least, middle, greatest = load["ratios"]["flash-attn-4"]["train"]
        axis.plot((least, greatest), (y, y), color=PALE, linewidth=5, solid_capstyle="butt")
        axis.plot(middle, y, "o", color=INK if middle >= 1 else ACCENT)
        axis.annotate(f"{middle:.3f}", (1.26, y), va="center", fontsize=9, annotation_clip=False)
    axis.axvline(1, color=INK, linewidth=1)
    axis.set_yticks(range(len(loads)), [f"{load['name']}  ({load['group']})" for load in loads], fontsize=9)
    axis.set(xlim=(0.85, 1.25), xlabel="time of flash-attn-4 over ours, a training call (bar: the rounds)")
    axis.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, metadata=metadata)
    plt.close(figure)


def study(draw: Callable[..., None], name: str) -> Callable[[Path], None]:
    return lambda path: draw(*results(name), path)


PICTURES: dict[str, Callable[[Path], None]] = {
    "two_tokens.svg": two_tokens,
    "leaks.svg": leaks,
    "mass.svg": mass,
    "speed.svg": speed,
    "parts.svg": study(figures_more.parts, "bench-more-h200"),
    "rotation.svg": study(figures_more.rotation, "closeness-h200"),
    "study_leak.svg": study(figures_study.leak, "study-h200"),
    "study_curves.svg": study(figures_study.curves, "study-h200"),
    "study_faults.svg": study(figures_study.faults, "faults-h200"),
}

if __name__ == "__main__":
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "docs/figures")
    folder.mkdir(parents=True, exist_ok=True)
    for name in sys.argv[2:] or PICTURES:
        PICTURES[name](folder / name)
