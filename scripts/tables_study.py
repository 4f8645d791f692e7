"""The blocks of the training studies: what each finished model's loss is, through its own attention and the exact one.

All models of a study are judged on the same held-out documents, so differences are paired: a mean over documents of the
difference, and its standard error. That error knows nothing of what another seed would have given; the run "bf16, other
weights" does, once.
"""

from __future__ import annotations

import math
import statistics
from typing import Any

from results import block, load, small, table

LEAK, FAULTS = "study-h200", "study-cpu"
BASE, OTHER = "bf16", "bf16, other weights"
TAIL, WINDOW = 100, 25
ONE_PAIR = 12.706
"""Student's 97.5% quantile with one degree of freedom: how many times a single difference of two seeds another may be."""


def runs(study: str) -> list[dict[str, Any]]:
    return [run for run in load({"leak": LEAK, "faults": FAULTS}[study])["runs"] if run["study"] == study]


def named(study: str) -> dict[str, dict[str, Any]]:
    return {run["name"]: run for run in runs(study)}


def paired(a: list[float], b: list[float]) -> tuple[float, float]:
    """The mean of a - b over documents, and its standard error."""
    differences = [x - y for x, y in zip(a, b, strict=True)]
    return statistics.fmean(differences), statistics.stdev(differences) / math.sqrt(len(differences))


def signed(a: list[float], b: list[float]) -> str:
    mean, error = (f"{x:+.4f}" for x in paired(a, b))
    return f"{'0.0000' if mean == '-0.0000' else mean} ({error[1:]})".replace("+0.0000", "0.0000")


def less(a: list[float], b: list[float]) -> list[float]:
    return [x - y for x, y in zip(a, b, strict=True)]


def smooth(values: list[float], window: int) -> list[float]:
    """Trailing means; the first ones are of what there is."""
    return [statistics.fmean(values[max(0, i + 1 - window) : i + 1]) for i in range(len(values))]


def seen(recipe: str) -> bool:
    import flamia

    return "prefix" not in flamia.Recipe.parse(recipe).claims


def future(recipe: str) -> str:
    return "**seen**" if seen(recipe) else "hidden"


def code(name: str | None) -> str:
    return f"`{name}`" if name and "/" in name else name or ""


def settings(found: dict[str, Any], study: str) -> dict[str, Any]:
    return next(s["settings"][study] for s in found["sessions"][::-1] if study in s["settings"])


def described(name: str, study: str) -> str:
    s, mine = settings(load(name), study), runs(study)
    shape = s["shape"]
    return (
        f"{shape['layers']} layers, width {shape['width']}, {shape['heads']} heads of {shape['head_dim']}, "
        f"{mine[0]['parameters'] / 1e6:.1f} million parameters; {s['steps']:,} steps of {s['documents']} documents of "
        f"{s['length']} bytes, {s['steps'] * s['documents'] * s['length'] / 1e6:.1f} MB of text in all; AdamW at "
        f"{s['learning_rate']:g} with {s['warmup']} steps of warmup and a cosine to a tenth, gradients clipped at "
        f"{s['clip']:g}. Judged on {len(mine[0]['own'])} held-out documents."
    )


def machine(name: str) -> str:
    found = load(name)
    text, sessions, versions = found["text"], found["sessions"], found["versions"]
    commits = list(dict.fromkeys(s["commit"] for s in sessions))
    calls = "one call" if len(sessions) == 1 else f"{len(sessions)} calls"
    return (
        f"{found['machine']['device'].replace('cpu', 'One core of a CPU')}, torch {versions['torch']}"
        + (f", Triton {versions['triton']}" if versions.get("triton") and "H200" in found["machine"]["device"] else "")
        + f"; commit {', '.join(commits)}, {sessions[0]['date'][:10]}; {calls}, "
        f"{sum(s['seconds'] for s in sessions):.0f} s in all. Text: {text['files']:,} sources, the Python modules of "
        f"{' and '.join(x.removesuffix(' (.py)') for x in text['sources'])}, {text['bytes']:,} bytes, SHA-256 "
        f"`{text['sha256']}`, a twentieth of the files held out ({text['train_bytes']:,} bytes in whole documents to train "
        f"on, {text['held_out_bytes']:,} held out)."
    )


