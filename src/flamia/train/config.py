"""What a training run is: everything that decides its numbers, in one value that a checkpoint carries.

``PRESETS["tiny"]`` learns something in about a minute on a CPU core; ``PRESETS["study"]`` is the leak study of
the paper (six layers, width 1024, bytes) and wants a GPU.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from flamia.recipe import Recipe
from flamia.train.model import Shape


@dataclass(frozen=True)
class TrainConfig:
    """tokens: bytes per batch, all of them real; context: the longest document; learning rates are AdamW's."""

    shape: Shape = field(default_factory=Shape)
    recipe: str = str(Recipe.strict())
    backend: str = "auto"
    context: int = 512
    tokens: int = 1024
    steps: int = 240
    learning_rate: float = 3e-3
    final_rate: float = 0.1
    """Share of the learning rate left at the last step."""
    warmup: int = 20
    decay: str = "cosine"
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    clip: float = 1.0
    seed: int = 0
    evaluate_every: int = 60
    evaluate_batches: int = 8
    save_every: int = 0
    """Steps between checkpoints; 0 saves only the last."""

    def __post_init__(self) -> None:
        if self.decay not in ("cosine", "linear"):
            raise ValueError(f"decay = {self.decay!r} is unknown; allowed: 'cosine', 'linear'")
        for name in ("steps", "tokens", "context", "evaluate_batches", "learning_rate", "clip"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} = {getattr(self, name)} must be positive")
        for name in ("warmup", "evaluate_every", "save_every", "weight_decay"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} = {getattr(self, name)} must not be negative")
        if not 0 <= self.final_rate <= 1:
            raise ValueError(f"final_rate = {self.final_rate} is a share of the learning rate: 0 to 1")

    def rate(self, step: int) -> float:
        """The learning rate of step 0 .. steps - 1: a linear warmup, then a cosine or a line down to the final share.

        A function of the step alone, so that a resumed run needs no scheduler state.
        """
        if step < self.warmup:
            return self.learning_rate * (step + 1) / self.warmup
        progress = min(1.0, (step - self.warmup) / max(1, self.steps - 1 - self.warmup))
        remaining = 0.5 * (1 + math.cos(math.pi * progress)) if self.decay == "cosine" else 1 - progress
        return self.learning_rate * (self.final_rate + (1 - self.final_rate) * remaining)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> TrainConfig:
        return cls(**{**values, "shape": Shape(**values["shape"])})


PRESETS = {
    "tiny": TrainConfig(
        shape=Shape(layers=2, width=192, heads=2, kv_heads=1, head_dim=64, hidden=512),
    ),
    "study": TrainConfig(
        shape=Shape(layers=6, width=1024, heads=8, kv_heads=8, head_dim=128, hidden=2816),
        context=2048,
        tokens=32_768,
        steps=4000,
        learning_rate=6e-4,
        warmup=200,
        evaluate_every=200,
        evaluate_batches=16,
        save_every=1000,
    ),
}


def preset(name: str, **changes: Any) -> TrainConfig:
    """A preset with fields replaced; None leaves a field alone."""
    if name not in PRESETS:
        raise ValueError(f"preset = {name!r} is unknown; allowed: {', '.join(map(repr, PRESETS))}")
    return replace(PRESETS[name], **{key: value for key, value in changes.items() if value is not None})
