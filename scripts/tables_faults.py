"""The blocks of the interventions: each model trained through an attention with one thing wrong, beside its control.

A difference from a control is judged against models that should not differ: bf16 from several seeds where the file has
them, and until then the attentions without a fault, all from the same weights. Both yardsticks are printed: an intervention
and its control share their first weights, so that chance may move them by less than seeds do.
"""

from __future__ import annotations

import statistics
from typing import Any

from results import block, table
from tables_study import (
    COUNTS,
    FAULTS,
    TAIL,
    WINDOW,
    Floor,
    code,
    described,
    leak_floor,
    listed,
    machine,
    mean,
    missing,
    named,
    paired,
    runs,
    seeds,
    signed,
    smooth,
)

BASE = "bf16/strict"
SINK = "sink"
WATCHED = (BASE, "mxfp8/fold", "U's scales 2^10", "nvfp4/fold", "4 bits, D from the given dO")


def late(run: dict[str, Any]) -> float:
    return statistics.median(run["gradient_norm"][-TAIL:])


def broken(run: dict[str, Any]) -> bool:
    """Whether its gradients ended twice as large as bf16's, or it did not end."""
    return bool(run["diverged_at"]) or late(run) > 2 * late(named("faults")[BASE])


def sunk(run: dict[str, Any]) -> bool:
    return "; sink " in run["arithmetic"]


def zeroed(layer: dict[str, float]) -> float:
    return max(layer["u_zeroed_dq"], layer["u_zeroed_dk"])


def residuals(run: dict[str, Any]) -> tuple[str, str]:
    """Of the last diagnosis, each layer's row residual and share of U zeroed."""
    if not run["diagnostics"]:
        return "", ""
    layers = run["diagnostics"][-1]["layers"]
    return (
        " / ".join(f"{layer['row_residual']:.2f}".removeprefix("0") for layer in layers),
        " / ".join(f"{100 * zeroed(layer):.0f}" for layer in layers),
    )


def draws() -> dict[str, float]:
    """bf16 from each of its first weights."""
    again = seeds(runs("faults"), named("faults")[BASE])
    return {run["name"]: mean(run) for run in again.values()}


def sound() -> dict[str, float]:
    """Every attention without fault, sink or breakdown, from the same first weights."""
    found = [run for run in runs("faults") if run["control"] is None and run["seed"] == 0]
    return {run["name"]: mean(run) for run in found if not (broken(run) or sunk(run))}


def unfaulted() -> dict[str, float]:
    """Models that should not differ: bf16 from other weights, or else attentions without a fault."""
    return draws() if len(draws()) > 1 else sound()


def differences() -> dict[str, float]:
    mine = named("faults")
    both = {n: mine[r["control"]] for n, r in mine.items() if r["control"] in mine and not r["diverged_at"]}
    return {
        n: paired(mine[n]["exact"], control["exact"])[0] for n, control in both.items() if not control["diverged_at"]
    }


@block
def faults_machine() -> list[str]:
    return [machine(FAULTS)]


@block
def faults_setting() -> list[str]:
    return [described(FAULTS, "faults")]


@block
def faults_losses() -> list[str]:
    mine, rows, against = named("faults"), [], differences()
    for name, run in mine.items():
        norms = run["gradient_norm"]
        height = f"{late(run):.2f} / {max(norms[len(norms) // 4 :]):.2f}"
        if run["diverged_at"]:
            end = [f"diverged at step {run['diverged_at']}", "", ""]
        else:
            gap = signed(run["exact"], mine[run["control"]]["exact"]) if name in against else ""
            end = [f"{mean(run):.4f}", gap, height]
        rows.append([code(name), code(run["control"]), *end, *residuals(run)])
    head = (
        "run | control | loss, exact attention | less the control's | gradient norm, late / largest | row residual, by layer | "
        "% of U zeroed, by layer"
    )
    return table(head, rows)


@block
def faults_words() -> list[str]:
    same = unfaulted()
    floor, mine = Floor(list(same.values())), named("faults")
    what = f"{COUNTS[len(same)]} models ({'; '.join(map(code, same))})"
    against = differences()
    plain = {n: gap for n, gap in against.items() if not (broken(mine[n]) or sunk(mine[n]))}
    beyond, near, between = floor.sorted(plain)
    other = {n: gap for n, gap in against.items() if n not in plain}
    elsewhere = leak_floor(runs("leak")).size
    if all(mine[name]["seed"] == 0 for name in same):
        what += " that have no fault and the same first weights"
        shorter = ""
    else:
        what += " that differ in nothing but the seed of their weights"
        close = Floor(list(sound().values()))
        shorter = (
            f"{COUNTS[len(sound())].capitalize()} models without a fault from the same first weights "
            f"({'; '.join(map(code, sound()))}) differ by {close.size:.4f}, a shorter yardstick from fewer models, with its "
            f"bound at {close.bound:.3f}. "
        )
    return [
        f"**The yardstick is {floor.size:.4f}**: so much {what} differ, by pairs (root mean square); if such losses are normal, "
        f"another pair stays at 95% below {floor.times:.1f} times that, {floor.bound:.3f}. {shorter}(Between bf16 models of "
        f"different first weights the leak study, whose models are larger, has {elsewhere:.4f}.) Beyond {floor.bound:.3f}: "
        f"{listed(beyond)}. Within the yardstick itself: {listed(near)}. In between: {listed(between)}. Runs whose own level is "
        f"another, so that this yardstick may be too short for them, in multiples of it: {listed(other, floor, 'yardstick')}."
    ]


