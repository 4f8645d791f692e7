"""What a loss of mass does to a loss: one finished model, read through attention that keeps a share of O.

    python -m flamia.study.bias --shares 1,0.99,0.89,0.53,0.35,0 --out out/bias.json

An accumulator that truncates makes every sum of weights too small, the more the longer the row (docs/evidence.md, "Mass").
A model at the lengths where that shows does not fit here; so a small model is trained with exact sums on short documents, and
then judged on held-out text while each O is multiplied by a share, the same for every row, head and layer. Share 1 is the
model itself, share 0 the model without its attention, which says how much of its loss attention is worth at all.

This is a stand-in. In a kernel the loss depends on the row, on the weights and on what is summed, gradients lose too, and a model
that is trained through the bias can learn to undo a constant: it shows how sensitive a model is that meets the bias unprepared,
as one does that is trained at short lengths, or with 16 bits, and then read at long ones.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flamia.bench.report import surroundings
from flamia.study.engine import SHORTEST, execute
from flamia.study.plan import LEAK, Settings
from flamia.study.run import SMALL, TINY
from flamia.study.text import given
from flamia.train.model import Attend


def keeping(attend: Attend, share: float) -> Attend:
    """An attention whose O is that share of what it should be."""

    def biased(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor) -> Tensor:
        o = attend(q, k, v, cu_seqlens)
        return (o.float() * share).to(o.dtype)

    return biased


def settings_of(options: argparse.Namespace) -> Settings:
    shape = TINY if options.tiny else SMALL
    return replace(
        LEAK.settings, shape=shape, length=256, documents=2 if options.tiny else 8, steps=options.steps,
        warmup=min(20, options.steps // 4), evaluate_every=0, diagnose_every=0, final_documents=2 if options.tiny else 128,
    )  # fmt: skip


def measure(options: argparse.Namespace, shares: Sequence[float]) -> dict[str, Any]:
    device = torch.device(options.device)
    settings = settings_of(options)
    text = given(options.text, settings.length)
    run = replace(LEAK.runs[0], through=())
    say = lambda words: print(words, file=sys.stderr, flush=True)  # noqa: E731
    result, engine = execute(run, settings, text, device, math.inf, say)
    found = surroundings(options.device, options.commit) | {"text": text.facts, "settings": asdict(settings)}
    found |= {"parameters": result["parameters"], "attention": run.name, "shares": []}
    for share in shares:
        with torch.no_grad():
            losses = engine.losses(keeping(engine.exact, share), settings.final_documents)
        found["shares"].append({"share": share, "losses": losses})
        say(f"share {share:g}: {math.fsum(losses) / len(losses):.4f}")
    return found


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m flamia.study.bias", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--shares", default="1,0.99,0.9,0.5,0", help="what O keeps of itself, separated by commas")
    made.add_argument("--steps", type=int, default=1500)
    made.add_argument("--text", help="a folder of text; default: the Python modules that are installed here")
    made.add_argument("--device", default="cpu")
    made.add_argument("--commit", help="what to call this version, where git is not at hand")
    made.add_argument("--tiny", action="store_true", help="a model to try the command with")
    made.add_argument("--out", type=Path, default=Path("out/bias.json"))
    return made


def main(arguments: Sequence[str] | None = None) -> None:
    options = parser().parse_args(arguments)
    try:
        shares = [float(x) for x in options.shares.split(",")]
    except ValueError:
        sys.exit(f"--shares {options.shares!r}: numbers separated by commas, 1 for all of O")
    if options.steps < SHORTEST:
        sys.exit(f"--steps {options.steps}: a run has at least {SHORTEST}, to be timed before it goes on")
    found = measure(options, shares)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(options.out)


if __name__ == "__main__":
    main()
