"""What is timed: packed causal self-attention of documents, and how much arithmetic it is by convention.

FLOP convention (causal work only, whatever a kernel really multiplies): forward `2 D Hq sum L (L + 1)`, backward 2.5
times that, a training call 3.5 times.
"""

from __future__ import annotations

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

    @property
    def tokens(self) -> int:
        return sum(self.lengths)

    @property
    def forward_flops(self) -> int:
        return 2 * self.dim * self.heads * sum(n * (n + 1) for n in self.lengths)

    def inputs(self, device: str = "cuda", seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """q, k, v, dO (tokens, heads, dim) bfloat16 and cu_seqlens."""
        generator = torch.Generator(device).manual_seed(seed)
        shapes = [(self.tokens, h, self.dim) for h in (self.heads, self.kv_heads, self.kv_heads, self.heads)]
        q, k, v, do = (torch.randn(s, device=device, dtype=torch.bfloat16, generator=generator) for s in shapes)
        cu = torch.tensor([0, *self.lengths], dtype=torch.int64).cumsum(0).to(device, torch.int32)
        return q, k, v, do, cu


WORKLOADS = {
    w.name: w
    for w in (
        Workload("4x4096", (4096,) * 4),
        Workload("1x16384", (16384,)),
        Workload("1x16384, 16/4 heads", (16384,), kv_heads=4),
        Workload("2x16384", (16384,) * 2),
        Workload("1x32768", (32768,)),
        Workload("16x4096", (4096,) * 16),
        Workload("8192 + 224x256", (8192,) + (256,) * 224),
        Workload("64x1024", (1024,) * 64),
        Workload("1x65536", (65536,)),
    )
}
