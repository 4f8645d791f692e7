"""The blocks of the leak study: what each finished model's loss is, through its own attention and the exact one.

All models of a study are judged on the same held-out documents, so differences are paired: a mean over documents of the
difference, and its standard error. That error knows nothing of what another seed would have given; runs that differ in
the seed of their weights do. How many of those there are is the file's affair: every block here is made from one seed of
each recipe, or from several. The second study's blocks are in tables_faults.py.
"""

from __future__ import annotations

import math
import statistics
from itertools import combinations
from typing import Any

from results import block, load, small, table

LEAK, FAULTS = "study-h200", "faults-h200"
BASE = "bf16"
TAIL, WINDOW = 100, 25
STUDENT = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365}
"""Student's 97.5% quantiles, by degrees of freedom."""
COUNTS = ("none", "one", "two", "three", "four", "five", "six", "seven", "eight")


def runs(study: str) -> list[dict[str, Any]]:
    return [run for run in load({"leak": LEAK, "faults": FAULTS}[study])["runs"] if run["study"] == study]


def named(study: str) -> dict[str, dict[str, Any]]:
    return {run["name"]: run for run in runs(study)}


def mean(run: dict[str, Any], kind: str = "exact") -> float:
    return statistics.fmean(run[kind])


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
    """A run's name, its recipe as code."""
    recipe, comma, which = (name or "").partition(", ")
    return f"`{recipe}`{comma}{which}" if "/" in recipe else name or ""


def seeds(found: list[dict[str, Any]], like: dict[str, Any]) -> dict[int, dict[str, Any]]:
    """The runs that differ from one in nothing but the seed of their weights, itself among them."""
    same = lambda run: (run["attention"], run["arithmetic"]) == (like["attention"], like["arithmetic"])  # noqa: E731
    return {run["seed"]: run for run in found if same(run) and not run["diverged_at"]}


class Floor:
    """How far apart two models are that should not differ: the root mean square over all pairs of such models' losses.

    size: that. bound: what the difference of another pair stays below at 95%, if such losses are normal.
    """

    def __init__(self, losses: list[float]) -> None:
        self.pairs = [abs(a - b) for a, b in combinations(losses, 2)]
        self.size = math.sqrt(2) * statistics.stdev(losses)
        self.times = STUDENT[len(losses) - 1]
        self.bound = self.times * self.size

    def sorted(self, gaps: dict[str, float]) -> tuple[dict[str, float], dict[str, float], dict[str, float]]:
        """Those beyond the bound, those within the floor, and the others."""
        far = {name: gap for name, gap in gaps.items() if abs(gap) > self.bound}
        near = {name: gap for name, gap in gaps.items() if abs(gap) < self.size}
        return far, near, {name: gap for name, gap in gaps.items() if name not in far and name not in near}


def listed(gaps: dict[str, float], floor: Floor | None = None, called: str = "floor") -> str:
    """Differences by name; with a floor also as multiples of it."""
    times = (lambda gap: f" ({abs(gap) / floor.size:.1f} times the {called})") if floor else (lambda gap: "")
    return "; ".join(f"{code(name)} {gap:+.4f}{times(gap)}" for name, gap in gaps.items()) or "none"


def leak_floor(found: list[dict[str, Any]]) -> Floor:
    base = next(run for run in found if run["name"] == BASE)
    return Floor([mean(run) for run in seeds(found, base).values()])


def beside(found: list[dict[str, Any]], run: dict[str, Any]) -> dict[str, Any]:
    """The bf16 model that started from a run's own weights; for bf16 from other weights, the first."""
    base = next(each for each in found if each["name"] == BASE)
    same = seeds(found, base)
    return base if run in same.values() else same.get(run["seed"], base)


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
    calls = "one call" if len(sessions) == 1 else f"{COUNTS[len(sessions)]} calls"
    once = {which: ", ".join(dict.fromkeys(s[which][:10] for s in sessions)) for which in ("commit", "date")}
    return (
        f"{found['machine']['device']}, torch {versions['torch']}, Triton {versions['triton']}; commit {once['commit']}, "
        f"{once['date']}; {calls}, {sum(s['seconds'] for s in sessions):.0f} s in all. Text: {text['files']:,} sources, the "
        f"Python modules of {' and '.join(x.removesuffix(' (.py)') for x in text['sources'])}, {text['bytes']:,} bytes, "
        f"SHA-256 `{text['sha256']}`, a twentieth of the files held out ({text['train_bytes']:,} bytes in whole documents to "
        f"train on, {text['held_out_bytes']:,} held out). Before training, O, dQ, dK and dV of each recipe's folded attention "
        "were compared with the plain reference's on this card: largest difference "
        + small(max(x for s in sessions for x in s["check"]["largest_difference"].values()))
        + "."
    )


