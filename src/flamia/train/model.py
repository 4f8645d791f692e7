"""A small decoder on bytes: RMSNorm, rotary positions, grouped-query attention, SwiGLU.

The model owns no attention. ``forward`` is given one, a function ``attend(q, k, v, cu_seqlens) -> o`` on packed
tensors, so that the same weights are trained through one attention and judged through another. That is the whole of
the leak study: a model that learned to read the future through a quantisation scale looks good through the attention
that it was trained with and bad through any honest one.

Parameters stay float32. q, k and v are rounded to bfloat16 at attention's door, as in any mixed-precision run; on a
CPU everything else is float32, on a GPU the linear layers run under autocast.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flamia.train.data import IGNORED, Batch

Attend = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""(q (T, Hq, D), k (T, Hk, D), v (T, Hk, D), cu_seqlens) -> o (T, Hq, D): causal inside each document."""


@dataclass(frozen=True)
class Shape:
    """The size of a decoder. ``hidden`` is the width inside SwiGLU."""

    layers: int = 4
    width: int = 128
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    hidden: int = 384
    vocabulary: int = 256

    def __post_init__(self) -> None:
        for name in ("layers", "width", "heads", "kv_heads", "head_dim", "hidden", "vocabulary"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} = {getattr(self, name)} must be at least 1")
        if self.heads % self.kv_heads:
            raise ValueError(f"heads = {self.heads} is not a multiple of kv_heads = {self.kv_heads}")
        if self.head_dim % 2:
            raise ValueError(f"head_dim = {self.head_dim} is odd; rotary positions turn pairs of features")


def rotary(positions: Tensor, dim: int, base: float = 10_000.0) -> tuple[Tensor, Tensor]:
    """cos and sin, each (T, 1, dim / 2) float32, for positions counted inside the document."""
    frequency = base ** (-torch.arange(0, dim, 2, device=positions.device, dtype=torch.float32) / dim)
    angle = (positions[:, None].float() * frequency)[:, None, :]
    return angle.cos(), angle.sin()


def turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate feature pairs (d, d + D/2) of x (T, H, D) by the angle of their position."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, first * sin + second * cos], dim=-1)


class Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        self.split = (queries, keys, keys)
        self.qkv = nn.Linear(shape.width, sum(self.split), bias=False)
        self.out = nn.Linear(queries, shape.width, bias=False)

    def forward(self, x: Tensor, turned: tuple[Tensor, Tensor], cu_seqlens: Tensor, attend: Attend) -> Tensor:
        q, k, v = (part.unflatten(-1, (-1, self.shape.head_dim)) for part in self.qkv(x).split(self.split, dim=-1))
        q, k = turn(q.float(), *turned), turn(k.float(), *turned)
        o = attend(q.bfloat16(), k.bfloat16(), v.bfloat16(), cu_seqlens)
        return self.out(o.flatten(-2).to(x.dtype))


class SwiGLU(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.inner = nn.Linear(shape.width, 2 * shape.hidden, bias=False)
        self.out = nn.Linear(shape.hidden, shape.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, value = self.inner(x).chunk(2, dim=-1)
        return self.out(F.silu(gate) * value)


class Block(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(shape.width, eps=1e-6)
        self.attention = Attention(shape)
        self.mlp_norm = nn.RMSNorm(shape.width, eps=1e-6)
        self.mlp = SwiGLU(shape)

    def forward(self, x: Tensor, turned: tuple[Tensor, Tensor], cu_seqlens: Tensor, attend: Attend) -> Tensor:
        x = x + self.attention(self.attention_norm(x), turned, cu_seqlens, attend)
        return x + self.mlp(self.mlp_norm(x))


class Decoder(nn.Module):
    """``Decoder(shape, seed)(batch, attend)`` -> logits (T, vocabulary); the same seed gives the same weights."""

    def __init__(self, shape: Shape, seed: int = 0) -> None:
        super().__init__()
        self.shape = shape
        self.embedding = nn.Embedding(shape.vocabulary, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.width, eps=1e-6)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)
        self.initialise(torch.Generator().manual_seed(seed))

    @torch.no_grad()
    def initialise(self, generator: torch.Generator) -> None:
        """Normal weights of variance 1 / fan-in; what writes into the residual stream is scaled down by its depth."""
        for name, weight in self.named_parameters():
            if weight.dim() == 1:
                continue  # norms start at one
            deviation = weight.shape[1] ** -0.5 if weight is not self.embedding.weight else 0.5
            if name.endswith("out.weight"):
                deviation *= (2 * self.shape.layers) ** -0.5
            weight.normal_(std=deviation, generator=generator)
        self.head.weight.mul_(0.1)  # near-uniform predictions at the start

    def parameter_groups(self, weight_decay: float) -> list[dict[str, Any]]:
        """For an optimiser: matrices decay, vectors (of the norms) do not."""
        matrices = [weight for weight in self.parameters() if weight.dim() > 1]
        vectors = [weight for weight in self.parameters() if weight.dim() == 1]
        return [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]

    def forward(self, batch: Batch, attend: Attend) -> Tensor:
        x = self.embedding(batch.tokens)
        turned = rotary(batch.positions, self.shape.head_dim)
        for block in self.blocks:
            x = block(x, turned, batch.cu_seqlens, attend)
        return self.head(self.norm(x))

    def loss(self, batch: Batch, attend: Attend, predicted: int | None = None) -> Tensor:
        """Mean cross entropy in nats per predicted byte; a document's last byte predicts nothing. predicted: divide by this
        number, of the predicted bytes of a batch that several ranks share, in place of the number in this one."""
        logits = self(batch, attend).float()
        if predicted is None:
            return F.cross_entropy(logits, batch.targets, ignore_index=IGNORED)
        return F.cross_entropy(logits, batch.targets, ignore_index=IGNORED, reduction="sum") / predicted

    @property
    def size(self) -> int:
        return sum(weight.numel() for weight in self.parameters())
