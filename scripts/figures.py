"""Draw the pictures of README and docs from what the library computes: python scripts/figures.py [folder]."""

from __future__ import annotations

import sys
from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
import torch
from matplotlib.patches import Patch

import flamia

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


if __name__ == "__main__":
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "docs/figures")
    folder.mkdir(parents=True, exist_ok=True)
    two_tokens(folder / "two_tokens.svg")
    leaks(folder / "leaks.svg")
