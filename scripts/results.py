"""What the makers of tables and pictures share: the committed results, Markdown tables, and the register of blocks."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "docs" / "results"
OURS_AUDITED = "flamia:mxfp8_scores/strict"
FP8 = "cudnn:fp8"
BLOCKS: dict[str, Callable[[], list[str]]] = {}


def load(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text())


def block(make: Callable[[], list[str]]) -> Callable[[], list[str]]:
    """Registers a function that makes the lines of the block of its name."""
    BLOCKS[make.__name__.replace("_", "-")] = make
    return make


def table(head: str, rows: list[list[Any]]) -> list[str]:
    names = head.split(" | ")
    cells = [[str(x).replace("|", "\\|") for x in row] for row in rows]
    return ["| " + " | ".join(row) + " |" for row in [names, ["---"] * len(names), *cells]]


def small(x: float | str | None) -> str:
    return "" if x is None else str(x) if isinstance(x, str) else "0" if x == 0 else f"{x:.2g}"


def of_rounds(ratio: list[float], digits: int = 3, bold: bool = False) -> str:
    """A ratio over the rounds, given as its least, its median and its greatest."""
    least, middle, greatest = ratio
    mark = "**" if bold else ""
    return f"{mark}{middle:.{digits}f}{mark} ({least:.2f} to {greatest:.2f})"


def masses(name: str) -> list[dict[str, Any]]:
    """A target's sums, at the lengths at which it answered."""
    return [m for m in load("peers-h200")["mass"] if m["target"] == name and m["refused"] is None]
