"""One checkpoint, two attentions: its own, and an exact one.

A model trained through an attention that leaks learns to use the leak, and then its own validation loss flatters it.
The loss through exact attention is what incremental decoding would meet. ``own - exact`` far below zero is the mark of
a leak; the same difference for an honest recipe is a rounding effect.

Both attentions read the same batches, so the difference is paired, and its standard error over batches says whether it
is distinguishable from zero.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F

from flamia.train import checkpoint
from flamia.train.config import TrainConfig
from flamia.train.data import Batch, Corpus, PackedStream
from flamia.train.model import Attend, Decoder
from flamia.train.ranks import ALONE, Ranks

EXACT = "bf16/strict"
"""The recipe that stands for exact attention: 16 bits, and no scale that tokens could share. It always runs on the
reference, so that it judges kernels too."""

TORCH = "torch"
"""What may stand where a recipe does: torch's own 16-bit attention, a baseline that is fast on every device."""

VALIDATION_SEED = 7
"""Validation batches are the same for every run, whatever its seed."""


def attention_for(recipe: str, backend: str = "auto") -> Attend:
    """flamia's causal packed attention with ``recipe``, or torch's, as a model wants it."""
    import flamia

    if recipe == TORCH:
        return torch_attention
    parsed = flamia.Recipe.parse(recipe)

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
        o = flamia.attention_varlen(q, k, v, cu_seqlens, causal=True, recipe=parsed, backend=backend)
        assert isinstance(o, torch.Tensor)  # a pair only with return_lse
        return o

    return attend


def torch_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
    """``scaled_dot_product_attention`` document by document; reads the offsets, so the host waits for the device."""
    lengths = cu_seqlens.diff().tolist()
    shared = q.shape[1] != k.shape[1]
    rows = []
    for each in zip(*(x.transpose(0, 1).split(lengths, 1) for x in (q, k, v)), strict=True):
        query, key, value = (x[None] for x in each)
        rows.append(F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=shared))
    return torch.cat(rows, 2)[0].transpose(0, 1)


def validation_batches(corpus: Corpus, *, tokens: int, context: int, count: int) -> list[Batch]:
    stream = PackedStream(corpus.validation, tokens=tokens, context=context, seed=VALIDATION_SEED)
    return [stream.next() for _ in range(count)]


@torch.no_grad()
def losses(model: Decoder, batches: Sequence[Batch], attend: Attend, ranks: Ranks = ALONE) -> list[float]:
    """Mean loss of each batch, in nats per byte."""
    device = next(model.parameters()).device
    found = []
    with torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cuda"):
        for batch in batches:
            part, predicted = ranks.share(batch, model.shape.width)
            found.append(ranks.total(model.loss(part.to(device), attend, predicted)))
    return found


def mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


@dataclass(frozen=True)
class Gap:
    """Validation loss (nats per byte) through a recipe's own attention and through exact attention."""

    own: float
    exact: float
    difference: float
    standard_error: float
    batches: int

    def __str__(self) -> str:
        return (
            f"own attention {self.own:.4f}, exact attention {self.exact:.4f}, "
            f"own - exact {self.difference:+.5f} +- {self.standard_error:.5f} nats per byte ({self.batches} batches)"
        )


def gap(model: Decoder, batches: Sequence[Batch], own: Attend, exact: Attend, ranks: Ranks = ALONE) -> Gap:
    first, second = (losses(model, batches, attend, ranks) for attend in (own, exact))
    differences = [a - b for a, b in zip(first, second, strict=True)]
    centre = mean(differences)
    count = len(differences)
    spread = math.fsum((d - centre) ** 2 for d in differences) / (count - 1) if count > 1 else math.nan
    return Gap(mean(first), mean(second), centre, math.sqrt(spread / count), count)


def load_model(path: Path, corpus: Corpus) -> tuple[TrainConfig, Decoder]:
    """The configuration and the model of a checkpoint that was trained on ``corpus``.

    No other corpus will do: only on its own is the validation side known to be unseen.
    """
    content = checkpoint.load(path)
    if corpus.fingerprint != content["corpus"]:
        raise ValueError(f"{path} was trained on other data than {corpus.source}; give the same --data")
    config = TrainConfig.from_dict(content["config"])
    model = Decoder(config.shape, config.seed)
    model.load_state_dict(content["model"])
    return config, model


def judge_checkpoint(
    path: Path,
    corpus: Corpus,
    *,
    recipe: str | None = None,
    batches: int = 16,
    backend: str = "auto",
    device: str | None = None,
) -> tuple[str, Gap]:
    """Load ``path`` and measure its gap on ``batches`` validation batches; returns the recipe used and the gap.

    ``recipe`` None is the one that it was trained with.
    """
    config, model = load_model(path, corpus)
    model.to(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    own = recipe or config.recipe
    held_out = validation_batches(corpus, tokens=config.tokens, context=config.context, count=batches)
    return own, gap(model, held_out, attention_for(own, backend), attention_for(EXACT, "reference"))
