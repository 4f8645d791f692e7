"""The blocks of the training studies: what each finished model's loss is, through its own attention and the exact one.

All models are judged on the same held-out documents, so differences are paired: a mean over documents of the difference,
and its standard error.
"""

from __future__ import annotations

import math
import statistics
from typing import Any

from results import block, load, table

RESULT = "study-h200"
TAIL = 100


def runs(study: str) -> list[dict[str, Any]]:
    return [run for run in load(RESULT)["runs"] if run["study"] == study]


def paired(a: list[float], b: list[float]) -> tuple[float, float]:
    """The mean of a - b over documents, and its standard error."""
    differences = [x - y for x, y in zip(a, b, strict=True)]
    return statistics.fmean(differences), statistics.stdev(differences) / math.sqrt(len(differences))


def signed(a: list[float], b: list[float]) -> str:
    mean, error = paired(a, b)
    return f"{mean:+.4f} ({error:.4f})"


def future(recipe: str) -> str:
    import flamia

    return "hidden" if "prefix" in flamia.Recipe.parse(recipe).claims else "**seen**"


def settings(study: str) -> dict[str, Any]:
    return next(s["settings"][study] for s in load(RESULT)["sessions"][::-1] if study in s["settings"])


def described(study: str) -> str:
    s, mine = settings(study), runs(study)
    shape = s["shape"]
    return (
        f"{shape['layers']} layers, width {shape['width']}, {shape['heads']} heads of {shape['head_dim']}, "
        f"{mine[0]['parameters'] / 1e6:.1f} million parameters; {s['steps']:,} steps of {s['documents']} documents of "
        f"{s['length']} bytes, {s['steps'] * s['documents'] * s['length'] / 1e6:.1f} MB of text in all; AdamW at "
        f"{s['learning_rate']:g} with {s['warmup']} steps of warmup and a cosine to a tenth, gradients clipped at {s['clip']:g}"
    )


@block
def study_machine() -> list[str]:
    found = load(RESULT)
    text, sessions = found["text"], found["sessions"]
    commits = list(dict.fromkeys(s["commit"] for s in sessions))
    return [
        f"{found['machine']['device']}, torch {found['versions']['torch']}, Triton {found['versions'].get('triton')}; "
        f"commit {', '.join(commits)}, {sessions[0]['date'][:10]}; {len(sessions)} calls, "
        f"{sum(s['seconds'] for s in sessions):.0f} s in all. Text: {text['files']:,} Python sources of "
        f"{' and '.join(text['sources'])}, {text['bytes'] / 1e6:.1f} MB, SHA-256 {text['sha256'][:16]}, a twentieth of the "
        "files held out."
    ]


@block
def study_leak_setting() -> list[str]:
    documents = len(runs("leak")[0]["own"])
    return [f"{described('leak')}. Judged on {documents} held-out documents."]


@block
def study_leak() -> list[str]:
    mine = runs("leak")
    base = next(run for run in mine if run["name"] == "bf16")
    rows = []
    for run in mine:
        label = f"`{run['name']}`" if "/" in run["name"] else run["name"]
        how = {"torch": "torch", "kernels": "kernels", "reference": "reference"}[run["attention"]]
        if run["diverged_at"]:
            rows.append(
                [label, future(run["arithmetic"]), how, f"diverged at step {run['diverged_at']}", "", "", "", ""]
            )
            continue
        own, exact = (statistics.fmean(run[name]) for name in ("own", "exact"))
        rows.append([label, future(run["arithmetic"]), how, f"{own:.4f}", f"{exact:.4f}", signed(run["own"], run["exact"]),
                     "" if run is base else signed(run["own"], base["exact"]),
                     "" if run is base else signed(run["exact"], base["exact"])])  # fmt: skip
    head = (
        "trained through | the future | runs on | own attention | exact attention | own - exact | own - bf16's | "
        "exact - bf16's"
    )
    return table(head, rows)


@block
def study_through() -> list[str]:
    rows = []
    for run in runs("leak"):
        for recipe, losses in run.get("through", {}).items():
            label = f"`{run['name']}`" if "/" in run["name"] else run["name"]
            rows.append(
                [label, f"`{recipe}`", future(recipe), f"{statistics.fmean(losses):.4f}", signed(losses, run["exact"])]
            )
    return table("trained through | judged through | the future | loss | less exact attention's", rows)


def residuals(run: dict[str, Any]) -> tuple[str, str]:
    """Of the last diagnosis: the largest layer's row residual, the largest share of U zeroed."""
    if not run["diagnostics"]:
        return "", ""
    layers = run["diagnostics"][-1]["layers"]
    zeroed = max(max(layer["u_zeroed_dq"], layer["u_zeroed_dk"]) for layer in layers)
    return f"{max(layer['row_residual'] for layer in layers):.2g}", f"{100 * zeroed:.1f}%"


@block
def study_faults_setting() -> list[str]:
    return [f"{described('faults')}."]


@block
def study_faults() -> list[str]:
    mine = {run["name"]: run for run in runs("faults")}
    rows = []
    for name, run in mine.items():
        control = mine.get(run["control"] or "")
        label, beside = (f"`{x}`" if x and "/" in x else x or "" for x in (name, run["control"]))
        norms = run["gradient_norm"]
        largest = max(norms[len(norms) // 4 :])
        residual, zeroed = residuals(run)
        if run["diverged_at"]:
            rows.append([label, beside, f"diverged at step {run['diverged_at']}", "", "", residual, zeroed])
            continue
        against = signed(run["exact"], control["exact"]) if control and not control["diverged_at"] else ""
        rows.append([label, beside, f"{statistics.fmean(run['exact']):.4f}", against,
                     f"{statistics.median(norms[-TAIL:]):.2f} / {largest:.2f}", residual, zeroed])  # fmt: skip
    head = "run | control | loss, exact attention | less the control's | gradient norm, late / largest | row residual | U zeroed"
    return table(head, rows)
