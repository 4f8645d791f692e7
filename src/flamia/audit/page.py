"""One self-contained HTML page: verdicts, tables, and heat maps drawn with matplotlib and embedded as PNG.

Three pictures per callable. *What moved*: contract and tensor down, disturbed operand across, the largest change
on a logarithmic scale; a sound callable shows zeros only. *Where*: for every cut and operand, the earlier
positions that moved. *Who moves whom*, if something leaks: one column per disturbed token, one row per position;
marks above the diagonal are the future reaching back, and their steps are the groups that share a scale.
"""

from __future__ import annotations

import base64
import io
import math
from importlib import resources
from typing import TYPE_CHECKING, Any

from .contract import CONTRACTS, OPERANDS, TENSORS
from .diagnose import Map, heat
from .report import mass_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from .recipes import RecipeAudit
    from .report import Report

COLUMNS = (*OPERANDS, "all", "layout")
INK, PAPER = "#1f2933", "#ffffff"


def render(reports: list[Report], title: str | None = None, overview: RecipeAudit | None = None) -> str:
    """HTML of one report or of many; ``overview`` puts a preset-by-contract table in front."""
    import jinja2

    from .recipes import CAUGHT_IN

    template = resources.files("flamia.audit").joinpath("page.html.j2").read_text(encoding="utf-8")
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    table = None
    if overview is not None:
        shown = [c for c in CONTRACTS if any(r.report.statuses.get(c, "untried") != "untried" for r in overview.rows)]
        table = {
            "contracts": shown,
            "verdict": overview.verdict,
            "missed": overview.missed,
            "says": overview.says,
            "rows": [
                {
                    "name": name,
                    "control": name in CAUGHT_IN,
                    "cells": [
                        {"text": overview.cell_text(name, c), "status": overview.cell(name, c)[0]} for c in shown
                    ],
                }
                for name in overview.recipes()
            ],
        }
    cards = [
        {
            "report": r,
            "verdict": r.verdict,
            "contracts": CONTRACTS,
            # In a long list, a picture of nothing but zeros tells less than its table does.
            "moved": png(moved_figure(r)) if r.findings or overview is None else None,
            "where": png(where_figure(r)) if any(f.contract == "prefix" for f in r.findings) else None,
            "map": png(map_figure(r.diagnosis.map)) if r.diagnosis and r.diagnosis.map else None,
            "masses": [mass_text(m) for m in r.masses],
            "paragraph": r.paragraph,
        }
        for r in reports
    ]
    return environment.from_string(template).render(
        title=title or str(reports[0].target["name"]), cards=cards, table=table
    )


def figure_of(width: float, height: float) -> tuple[Figure, Axes]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), facecolor=PAPER, layout="constrained")
    return figure, figure.add_subplot()


def png(figure: Figure) -> str:
    out = io.BytesIO()
    figure.savefig(out, format="png", dpi=110)
    return base64.b64encode(out.getvalue()).decode("ascii")


def moved_figure(report: Report) -> Figure:
    """Contract and tensor by operand: log10 of the largest relative change; 0 where nothing moved, blank where
    nothing was asked.
    """
    cells: dict[tuple[str, str, str], dict[str, Any]] = {
        (c["contract"], c["tensor"], c["operand"]): c for c in report.cells()
    }
    rows = [(c, t) for c in CONTRACTS for t in TENSORS if any((c, t, o) in cells for o in COLUMNS)]
    figure, axes = figure_of(6.4, 0.9 + 0.26 * len(rows))
    image = []
    for y, (contract, tensor) in enumerate(rows):
        line = []
        for x, operand in enumerate(COLUMNS):
            cell = cells.get((contract, tensor, operand))
            value = (
                math.nan
                if cell is None
                else 0.0
                if cell["largest"] is None
                else 5 + math.log10(min(max(cell["largest"], 1e-5), 2))
            )
            line.append(value)
            if cell is not None:
                text = (
                    "0"
                    if cell["largest"] is None
                    else "nan"
                    if math.isinf(cell["largest"])
                    else f"{cell['largest']:.1g}"
                )
                axes.text(x, y, text, ha="center", va="center", fontsize=7, color="white" if value > 2.5 else INK)
        image.append(line)
    axes.imshow(image, cmap="Reds", vmin=0, vmax=5.3, aspect="auto")
    axes.set_xticks(range(len(COLUMNS)), COLUMNS)
    axes.set_yticks(range(len(rows)), [f"{c} {t}" for c, t in rows], fontsize=7)
    axes.set_title("what moved (largest change relative to its row), by disturbed operand", fontsize=9)
    return figure


def where_figure(report: Report) -> Figure:
    """Earlier positions moved by a suffix: one line per cut, operand and tensor."""
    found = [f for f in report.findings if f.contract == "prefix" and f.cut is not None]
    lines = sorted({(int(f.cut or 0), f.operand, f.tensor) for f in found})[:60]
    length = max(cut for cut, _, _ in lines) + 1
    image = [[0.0] * length for _ in lines]
    for f in found:
        key = (int(f.cut or 0), f.operand, f.tensor)
        for p in f.positions if key in lines else ():
            if p < length:
                image[lines.index(key)][p] = 1.0
    figure, axes = figure_of(7.6, 0.9 + 0.17 * len(lines))
    axes.imshow(image, cmap="Reds", vmin=0, vmax=1.3, aspect="auto", interpolation="nearest")
    for y, (cut, _, _) in enumerate(lines):
        axes.plot([cut - 0.5] * 2, [y - 0.5, y + 0.5], color=INK, linewidth=1.5)
    axes.set_yticks(range(len(lines)), [f"{o} from {c}: {t}" for c, o, t in lines], fontsize=6)
    axes.set_xlabel("position in the document (bar: the cut, red: earlier positions that moved)", fontsize=8)
    return figure


def map_figure(m: Map) -> Figure:
    figure, axes = figure_of(5.6, 5.2)
    axes.imshow(heat(m).tolist(), cmap="Reds", vmin=0, vmax=1.3, aspect="auto", interpolation="nearest")
    tokens = list(m.columns)
    axes.plot(range(len(tokens)), tokens, color=INK, linewidth=1)
    axes.set_xticks(list(range(0, len(tokens), 4)), [str(t) for t in tokens[::4]], fontsize=6, rotation=90)
    axes.set_xlabel(f"disturbed token ({m.disturbance} of {m.operand})", fontsize=8)
    axes.set_ylabel(f"position whose {m.tensor} moved (above the line: earlier ones)", fontsize=8)
    return figure
