"""What is timed: self-attention over packed documents, and how much arithmetic it is by convention.

FLOP convention (visible pairs only, whatever a kernel really multiplies): forward `2 D Hq sum L (L + 1)` where causal,
`4 D Hq sum L^2` where not; backward 2.5 times that, a training call 3.5 times.

Groups. `packed` are nine causal packs of 16,384 to 65,536 tokens. `ragged` is what a loader makes of real texts:
lengths log-uniform from 16 to 16,384, so that documents start anywhere. `grouped` has eight query heads to a key head.
`dense` are batches of equal lengths, for peers that take nothing else; equal lengths of other groups are given to
them, too.

Three more ask what a time follows. `order` holds the documents of `log-uniform` in other orders: the same lengths, so the
same work. `skewed` holds the tokens *and* the visible pairs of 16x4096 in other lengths (sum L = 65,536 and sum L^2 =
2^28 exactly), so that by the FLOP convention nothing differs but how unequal the documents are. `tiny` is 1,024
documents of 64 tokens. And `shapes` are what the others leave out: head size 64, windows, no causal mask.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Workload:
    name: str
    lengths: tuple[int, ...]
    heads: int = 16
    kv_heads: int = 16
    dim: int = 128
    causal: bool = True
    group: str = "packed"
    window: int | None = None
    """A causal query sees that many keys before its own; None: all of them."""

    @property
    def tokens(self) -> int:
        return sum(self.lengths)

    @property
    def batch(self) -> tuple[int, int] | None:
        """(documents, length) where all are equally long, else None."""
        return (len(self.lengths), self.lengths[0]) if len(set(self.lengths)) == 1 else None

    @property
    def forward_flops(self) -> int:
        return 4 * self.dim * self.heads * self.pairs

    @property
    def pairs(self) -> int:
        """(query, key) pairs of one head that the mask leaves."""
        if not self.causal:
            return sum(n * n for n in self.lengths)
        hidden = [max(0, n - 1 - self.window) if self.window is not None else 0 for n in self.lengths]
        return sum(n * (n + 1) // 2 - m * (m + 1) // 2 for n, m in zip(self.lengths, hidden))

    def inputs(self, device: str = "cuda", seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """q, k, v, dO (tokens, heads, dim) bfloat16 and cu_seqlens."""
        generator = torch.Generator(device).manual_seed(seed)
        shapes = [(self.tokens, h, self.dim) for h in (self.heads, self.kv_heads, self.kv_heads, self.heads)]
        q, k, v, do = (torch.randn(s, device=device, dtype=torch.bfloat16, generator=generator) for s in shapes)
        cu = torch.tensor([0, *self.lengths], dtype=torch.int64).cumsum(0).to(device, torch.int32)
        return q, k, v, do, cu


def log_uniform(tokens: int, low: int, high: int, seed: int) -> tuple[int, ...]:
    """Lengths that add up to `tokens`, the last one cut."""
    draw = random.Random(seed)
    lengths: list[int] = []
    while sum(lengths) < tokens:
        lengths.append(round(math.exp(draw.uniform(math.log(low), math.log(high)))))
    return (*lengths[:-1], lengths[-1] - (sum(lengths) - tokens))


RAGGED = log_uniform(65536, 16, 16384, seed=0)

WORKLOADS = {
    w.name: w
    for w in (
        Workload("4x4096", (4096,) * 4),
        Workload("1x16384", (16384,)),
        Workload("1x16384 16/4", (16384,), kv_heads=4),
        Workload("2x16384", (16384,) * 2),
        Workload("1x32768", (32768,)),
        Workload("16x4096", (4096,) * 16),
        Workload("8192+224x256", (8192,) + (256,) * 224),
        Workload("64x1024", (1024,) * 64),
        Workload("1x65536", (65536,)),
        Workload("log-uniform", RAGGED, group="ragged"),
        Workload("4x4096 64/8", (4096,) * 4, heads=64, kv_heads=8, group="grouped"),
        Workload("dense 4x8192", (8192,) * 4, group="dense"),
        Workload("dense 4x4096 open", (4096,) * 4, causal=False, group="dense"),
        Workload("dense 8x2048 D=64", (2048,) * 8, heads=32, kv_heads=32, dim=64, group="dense"),
        Workload("longest first", tuple(sorted(RAGGED, reverse=True)), group="order"),
        Workload("longest last", tuple(sorted(RAGGED)), group="order"),
        Workload("shuffled", tuple(random.Random(1).sample(RAGGED, len(RAGGED))), group="order"),
        Workload("9216+19x2560+7680", (9216, *(2560,) * 19, 7680), group="skewed"),
        Workload("15744+126x384+1408", (15744, *(384,) * 126, 1408), group="skewed"),
        Workload("14916+247x180+6160", (14916, *(180,) * 247, 6160), group="skewed"),
        Workload("1024x64", (64,) * 1024, group="tiny"),
        Workload("4x4096 D=64", (4096,) * 4, heads=32, kv_heads=32, dim=64, group="shapes"),
        Workload("1x32768 D=64", (32768,), dim=64, group="shapes"),
        Workload("4x4096 open", (4096,) * 4, causal=False, group="shapes"),
        Workload("log-uniform open", RAGGED, causal=False, group="shapes"),
        Workload("1x32768 window 1024", (32768,), window=1024, group="shapes"),
        Workload("log-uniform window 1024", RAGGED, window=1024, group="shapes"),
        Workload("1x32768 D=64 window 1024", (32768,), dim=64, window=1024, group="shapes"),
    )
}
GROUPS = tuple(dict.fromkeys(w.group for w in WORKLOADS.values()))


def chosen(names: Sequence[str]) -> list[Workload]:
    """Workloads by name or by group; "all" is every one."""
    found: dict[str, Workload] = {}
    for name in names:
        some = [w for w in WORKLOADS.values() if name in (w.name, w.group, "all")]
        if not some:
            raise ValueError(f"workload {name!r} is not known: take {', '.join((*WORKLOADS, *GROUPS, 'all'))}")
        found |= {w.name: w for w in some}
    return list(found.values())
