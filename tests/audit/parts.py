"""One correct packed attention, forward and backward, made of parts that can be replaced.

A mutant of it is a single part that reads something it should not: ``Attention(v=fn)`` reads V through ``fn(v,
call)``. Parts, in the order in which they are used (float64 throughout, one rounding to the dtype of q at the end)::

    q k v      the operands as read, (T, H, D)        s      scores, (H, T, T)
    seen       the mask, (H, T, T) bool               m      what is subtracted before the exponential, (H, T, 1)
    e          the exponentials                       l      their sum, (H, T, 1)
    p          the weights e / l                      o      P V, (T, H, D)
    do         dO as dK and dV read it                dq_do  dO as dQ reads it
    delta      rowsum(P * dP), (H, T, 1)              dq_u   U = P * (dP - delta) as dQ reads it
    dq dk dv   the gradients, (T, H, D)               poison rows that a NaN or infinity reaches, (T,) bool

A non-finite token makes NaN of the rows that see it and of no others, so that even ``nonfinite`` can be claimed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flamia.audit.controls import documents


class Call:
    """What a part may look at: the operands given (finite ones), where documents lie, and the scores."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, cu: Tensor, do: Tensor | None, window: int | None) -> None:
        given = {"q": q, "k": k, "v": v} | ({} if do is None else {"do": do})
        self.bad = {n: ~x.isfinite().flatten(1).all(1) for n, x in given.items()}
        clean = {n: torch.nan_to_num(x.double(), 0.0, 0.0, 0.0) for n, x in given.items()}
        self.q, self.k, self.v, self.do = clean["q"], clean["k"], clean["v"], clean.get("do", torch.zeros(0))
        self.backward = do is not None
        self.total, self.heads, self.group = len(q), q.shape[1], q.shape[1] // k.shape[1]
        self.spans = documents(cu)
        self.doc, self.pos = torch.zeros(len(q), dtype=torch.long), torch.zeros(len(q), dtype=torch.long)
        for n, (a, b) in enumerate(self.spans):
            self.doc[a:b], self.pos[a:b] = n, torch.arange(b - a)
        self.scores = torch.zeros(0)  # before the mask, once they are known
        self.same = self.doc[:, None] == self.doc[None, :]
        at = torch.arange(len(q))
        self.ahead = at[None, :] - at[:, None]
        self.seen = self.same & (self.ahead <= 0)
        if window is not None:
            self.seen = self.seen & (self.ahead >= -window)

    def lengths(self) -> Tensor:
        """(T,) length of every token's document."""
        return torch.tensor([b - a for a, b in self.spans])[self.doc]


class Attention:
    """``Attention()`` is exact; every keyword replaces one part by ``fn(part, call)``."""

    def __init__(self, left: int | None = None, **parts: Callable[[Any, Call], Any]) -> None:
        self.left, self.parts = left, parts

    def part(self, name: str, x: Tensor, call: Call) -> Tensor:
        return self.parts[name](x, call) if name in self.parts else x

    def _weights(self, c: Call) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        q, k, v = (self.part(n, getattr(c, n), c) for n in ("q", "k", "v"))
        k, v = (x.repeat_interleave(c.group, 1) for x in (k, v))
        s = c.scores = self.part("s", torch.einsum("ihd,jhd->hij", q, k) * q.shape[-1] ** -0.5, c)
        seen = self.part("seen", c.seen.expand(c.heads, -1, -1), c)
        s = s.masked_fill(~seen, -torch.inf)
        e = self.part("e", (s - self.part("m", s.amax(-1, keepdim=True), c)).exp(), c)
        p = e / self.part("l", e.sum(-1, keepdim=True), c)
        return q, k, v, self.part("p", p, c)

    def _poisoned(self, c: Call) -> Tensor:
        rows = c.bad["q"] | (c.seen & (c.bad["k"] | c.bad["v"])).any(1)
        return self.part("poison", rows, c)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, cu: Tensor) -> Tensor:
        c = Call(q, k, v, cu, None, self.left)
        _, _, v64, p = self._weights(c)
        o = self.part("o", torch.einsum("hij,jhd->ihd", p, v64), c)
        o[self._poisoned(c)] = torch.nan
        return o.to(q.dtype)

    def backward(self, q: Tensor, k: Tensor, v: Tensor, cu: Tensor, do: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        c = Call(q, k, v, cu, do, self.left)
        q64, k64, v64, p = self._weights(c)

        def u_of(name: str) -> tuple[Tensor, Tensor]:
            read = self.part(name, c.do, c)
            dp = torch.einsum("ihd,jhd->hij", read, v64)
            delta = (p * dp).sum(-1, keepdim=True)
            return read, p * (dp - (self.part("delta", delta, c) if name == "dq_do" else delta))

        read, u = u_of("do")
        dq_u = self.part("dq_u", u_of("dq_do")[1] if self.parts else u, c)
        scale = q.shape[-1] ** -0.5
        dq = self.part("dq", torch.einsum("hij,jhd->ihd", dq_u, k64) * scale, c)
        dk, dv = torch.einsum("hij,ihd->jhd", u, q64) * scale, torch.einsum("hij,ihd->jhd", p, read)
        dk, dv = (x.unflatten(1, (-1, c.group)).sum(2) for x in (dk, dv))
        dk, dv = self.part("dk", dk, c), self.part("dv", dv, c)
        rows = self._poisoned(c) | c.bad["do"]
        dq[rows] = torch.nan
        fed = (c.seen & rows[:, None]).any(0) | c.bad["k"] | c.bad["v"]
        dk[fed], dv[fed] = torch.nan, torch.nan
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)