# --- leak -----------------------------------------------------------------------------------------------------------


@block
def leak_machine() -> list[str]:
    differences = [x for s in load(LEAK)["sessions"] for x in s["check"]["largest_difference"].values()]
    return [
        f"{machine(LEAK)} Before training, O, dQ, dK and dV of each recipe's folded attention were compared with the plain "
        f"reference's on this card: largest difference {small(max(differences))}."
    ]


@block
def leak_setting() -> list[str]:
    return [described(LEAK, "leak")]


@block
def leak_losses() -> list[str]:
    mine = named("leak")
    base, rows = mine[BASE], []
    for name, run in mine.items():
        if run["diverged_at"]:
            rows.append([code(name), future(run["arithmetic"]), f"diverged at step {run['diverged_at']}", *[""] * 5])
            continue
        own, exact = (statistics.fmean(run[kind]) for kind in ("own", "exact"))
        rows.append([code(name), future(run["arithmetic"]), f"{statistics.fmean(run['loss'][-TAIL:]):.4f}", f"{own:.4f}",
                     f"{exact:.4f}", signed(run["own"], run["exact"]),
                     *("" if run is base else signed(run[kind], base["exact"]) for kind in ("own", "exact"))])  # fmt: skip
    head = (
        f"trained through | the future | training, last {TAIL} steps | own attention | exact attention | own - exact | "
        "own - bf16's exact | exact - bf16's exact"
    )
    return table(head, rows)


@block
def leak_words() -> list[str]:
    mine = named("leak")
    floor = abs(paired(mine[OTHER]["exact"], mine[BASE]["exact"])[0])
    gaps = {n: paired(r["exact"], mine[BASE]["exact"])[0] for n, r in mine.items() if n not in (BASE, OTHER)}
    near = {name: gap for name, gap in gaps.items() if abs(gap) < floor}
    far = {name: gap for name, gap in gaps.items() if abs(gap) > ONE_PAIR * floor}
    told = ", ".join(f"{code(n)} {gap:+.3f} ({abs(gap) / floor:.0f} times the floor)" for n, gap in far.items())
    between = [code(n) for n in gaps if n not in near and n not in far]
    return [
        f"**The noise floor is {floor:.4f}**: so much two bf16 models differ that differ in nothing but the seed of their "
        f"weights. It is one draw; if differences of seeds are normal, one draw bounds another at 95% only to {ONE_PAIR:.1f} "
        f"times it, {ONE_PAIR * floor:.2f}. Beyond that bound: {told}. Within the floor itself: "
        + ", ".join(f"{code(n)} {gap:+.4f}" for n, gap in near.items())
        + f". In between: {', '.join(between) or 'none'}."
    ]


@block
def leak_use() -> list[str]:
    """A model that uses what it is shown has less to lose, or to win, through that attention than one that never saw it."""
    mine = named("leak")
    base, rows = mine[BASE], []
    for recipe, losses in base["through"].items():
        run = mine.get(recipe)
        cells = [code(recipe), future(recipe), signed(losses, base["exact"])]
        if run is None or run["diverged_at"]:
            rows.append([*cells, "not run", ""])
            continue
        before, after = less(losses, base["exact"]), less(run["own"], run["exact"])
        rows.append([*cells, signed(run["own"], run["exact"]), signed(after, before)])
    head = (
        "attention | the future | bf16's model: through it - exact | a model trained through it: own - exact | "
        "the second less the first"
    )
    return table(head, rows)


@block
def leak_swapped() -> list[str]:
    told = []
    for name, run in named("leak").items():
        for recipe, losses in run["through"].items():
            if name != BASE and recipe != name:
                told.append(
                    f"The model trained through {code(name)} judged through {code(recipe)}: {signed(losses, run['own'])} "
                    "against its own attention."
                )
    return [" ".join(told)]


