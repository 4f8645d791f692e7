"""The pieces of the demo. Each is a plain function that a worker process runs with one thread and that says how far it
is; what it returns travels back by pickle."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from flamia.recipe import CONTROLS, Recipe

Say = Callable[[int, int, str], None]

TRAINED = ("mxfp8/fast", "mxfp8/strict", "bf16/strict")
EXPLAINED = ("mxfp8/fast", "v_stripes_floor", "k_centered", "current_scaling")
"""Leaks whose maps are drawn: a document's, a group's, a statistic's and the whole call's."""
PROBED = "mxfp8/strict"
"""Whose checkpoint the text probe reads."""

READ = ("mxfp8/strict", "mxfp8/fast", "nvfp4/strict", "nvfp4/fast", "v_stripes_floor", "current_scaling")
MEASURED = ("bf16/strict", "mxfp8/strict", "mxfp8/fast", "mxfp8_scores/strict", "nvfp4_fp8/strict", "nvfp4_fp8/fast")


def audit_presets(say: Say, names: tuple[str, ...] | None = None) -> Any:
    """Every preset (or those named) and every control under every mask: a ``RecipeAudit``."""
    from flamia.audit import audit_recipes

    return audit_recipes(names, progress=say)


def explain_leaks(say: Say, names: tuple[str, ...] = EXPLAINED) -> list[Any]:
    """Reports with dependency maps of recipes that are known to leak."""
    from flamia.audit import audit_callable
    from flamia.audit.recipes import MASKS, callable_of

    reports = []
    for index, name in enumerate(names):
        say(index, len(names), name)
        recipe = CONTROLS[name] if name in CONTROLS else Recipe.parse(name)
        mask = MASKS[0]
        reports.append(
            audit_callable(
                callable_of(recipe, mask),
                causal=mask.causal,
                window=mask.window,
                heads=mask.heads,
                effort="brief",
                name=name,
                explain=True,
            )
        )
    say(len(names), len(names), "")
    return reports


def train_model(say: Say, recipe: str, folder: Path, data: Path | None, changes: dict[str, Any]) -> Any:
    """A ``Run`` of the tiny preset; its checkpoint stays in ``folder``."""
    from flamia.train import load_corpus, preset, train

    config = preset("tiny", recipe=recipe, **changes)
    return train(
        config,
        load_corpus(data),
        folder,
        device="cpu",
        on_step=lambda record: say(record["step"], config.steps, f"loss {record['loss']:.3f}"),
    )


def read_text(say: Say, checkpoint: Path, data: Path | None, names: tuple[str, ...] = READ) -> list[Any]:
    """One trained model through several attentions: a ``TextMap`` for each."""
    from flamia.demo.text import read_ahead
    from flamia.train import load_corpus
    from flamia.train.evaluate import load_model

    corpus = load_corpus(data)
    _, model = load_model(checkpoint, corpus)
    maps = []
    for index, name in enumerate(names):
        say(index, len(names), name)
        maps.append((name, read_ahead(model, corpus, str(CONTROLS[name]) if name in CONTROLS else name)))
    say(len(names), len(names), "")
    return maps


def measure_accuracy(say: Say, tokens: int, names: tuple[str, ...] = MEASURED) -> list[Any]:
    """``Accuracy`` of each recipe on each kind of input."""
    from flamia.accuracy import INPUTS, measure_all

    results: list[Any] = []
    total = len(names) * len(INPUTS)
    for result in measure_all(names, tokens=tokens):
        results.append(result)
        say(len(results), total, f"{result.inputs} {result.recipe}")
    return results
