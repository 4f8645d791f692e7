"""Run the training studies, one model after another, and keep what is finished.

    python -m flamia.study.run --out out/study --seconds 200
    python -m flamia.study.run --out out/study --seconds 200 --have earlier/study.json

OUT/study.json is written anew after every run, whole or not at all; --have continues an earlier file, from this machine or
another. A run is not begun, or is given up after a few steps, where it would not end before the seconds do: no half run
counts. OUT/activations.pt holds q, k, v and dO of the finished bf16 model. Needs torch alone; on a card, Triton as well.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from flamia import jsonable
from flamia.bench.report import surroundings
from flamia.study import quick
from flamia.study.attention import compare
from flamia.study.engine import SHORTEST, Engine, OutOfTime, activations, execute
from flamia.study.plan import STUDIES, TORCH, Run, Study
from flamia.study.text import Text, given
from flamia.train.model import Shape

LAYERS, HEADS, DOCUMENTS = (0, 2, 5), (1, 6), 4
"""Whose activations are kept: 2,048 tokens of two heads of three layers, 12.6 MB."""
TINY = Shape(layers=2, width=64, heads=2, kv_heads=2, head_dim=32, hidden=128)
SMALL = Shape(layers=2, width=128, heads=2, kv_heads=2, head_dim=64, hidden=352)
PROBED = -math.inf
"""The deadline of a run that is only to be timed."""
CLOSE = 2.0**-7
"""How far the study's attention may be from the plain reference's, of a tensor's largest entry: a rounding of bfloat16, twice."""


def say(text: str) -> None:
    print(f"[{time.strftime('%H:%M:%S', time.gmtime())}] {text}", file=sys.stderr, flush=True)


def write(path: Path, found: dict[str, Any]) -> None:
    partial = path.with_suffix(".partial")
    partial.write_text(jsonable.text(found, indent=None).replace('{"name"', '\n{"name"') + "\n", encoding="utf-8")
    os.replace(partial, path)


def check(studies: Sequence[Study], device: torch.device) -> dict[str, Any]:
    """Compare the folded attention with the plain reference; a rounding kernel that differs is not used."""
    recipes = dict.fromkeys(
        str(run.arithmetic.forward) for study in studies for run in study.runs if run.attention != TORCH
    )
    length = max(study.settings.length for study in studies)
    found = compare(list(recipes), length, device)
    if max(found.values()) > CLOSE:
        say(f"the rounding kernel differs, by {max(found.values()):.3g}; doing without")
        quick.without_kernel()
        found = compare(list(recipes), length, device)
    if max(found.values()) > CLOSE:
        raise SystemExit(f"the study's attention differs from the reference's on {device}: {found}")
    return {"largest_difference": found, "rounding_kernel": quick.has_kernel()}


def check_settings(earlier: dict[str, Any], studies: Sequence[Study], path: str) -> None:
    """Refuse to continue a study whose finished models were trained with other settings."""
    for each in studies:
        held = [session["settings"][each.name] for session in earlier["sessions"] if each.name in session["settings"]]
        now = json.loads(jsonable.text(asdict(each.settings)))
        if held and any(run["study"] == each.name for run in earlier["runs"]) and held[-1] != now:
            changed = ", ".join(
                f"{name} {held[-1].get(name)}, now {now[name]}" for name in now if now[name] != held[-1].get(name)
            )
            raise SystemExit(
                f"{path}: its runs of study {each.name!r} had other settings ({changed}); give them again, or another --studies"
            )


def chosen(names: str | None, studies: Sequence[Study]) -> list[tuple[Study, Run]]:
    every = [(study, run) for study in studies for run in study.runs]
    if names is None:
        return every
    wanted = [name.strip() for name in names.split(";")]
    known = {run.name for _, run in every}
    if unknown := [name for name in wanted if name not in known]:
        raise SystemExit(f"no run {', '.join(map(repr, unknown))}; there are {'; '.join(sorted(known))}")
    return [(study, run) for study, run in every if run.name in wanted]


def prepared(options: argparse.Namespace) -> list[Study]:
    studies = []
    for name in options.studies.split(","):
        if name not in STUDIES:
            raise SystemExit(f"no study {name!r}; there are {', '.join(STUDIES)}")
        study = STUDIES[name]
        settings = study.settings
        if options.tiny:
            settings = replace(
                settings, shape=TINY, length=256, documents=2, steps=12, warmup=2, evaluate_every=6, evaluate_documents=1,
                final_documents=2, diagnose_every=6 if settings.diagnose_every else 0,
            )  # fmt: skip
        elif options.small:
            settings = replace(
                settings, shape=SMALL, length=256, documents=4, steps=250, warmup=20, evaluate_every=100, evaluate_documents=16,
                final_documents=128, diagnose_every=50 if settings.diagnose_every else 0,
            )  # fmt: skip
        changes = {"steps": options.steps, "documents": options.documents}
        settings = replace(settings, **{key: value for key, value in changes.items() if value})
        if settings.steps < SHORTEST:
            raise SystemExit(f"--steps {settings.steps}: a run has at least {SHORTEST}, to be timed before it goes on")
        studies.append(replace(study, settings=settings))
    return studies