@block
def leak_training() -> list[str]:
    mine = named("leak")
    base, rows = mine[BASE], []
    usual = smooth(base["gradient_norm"], WINDOW)
    for name, run in mine.items():
        norms, losses = run["gradient_norm"], smooth(run["loss"], WINDOW)
        high = [step for step, (a, b) in enumerate(zip(smooth(norms, WINDOW), usual), 1) if a > 2 * b]
        lowest = min(range(len(losses)), key=losses.__getitem__)
        how = {"torch": "torch", "kernels": "our kernels", "reference": "the reference"}[run["attention"]]
        rows.append([code(name), how, f"{run['step_ms']:.1f}", f"{losses[lowest]:.3f} at {lowest + 1}", f"{losses[-1]:.3f}",
                     f"{statistics.median(norms[-TAIL:]):.2f}", f"{max(norms[len(norms) // 8 :]):.2f}",
                     f"step {high[0]}" if high else "never"])  # fmt: skip
    head = (
        f"trained through | runs on | ms a step | lowest training loss (mean of {WINDOW}) | at the end | gradient norm, median "
        f"of the last {TAIL} | largest after an eighth | twice bf16's from"
    )
    return table(head, rows)


@block
def leak_missing() -> list[str]:
    from flamia.study.plan import STUDIES

    found = load(LEAK)
    done = {(run["study"], run["name"]) for run in found["runs"]}
    missing = {name: [r.name for r in study.runs if (name, r.name) not in done] for name, study in STUDIES.items()}
    why = [
        f"{key.removeprefix('leak: ')}: {words.split(',')[0]}"
        for s in found["sessions"]
        for key, words in s["not_run"].items()
    ]
    return [
        f"Not run on the card, for lack of device time: {', '.join(map(code, missing['leak']))} (each had begun and was given "
        f"up after a few steps: {'; '.join(why)}), and {len(missing['faults'])} of {len(STUDIES['faults'].runs)} runs of the "
        "second study."
    ]


# --- faults ---------------------------------------------------------------------------------------------------------


def residuals(run: dict[str, Any]) -> tuple[str, str]:
    """Of the last diagnosis: the largest layer's row residual, the largest share of U zeroed."""
    if not run["diagnostics"]:
        return "", ""
    layers = run["diagnostics"][-1]["layers"]
    zeroed = max(max(layer["u_zeroed_dq"], layer["u_zeroed_dk"]) for layer in layers)
    return f"{max(layer['row_residual'] for layer in layers):.2g}", f"{100 * zeroed:.1f}%"


@block
def faults_machine() -> list[str]:
    return [machine(FAULTS)]


@block
def faults_setting() -> list[str]:
    return [described(FAULTS, "faults")]


@block
def faults_losses() -> list[str]:
    mine, rows = named("faults"), []
    for name, run in mine.items():
        control = mine.get(run["control"] or "")
        norms = run["gradient_norm"]
        height = f"{statistics.median(norms[-TAIL:]):.2f} / {max(norms[len(norms) // 4 :]):.2f}"
        residual, zeroed = residuals(run)
        if run["diverged_at"]:
            end = [f"diverged at step {run['diverged_at']}", "", ""]
        else:
            against = signed(run["exact"], control["exact"]) if control and not control["diverged_at"] else ""
            end = [f"{statistics.fmean(run['exact']):.4f}", against, height]
        rows.append([code(name), code(run["control"]), *end, residual, zeroed])
    head = (
        "run | control | loss, exact attention | less the control's | gradient norm, late / largest | row residual | "
        "U zeroed"
    )
    return table(head, rows)


@block
def faults_words() -> list[str]:
    mine = named("faults")
    sound = {n: statistics.fmean(r["exact"]) for n, r in mine.items() if r["control"] is None and not r["diverged_at"]}
    spread = max(sound.values()) - min(sound.values())
    gaps = {n: paired(r["exact"], mine[r["control"]]["exact"])[0] for n, r in mine.items() if r["control"] in mine}
    beyond = {n: gap for n, gap in gaps.items() if abs(gap) > spread}
    told = ", ".join(f"{code(n)} {gap:+.4f}" for n, gap in beyond.items())
    return [
        f"The {len(sound)} runs without a fault ({', '.join(map(code, sound))}) end within **{spread:.4f}** of one another: "
        "what a fault does is told from what any rounding does only beyond that. "
        + (f"Beyond it: {told}." if told else "None of the faults is beyond it.")
    ]


@block
def faults_missing() -> list[str]:
    from flamia.study.plan import STUDIES

    absent = [run.name for run in STUDIES["faults"].runs if run.name not in named("faults")]
    return [f"Not run at this size either: {'; '.join(map(code, absent))}." if absent else "All runs of the study ran."]