@block
def faults_range() -> list[str]:
    """Where each model's loss lies among those of bf16's seeds, whichever its control."""
    losses, mine = draws(), named("faults")
    least, most, middle = min(losses.values()), max(losses.values()), statistics.fmean(losses.values())
    first = {n: mean(run) for n, run in mine.items() if run["seed"] == 0 and n not in losses and not run["diverged_at"]}
    within = {n: loss - middle for n, loss in first.items() if least <= loss <= most}
    without = {n: loss - middle for n, loss in first.items() if n not in within}
    told = ", ".join(f"{loss:.4f}" for loss in sorted(losses.values()))
    return [
        f"Losses of {COUNTS[len(losses)]} bf16 models, by size: {told}; mean {middle:.4f}, from which `{BASE}` itself is "
        f"{losses[BASE] - middle:+.4f} away. Between the least and the greatest of them, and so far from that mean: "
        f"{listed(within)}. Outside: {listed(without)}."
    ]


@block
def faults_beside() -> list[str]:
    """Differences that are nobody's control's, and how far back in its control's training a run with a sink ended."""
    mine, said, bound = named("faults"), [], Floor(list(unfaulted().values())).bound
    for a, b in (
        ("U's scales 2^10", "as much of U zeroed by chance"),
        ("blocks of 256 forward, 128 backward", "blocks of 256"),
        ("approximate in the forward only", BASE),
        ("secant in the forward only", BASE),
        ("sink, O from the exact V", SINK),
    ):
        if a in mine and b in mine:
            gap = signed(mine[a]["exact"], mine[b]["exact"])
            far = not sunk(mine[a]) and abs(mean(mine[a]) - mean(mine[b])) > bound
            said.append(f"{code(a)} less {code(b)}: {gap}{', beyond the bound' if far else ''}.")
    for name, run in mine.items():
        control = mine.get(run["control"] or "")
        if control and sunk(run) and run["seed"] == 0 and mean(run) > mean(control):
            end, path = smooth(run["loss"], WINDOW)[-1], smooth(control["loss"], WINDOW)
            step = next(i for i, loss in enumerate(path, 1) if loss < end)
            said.append(f"The training loss at which {code(name)} ends is its control's at step {step} of {len(path)}.")
    return [" ".join(said)]


@block
def faults_seeds() -> list[str]:
    """Interventions that were repeated from other weights, each beside its control from the same."""
    found, mine, rows = runs("faults"), named("faults"), []
    for first in (run for run in found if run["seed"] == 0 and run["control"] in mine):
        again = [run for _, run in sorted(seeds(found, first).items()) if run["control"] in mine]
        if len(again) > 1:
            each = [paired(run["exact"], mine[run["control"]]["exact"])[0] for run in again]
            rows.append([code(first["name"]), code(first["control"]), " / ".join(f"{x:+.4f}" for x in each),
                         f"{statistics.fmean(each):+.4f}", f"{min(each):+.4f} to {max(each):+.4f}"])  # fmt: skip
    if not rows:
        return ["No intervention has run from a second seed."]
    return table("run | control | less the control's, by seed | mean | least to greatest", rows)


@block
def faults_steps() -> list[str]:
    """What becomes of U while models train, and when the loss and the gradients follow."""
    mine, rows = named("faults"), []
    for name in WATCHED:
        run = mine.get(name)
        if run is None:
            continue
        losses, cells = smooth(run["loss"], WINDOW), []
        for told in run["diagnostics"]:
            step = told["step"]
            norm = statistics.median(run["gradient_norm"][step - WINDOW : step])
            shares = " ".join(f"{100 * zeroed(layer):.0f}" for layer in told["layers"])
            cells.append(f"{losses[step - 1]:.2f}; {norm:.{2 if norm < 10 else 0}f}; {shares}")
        rows.append([code(name), *cells])
    steps = [told["step"] for told in mine[BASE]["diagnostics"]]
    return table("run | " + " | ".join(f"step {step}" for step in steps), rows)


@block
def faults_missing() -> list[str]:
    return [missing(FAULTS, "faults")]
