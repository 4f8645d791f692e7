"""Which runs a study has, most important first.

The leak study trains one model through each attention, on the same bytes in the same order from the same weights. The
faults study trains a smaller one through attentions with one thing wrong, each beside its control: the same bits without
the fault. All are judged through their own attention and through exact attention.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from flamia.study.attention import Arithmetic
from flamia.train.model import Shape

TORCH = "torch"
EXACT = "bf16/strict"
SCORES, FOLD = "mxfp8_scores/strict", "mxfp8/fold"


@dataclass(frozen=True)
class Settings:
    """What all runs of a study share. documents of `length` bytes make a step."""

    shape: Shape
    steps: int
    documents: int
    length: int = 512
    learning_rate: float = 6e-4
    final_rate: float = 0.1
    warmup: int = 50
    weight_decay: float = 0.1
    clip: float = 1.0
    evaluate_every: int = 100
    evaluate_documents: int = 64
    final_documents: int = 512
    diagnose_every: int = 0


@dataclass(frozen=True)
class Run:
    """One model to train. attention: TORCH, "kernels" for the library's own backend with `recipe`, or "reference".

    through: recipes that the finished model is judged through besides its own attention and the exact one.
    control: the name of the run that differs in the fault alone.
    """

    name: str
    attention: str
    arithmetic: Arithmetic
    seed: int = 0
    through: tuple[str, ...] = ()
    control: str | None = None


@dataclass(frozen=True)
class Study:
    name: str
    settings: Settings
    runs: tuple[Run, ...] = field(default_factory=tuple)


def _plain(recipe: str, **options) -> Run:
    return Run(recipe, "reference", Arithmetic.of(recipe), **options)


def _seeds(run: Run, *seeds: int) -> tuple[Run, ...]:
    """The same run from other first weights, on the same documents in the same order: what a loss moves by without a cause."""

    def again(seed: int) -> Run:
        which = "other weights" if seed == 1 else f"weights {seed}"
        control = run.control and f"{run.control}, {which}"
        return replace(run, name=f"{run.name}, {which}", seed=seed, through=(), control=control)

    return tuple(map(again, seeds))


LOW = ("nvfp4/fast", "nvfp4/fold", SCORES, "nvfp4_fp8/fast", "nvfp4_fp8/strict", "mxfp8/fast", "mxfp8/strict", FOLD)

BF16 = Run("bf16", TORCH, Arithmetic.of(EXACT), through=LOW)
DEFAULT = Run(SCORES, "kernels", Arithmetic.of(SCORES), through=(SCORES,))
LEAK = Study(
    "leak",
    Settings(Shape(layers=6, width=1024, heads=8, kv_heads=8, head_dim=128, hidden=2816), steps=800, documents=8),
    (
        BF16,
        _plain("nvfp4/fast", through=("nvfp4/fold",)),
        _plain("nvfp4/fold", through=("nvfp4/fast",)),
        DEFAULT,
        *_seeds(BF16, 1),
        _plain("nvfp4_fp8/fast"),
        _plain("nvfp4_fp8/strict"),
        _plain("mxfp8/fast"),
        _plain("mxfp8/strict"),
        _plain(FOLD),
        _plain("nvfp4/strict"),
        *_seeds(BF16, 2, 3),
        *_seeds(DEFAULT, 1, 2, 3),
    ),
)

SINK = 8.0
"""Nats on the logit of a document's first key: it takes e^8 / (e^8 + 511), 0.85, of a row of 512 equal keys."""
COARSE = 10
"""Powers of two on U's scales."""


def _fault(name: str, control: str | None, forward: str, backward: str | None = None, **options) -> Run:
    return Run(name, "reference", Arithmetic.of(forward, backward, **options), control=control)


OTHER_V = f"{SCORES},o_v=bf16:none"
SUNK = (
    _fault("sink", None, EXACT, sink=SINK),
    _fault("sink, O and E from one V", "sink", SCORES, sink=SINK),
    _fault("sink, O from the exact V", "sink, O and E from one V", OTHER_V, sink=SINK),
)
FAULTS = Study(
    "faults",
    Settings(
        Shape(layers=4, width=512, heads=4, kv_heads=4, head_dim=128, hidden=1408),
        steps=600,
        documents=8,
        learning_rate=1.5e-3,
        diagnose_every=100,
        evaluate_every=200,
    ),
    (
        _plain(EXACT),
        _plain(SCORES),
        _fault("D from the given dO", SCORES, SCORES, fault=("exact_delta", 0)),
        _plain("nvfp4/fold"),
        _fault("4 bits, D from the given dO", "nvfp4/fold", "nvfp4/fold", fault=("exact_delta", 0)),
        _plain(FOLD),
        _fault("blocks of 256 forward, 128 backward", FOLD, f"{FOLD},frontier_block=256", FOLD),
        _fault(f"U's scales 2^{COARSE}", FOLD, FOLD, fault=("coarse_u", COARSE)),
        _fault("as much of U zeroed by chance", FOLD, FOLD, fault=("random_u", COARSE)),
        _fault("approximate exponential", EXACT, f"{EXACT},exp2=schraudolph"),
        _fault("approximate in the forward only", "approximate exponential", f"{EXACT},exp2=schraudolph", EXACT),
        _fault("secant", EXACT, f"{EXACT},exp2=mitchell"),
        _fault("secant in the forward only", "secant", f"{EXACT},exp2=mitchell", EXACT),
        *SUNK,
        _fault("O from the exact V", SCORES, OTHER_V),
        _fault("blocks of 256", FOLD, f"{FOLD},frontier_block=256"),
        *_seeds(_plain(EXACT), 1, 2, 3),
        *(run for each in SUNK for run in _seeds(each, 1)),
    ),
)

STUDIES = {study.name: study for study in (LEAK, FAULTS)}