def keep_activations(engine: Engine, path: Path) -> None:
    shape, documents = engine.settings.shape, engine.settings.documents
    layers = tuple(layer for layer in LAYERS if layer < shape.layers)
    heads = tuple(head for head in HEADS if head < shape.heads)
    kept = activations(engine, layers, heads, min(DOCUMENTS, documents))
    kept["about"] = (
        f"{engine.run.name} after {engine.settings.steps} steps; q, k, v as attention reads them, dO of the mean loss"
    )
    torch.save(kept, path)


def study(options: argparse.Namespace) -> dict[str, Any]:
    started = time.monotonic()
    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    studies = prepared(options)
    out = Path(options.out)
    out.mkdir(parents=True, exist_ok=True)
    earlier = json.loads(Path(options.have).read_text(encoding="utf-8")) if options.have else None
    length = studies[0].settings.length
    text = given(options.text, length)
    say(f"text: {text.facts}")
    found = surroundings(str(device), options.commit) | {"text": text.facts, "runs": [], "sessions": []}
    if earlier:
        if earlier["text"]["sha256"] != text.facts["sha256"]:
            raise SystemExit(f"{options.have} was trained on other text; its runs cannot stand beside new ones")
        check_settings(earlier, studies, options.have)
        found |= {"runs": earlier["runs"], "sessions": earlier["sessions"]}
    session: dict[str, Any] = {"date": found["date"], "commit": found["commit"], "check": check(studies, device)}
    session |= {"settings": {s.name: asdict(s.settings) for s in studies}, "not_run": {}, "seconds": 0.0}
    found["sessions"] = [*found["sessions"], session]
    say(f"checked after {time.monotonic() - started:.1f} s: {session['check']}")
    done = {(run["study"], run["name"]) for run in found["runs"]}
    for each, run in chosen(options.only, studies):
        if (each.name, run.name) in done:
            continue
        try:
            one(each, run, text, device, PROBED if options.probe else started + options.seconds, out, found)
        except OutOfTime as error:
            session["not_run"][f"{each.name}: {run.name}"] = str(error)
            say(f"{run.name}: not run, {error}")
        except Exception as error:  # one run that fails takes no other with it
            session["not_run"][f"{each.name}: {run.name}"] = f"{type(error).__name__}: {str(error)[:300]}"
            traceback.print_exc()
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
        session["seconds"] = round(time.monotonic() - started, 1)
        write(out / "study.json", found)
    return found


def one(
    each: Study, run: Run, text: Text, device: torch.device, deadline: float, out: Path, found: dict[str, Any]
) -> None:
    if PROBED < deadline < time.monotonic():
        raise OutOfTime("no time was left")
    result, engine = execute(run, each.settings, text, device, deadline, say)
    found["runs"].append({"name": run.name, "study": each.name, **result})
    if run.attention == TORCH and run.seed == 0 and result["diverged_at"] is None:
        keep_activations(engine, out / "activations.pt")
    tail = result["loss"][-50:]
    say(
        f"{run.name}: {result['seconds']} s, training loss {sum(tail) / len(tail):.4f}"
        + (f", diverged at step {result['diverged_at']}" if result["diverged_at"] else "")
        + "".join(
            f", {name} {sum(result[name]) / len(result[name]):.4f}" for name in ("own", "exact") if name in result
        )
    )


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m flamia.study.run", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--out", required=True, help="folder of study.json and activations.pt")
    made.add_argument("--seconds", type=float, default=1e9, help="for everything; no run is begun that would not end")
    made.add_argument("--have", help="a study.json to continue")
    made.add_argument("--studies", default=",".join(STUDIES))
    made.add_argument("--only", help="names of runs, separated by semicolons")
    made.add_argument(
        "--text", help="a text file or a folder of them; default: this machine's Python and torch sources"
    )
    made.add_argument("--steps", type=int, help="in place of each study's own")
    made.add_argument("--documents", type=int, help="in a step, in place of each study's own")
    made.add_argument("--device")
    made.add_argument("--commit", help="what to call this version, where git is not at hand")
    made.add_argument("--probe", action="store_true", help="train nothing: time a few steps of each run, into not_run")
    sizes = made.add_mutually_exclusive_group()
    sizes.add_argument("--tiny", action="store_true", help="a model of two layers and twelve steps: to try the command")
    sizes.add_argument(
        "--small", action="store_true", help="two layers of width 128, 250 steps of 4 x 256 bytes: for a CPU"
    )
    return made


def main(arguments: Sequence[str] | None = None) -> None:
    study(parser().parse_args(arguments))


if __name__ == "__main__":
    main()
