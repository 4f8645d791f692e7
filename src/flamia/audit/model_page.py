"""The page of a model's report: the verdict in a paragraph, the contracts, the modules, and heat maps.

Three pictures, as for an attention (``page``). *What moved*: contract down, what was disturbed across. *Where*: earlier
positions whose logits moved, for every cut. *Who moves whom*: single positions disturbed inside the module in which a
leak enters; marks above the diagonal are the future reaching back.
"""

from __future__ import annotations

import math
from importlib import resources
from typing import TYPE_CHECKING

from .page import INK, figure_of, map_figure, png

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from .model_report import ModelReport


def render(report: ModelReport) -> str:
    import jinja2

    from .model_report import MODEL_CONTRACTS

    template = resources.files("flamia.audit").joinpath("model.html.j2").read_text(encoding="utf-8")
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(template).render(
        r=report,
        contracts=MODEL_CONTRACTS,
        modules=modules(report),
        moved=png(moved_figure(report)),
        where=png(where_figure(report)) if _where(report) else None,
        map=png(map_figure(report.map)) if report.map else None,
    )


def modules(report: ModelReport) -> list[tuple[str, str]]:
    """(module, what is known of it)."""
    out = []
    if report.origin:
        out.append((report.origin.module or "the model itself", f"it enters here ({report.origin.kind})"))
    if report.shown_by and (report.origin is None or report.shown_by.module != report.origin.module):
        out.append(
            (report.shown_by.module or "the model itself", f"the first output to show it ({report.shown_by.kind})")
        )
    out += [(name, "carries it") for name in report.carriers]
    return out + [(name, "leaks as well") for name in report.affected or () if not out or name != out[0][0]]


def moved_figure(report: ModelReport) -> Figure:
    """log10 of the largest change of a row of logits."""
    operands = list(dict.fromkeys(operand for _, operand in report.tried))
    contracts = [c for c in report.statuses if any(c == contract for contract, _ in report.tried)]
    figure, axes = figure_of(2.2 + 0.8 * len(operands), 1.0 + 0.3 * len(contracts))
    image = []
    for y, contract in enumerate(contracts):
        line = []
        for x, operand in enumerate(operands):
            if (contract, operand) not in report.tried:
                line.append(math.nan)
                continue
            sizes = [f.largest for f in report.findings if (f.contract, f.operand) == (contract, operand)]
            value = 5 + math.log10(min(max(*sizes, 1e-5), 2)) if sizes else 0.0
            text = "0" if not sizes else "nan" if math.isinf(max(sizes)) else f"{max(sizes):.1g}"
            axes.text(x, y, text, ha="center", va="center", fontsize=7, color="white" if value > 2.5 else INK)
            line.append(value)
        image.append(line)
    axes.imshow(image, cmap="Reds", vmin=0, vmax=5.3, aspect="auto")
    axes.set_xticks(range(len(operands)), operands, fontsize=7, rotation=30, ha="right")
    axes.set_yticks(range(len(contracts)), contracts, fontsize=7)
    axes.set_title("what moved (largest change relative to a row of logits), by what was disturbed", fontsize=9)
    return figure


def _where(report: ModelReport) -> list[tuple[int, str]]:
    found = {(f.cut, f.operand) for f in report.findings if f.contract == "prefix" and f.cut}
    return sorted((cut, operand) for cut, operand in found if cut)[:60]


def where_figure(report: ModelReport) -> Figure:
    """Earlier positions whose logits moved: one line for every cut and what was disturbed behind it."""
    lines = _where(report)
    length = max(cut for cut, _ in lines) + 1
    image = [[0.0] * length for _ in lines]
    for f in report.findings:
        if f.contract == "prefix" and (f.cut, f.operand) in lines:
            for p in f.positions:
                image[lines.index((f.cut or 0, f.operand))][p] = 1.0
    figure, axes = figure_of(7.6, 0.9 + 0.17 * len(lines))
    axes.imshow(image, cmap="Reds", vmin=0, vmax=1.3, aspect="auto", interpolation="nearest")
    for y, (cut, _) in enumerate(lines):
        axes.plot([cut - 0.5] * 2, [y - 0.5, y + 0.5], color=INK, linewidth=1.5)
    axes.set_yticks(range(len(lines)), [f"{operand} from {cut}" for cut, operand in lines], fontsize=6)
    axes.set_xlabel("position (bar: the cut, red: earlier positions whose logits moved)", fontsize=8)
    return figure