def missing(name: str, study: str) -> str:
    """What the plan has and the file has not, and why where it was begun."""
    from flamia.study.plan import STUDIES

    found = load(name)
    done = {run["name"] for run in found["runs"] if run["study"] == study}
    absent = [run.name for run in STUDIES[study].runs if run.name not in done]
    why = {key.partition(": ")[2]: words for s in found["sessions"] for key, words in s["not_run"].items()}
    told = [
        code(each) + (f" (given up after a few steps: {why[each].split(',')[0]})" if each in why else "")
        for each in absent
    ]
    return f"Not run yet: {'; '.join(told)}." if told else "All runs of the plan were run."


# --- leak -----------------------------------------------------------------------------------------------------------


@block
def leak_machine() -> list[str]:
    return [machine(LEAK)]


@block
def leak_setting() -> list[str]:
    return [described(LEAK, "leak")]


@block
def leak_losses() -> list[str]:
    found, rows = runs("leak"), []
    for run in found:
        if run["diverged_at"]:
            cells = [f"diverged at step {run['diverged_at']}", *[""] * 5]
        else:
            base = beside(found, run)
            cells = [f"{statistics.fmean(run['loss'][-TAIL:]):.4f}", f"{mean(run, 'own'):.4f}", f"{mean(run):.4f}",
                     signed(run["own"], run["exact"]),
                     *("" if run is base else signed(run[kind], base["exact"]) for kind in ("own", "exact"))]  # fmt: skip
        rows.append([code(run["name"]), future(run["arithmetic"]), *cells])
    head = (
        f"trained through | the future | training, last {TAIL} steps | own attention | exact attention | own - exact | "
        "own - bf16's exact | exact - bf16's exact"
    )
    return table(head, rows)


def gaps() -> dict[str, float]:
    """Exact loss less bf16's from the same weights: of each recipe's first seed."""
    found = runs("leak")
    first = [run for run in found if run["seed"] == 0 and run["name"] != BASE and not run["diverged_at"]]
    return {run["name"]: paired(run["exact"], beside(found, run)["exact"])[0] for run in first}


@block
def leak_words() -> list[str]:
    found = runs("leak")
    floor, count = leak_floor(found), len(seeds(found, named("leak")[BASE]))
    far, near, between = floor.sorted(gaps())
    pairs = floor.pairs
    how = (
        "so much two bf16 models differ that differ in nothing but the seed of their weights. It is one draw"
        if count == 2
        else f"so much {COUNTS[count]} bf16 models that differ in nothing but the seed of their weights differ, by pairs (root "
        f"mean square of {COUNTS[len(pairs)]}, which are {min(pairs):.4f} to {max(pairs):.4f})"
    )
    return [
        f"**The noise floor is {floor.size:.4f}**: {how}; if losses of seeds are normal, another pair stays at 95% below "
        f"{floor.times:.1f} times that, {floor.bound:.2f}. Beyond that bound: {listed(far, floor)}. Within the floor itself: "
        f"{listed(near)}. In between: {listed(between, floor)}."
    ]


@block
def leak_seeds() -> list[str]:
    """Differences from bf16 at the same seed: their mean and how much they scatter, for recipes with several seeds."""
    found = runs("leak")
    bf16 = seeds(found, named("leak")[BASE])
    rows, said = [], []
    for first in (run for run in found if run["seed"] == 0 and run["attention"] != "torch"):
        mine = seeds(found, first)
        both = sorted(set(mine) & set(bf16))
        if len(both) < 2:
            continue
        each = [paired(mine[s]["exact"], bf16[s]["exact"])[0] for s in both]
        half = STUDENT[len(each) - 1] * statistics.stdev(each) / math.sqrt(len(each))
        middle, at = statistics.fmean(each), code(first["name"])
        rows.append([at, ", ".join(map(str, both)), " / ".join(f"{x:+.4f}" for x in each), f"{middle:+.4f}",
                     f"{min(each):+.4f} to {max(each):+.4f}", f"{middle - half:+.4f} to {middle + half:+.4f}"])  # fmt: skip
        scatter = statistics.stdev(mean(bf16[s]) for s in both)
        told = "no difference shows" if abs(middle) < half else "**a difference shows**"
        said.append(
            f"{at}: {told} between it and bf16 from the same weights, over {COUNTS[len(each)]} seeds. Its differences from bf16 "
            f"scatter by {statistics.stdev(each):.4f} (standard deviation over seeds), bf16's own losses by {scatter:.4f}."
        )
    if not rows:
        return [
            "No recipe but bf16 has run from a second seed: what scatter a difference from bf16 *from the same weights* has is "
            "not known yet."
        ]
    head = (
        "trained through | seeds | exact - bf16's exact, by seed | mean | least to greatest | 95% interval of the mean"
    )
    return [*table(head, rows), "", " ".join(said)]


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
    return [missing(LEAK, "leak")]
