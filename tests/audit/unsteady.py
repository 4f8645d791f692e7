"""Ten correct attentions whose last bits are dice, as sums by atomics leave them: none may be called a leak.

Each splits the sum over keys (or queries) at random and adds the parts in a random order in float32 or bfloat16.
They differ in where, how often and by how much.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from flamia.audit.controls import mask_of, weights


@dataclass
class Atomic:
    """Exact weights; sums of ``tensors`` in up to ``splits`` parts, kept in ``dtype``, in one call of ``every``."""

    tensors: str = "O dQ dK dV"
    splits: int = 6
    dtype: torch.dtype = torch.float32
    every: float = 1.0
    sizes: tuple[float, ...] = ()  # relative noise on top, drawn anew for every call
    heads: int | None = None  # only the first heads are noisy
    drift: float = 1.0  # sizes grow by this every call
    choices: int = 0  # few ways to split, chosen anew for every call

    def __post_init__(self) -> None:
        self.dice, self.calls = torch.Generator().manual_seed(5), 0

    def roll(self, n: int) -> int:
        return int(torch.randint(n, (1,), generator=self.dice))

    def add(self, name: str, terms: str, x: Tensor, y: Tensor, dim: int) -> Tensor:
        """einsum over one long dimension (``dim`` of x, the first of y), in parts."""
        exact = torch.einsum(terms, x, y)
        if name not in self.tensors.split() or float(torch.rand(1, generator=self.dice)) >= self.every:
            return exact
        n, dice = len(y), self.dice
        if self.choices:
            dice = torch.Generator().manual_seed(self.roll(self.choices))
        edges = sorted({0, n, *torch.randint(n, (self.splits - 1,), generator=dice).tolist()})
        spans = list(pairwise(edges))
        out = torch.zeros_like(exact, dtype=self.dtype)
        for m in torch.randperm(len(spans), generator=dice).tolist():
            a, b = spans[m]
            out = out + torch.einsum(terms, x.narrow(dim, a, b - a), y[a:b]).to(self.dtype)
        total = out.double()
        if self.sizes:
            size = self.sizes[self.roll(len(self.sizes))] * self.drift**self.calls
            total = total * (1 + size * torch.randn(total.shape, generator=self.dice, dtype=torch.float64))
        if self.heads is not None:
            total = torch.cat([total[:, : self.heads], exact[:, self.heads :]], 1)
        return total

    def _read(self, q: Tensor, k: Tensor, v: Tensor, cu: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        self.calls += 1
        q, k, v = q.double(), *(x.double().repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
        return q, k, v, weights(q, k, mask_of(len(q), cu), q.shape[-1] ** -0.5)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, cu: Tensor) -> Tensor:
        _, _, v64, p = self._read(q, k, v, cu)
        return self.add("O", "hij,jhd->ihd", p, v64, 2).to(q.dtype)

    def backward(self, q: Tensor, k: Tensor, v: Tensor, cu: Tensor, do: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q64, k64, v64, p = self._read(q, k, v, cu)
        g, scale, group = do.double(), q.shape[-1] ** -0.5, q.shape[1] // k.shape[1]
        dp = torch.einsum("ihd,jhd->hij", g, v64)
        # D from the rounded O of a noisy forward, as kernels take it: rows of U then sum to noise.
        o = self.add("O", "hij,jhd->ihd", p, v64, 2).to(torch.float32).double()
        u = p * (dp - (g * o).sum(-1).T[..., None])
        dq = self.add("dQ", "hij,jhd->ihd", u, k64, 2) * scale
        dk = self.add("dK", "hij,ihd->jhd", u, q64, 1) * scale
        dv = self.add("dV", "hij,ihd->jhd", p, g, 1)
        dk, dv = (x.unflatten(1, (-1, group)).sum(2) for x in (dk, dv))
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


UNSTEADY: dict[str, Callable[[], Atomic]] = {
    "float32 sums in random order": lambda: Atomic(),
    "dQ alone": lambda: Atomic("dQ"),
    "dK and dV alone": lambda: Atomic("dK dV"),
    "bfloat16 parts": lambda: Atomic(dtype=torch.bfloat16),
    "one call in ten": lambda: Atomic(every=0.1),
    "one call in a hundred, coarse": lambda: Atomic(dtype=torch.bfloat16, every=0.01),
    "sizes from 2^-24 to 2^-7": lambda: Atomic(sizes=(2.0**-24, 2.0**-20, 2.0**-16, 2.0**-12, 2.0**-7)),
    "one head": lambda: Atomic(heads=1),
    "noise that grows with every call": lambda: Atomic(sizes=(2.0**-16,), drift=1.01),
    "three ways to split": lambda: Atomic(choices=3),
}
