"""The report: one HTML file that needs nothing beside it. Curves are SVG, heat maps PNG, both inside the page."""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Sequence
from importlib import resources
from typing import Any

from flamia import accuracy, info
from flamia.console import require
from flamia.demo.run import Demo
from flamia.demo.text import TextMap
from flamia.train import plots

INK = "#1f2933"


def render(demo: Demo) -> str:
    """The whole page as text."""
    jinja2 = require("jinja2")
    template = resources.files("flamia.demo").joinpath("report.html.j2").read_text(encoding="utf-8")
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(template).render(
        audit=audit_table(demo.audit),
        explained=[explained(report) for report in demo.explained],
        text=text_rows(demo.text),
        text_picture=png(text_figure(demo.text)),
        curves=plots.svg(plots.loss_curves(demo.runs)),
        runs=[run_row(run) for run in demo.runs],
        model=model_line(demo.runs[0]),
        accuracy=accuracy_groups(demo.accuracy),
        accuracy_columns=[name for name, _ in accuracy.COLUMNS[1:]],
        accuracy_tokens=demo.tokens,
        data=demo.data,
        seconds=demo.seconds,
        facts=info.collect(),
        caught=controls_caught(demo.audit),
    )


def png(figure: Any) -> str:
    out = io.BytesIO()
    figure.savefig(out, format="png", dpi=130)
    return base64.b64encode(out.getvalue()).decode("ascii")


def audit_table(audit: Any) -> dict[str, Any]:
    """Preset by contract: what the audit itself prints, with a status for the colour of each cell."""
    from flamia.audit import CONTRACTS

    shown = [
        name for name in CONTRACTS if any(row.report.statuses.get(name, "untried") != "untried" for row in audit.rows)
    ]
    rows = []
    for recipe in audit.recipes():
        cells = []
        for name in shown:
            status, claimed, *_ = audit.cell(recipe, name)
            cells.append(
                {"text": audit.cell_text(recipe, name), "status": status if claimed else f"{status} unclaimed"}
            )
        rows.append({"recipe": recipe, "control": recipe in controls(), "cells": cells})
    return {
        "verdict": audit.verdict,
        "contracts": [{"name": name, "meaning": CONTRACTS[name]} for name in shown],
        "rows": rows,
        "reasons": [f"{row.recipe}, {row.mask.name}: {reason}" for row in audit.rows for reason in row.report.reasons],
        "missed": audit.missed,
        "audits": len(audit.rows),
        "calls": sum(row.report.calls for row in audit.rows),
        "comparisons": sum(sum(row.report.tried.values()) for row in audit.rows),
    }


def controls() -> frozenset[str]:
    from flamia.recipe import CONTROLS

    return frozenset(CONTROLS)


def controls_caught(audit: Any) -> str:
    """How many of the recipes that must be seen to leak were."""
    known = [recipe for recipe in audit.recipes() if recipe in controls()]
    missed = {text.split(" ")[0] for text in audit.missed}
    return f"{len([recipe for recipe in known if recipe not in missed])} of {len(known)}"


def explained(report: Any) -> dict[str, Any]:
    """A leaking recipe's map of who moves whom, and the auditor's reading of it."""
    from flamia.audit import page

    diagnosis = report.diagnosis
    return {
        "name": report.target["name"],
        "sentences": diagnosis.sentences if diagnosis else ["nothing moved"],
        "picture": png(page.map_figure(diagnosis.map)) if diagnosis and diagnosis.map else None,
        "moved": png(page.moved_figure(report)),
    }


def text_rows(maps: Sequence[tuple[str, TextMap]]) -> list[dict[str, str]]:
    return [
        {
            "name": name,
            "moved": f"{found.moved} of {found.watched}",
            "largest": f"{found.largest:.2g}" if found.moved else "0",
            "status": "leak" if found.moved else "",  # a zero on one text proves nothing: no green
        }
        for name, found in maps
    ]


def text_figure(maps: Sequence[tuple[str, TextMap]]) -> Any:
    """One panel per attention: the cut upwards, the row to the right, colour for the size of what moved."""
    across = min(3, len(maps))
    down = math.ceil(len(maps) / across)
    figure = require("matplotlib.figure").Figure(figsize=(1 + 3 * across, 2.9 * down), layout="constrained")
    axes = figure.subplots(down, across, squeeze=False, sharex=True, sharey=True).flatten()
    largest = max([found.largest for _, found in maps] + [1e-6])
    image = None
    for panel, (name, found) in zip(axes, maps):
        rows = found.change.shape[1]
        size = found.change.clamp(min=1e-6).log10()
        size[found.change == 0] = -6.0
        extent = (-found.before - 0.5, rows - found.before - 0.5, -0.5, len(found.cuts) - 0.5)
        image = panel.imshow(
            size.numpy(), cmap="Reds", vmin=-6, vmax=math.log10(largest), aspect="auto", origin="lower", extent=extent,
            interpolation="nearest",
        )  # fmt: skip
        panel.step(found.cuts, range(len(found.cuts)), color=INK, linewidth=1)
        panel.axvline(-0.5, color="#9aa5b1", linewidth=0.8)
        panel.set_yticks(range(0, len(found.cuts), 6), found.cuts[::6])
        panel.set_title(f"{name}: {found.moved} moved", fontsize=9, loc="left")
        panel.tick_params(labelsize=8, colors="#4a5459")
    for panel in axes[len(maps) :]:
        panel.set_visible(False)
    figure.supxlabel("position of a prediction (left of 0: the document in front)", fontsize=9)
    figure.supylabel("text replaced from", fontsize=9)
    if image is not None:
        bar = figure.colorbar(image, ax=list(axes), shrink=0.7)
        bar.set_label("log10 of the largest change of a logit", fontsize=8)
        bar.ax.tick_params(labelsize=8)
    return figure


def run_row(run: Any) -> dict[str, str]:
    found = run.gap
    return {
        "recipe": run.config.recipe,
        "training": f"{run.summary()['final_training_loss']:.4f}",
        "own": f"{found.own:.4f}" if found else f"diverged at step {run.diverged_at}",
        "exact": f"{found.exact:.4f}" if found else "",
        "difference": f"{found.difference:+.5f} ± {found.standard_error:.5f}" if found else "",
        "seconds": f"{run.seconds:.0f}",
    }


def model_line(run: Any) -> str:
    config, shape = run.config, run.config.shape
    return (
        f"{run.parameters:,} parameters: {shape.layers} layers, width {shape.width}, {shape.heads} query and "
        f"{shape.kv_heads} key heads of {shape.head_dim}; {config.steps} steps of {config.tokens} bytes, documents up to "
        f"{config.context}, seed {config.seed}"
    )


def accuracy_groups(results: Sequence[accuracy.Accuracy]) -> list[dict[str, Any]]:
    kinds = dict.fromkeys(result.inputs for result in results)
    return [
        {"inputs": kind, "rows": [accuracy.cells(result)[1:] for result in results if result.inputs == kind]}
        for kind in kinds
    ]
