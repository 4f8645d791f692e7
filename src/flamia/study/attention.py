"""Attention for studies: the reference, on many documents of one length at once, and departures from it on purpose.

Documents that have one length are folded into heads: no scale, sum or mask of the reference crosses a head, as none
crosses a document, so (documents x length, heads) and (length, documents x heads) are the same computation, and the
second takes as many operations for sixteen documents as for one. Nothing in it asks the device anything, so a CUDA graph
can hold a whole training step.

An `Arithmetic` says what the forward and the backward compute. Equal recipes are the library's attention; different
ones, and the named faults of `faults.py`, are what an intervention study is about.
"""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from flamia.recipe import Recipe
from flamia.reference.backward import pull
from flamia.reference.forward import solve
from flamia.reference.problem import Problem
from flamia.study import faults
from flamia.study.quick import OneDocument, Shared, check_shape, quick
from flamia.train.model import Attend


@dataclass(frozen=True)
class Arithmetic:
    """forward, backward: recipes. fault: a name of `faults.FAULTS` with its number, such as ("coarse_u", 6), or None. sink:
    how many nats every query's logit of its document's first key is raised by."""

    forward: Recipe
    backward: Recipe
    fault: tuple[str, float] | None = None
    sink: float = 0.0

    @classmethod
    def of(cls, forward: str, backward: str | None = None, **options: Any) -> Arithmetic:
        return cls(Recipe.parse(forward), Recipe.parse(backward or forward), **options)

    @property
    def shares(self) -> bool:
        """Whether the backward may read what the forward encoded: they differ in nothing that encoding knows."""
        return replace(self.forward, exp2=self.backward.exp2) == self.backward

    def __str__(self) -> str:
        parts = [str(self.forward)]
        if self.backward != self.forward:
            parts.append(f"backward {self.backward}")
        if self.fault:
            parts.append(f"{self.fault[0]} {self.fault[1]:g}")
        if self.sink:
            parts.append(f"sink {self.sink:g}")
        return "; ".join(parts)


def fold(x: Tensor, length: int) -> Tensor:
    """(documents * length, H, D) to (length, documents * H, D)."""
    return x.unflatten(0, (-1, length)).transpose(0, 1).flatten(1, 2)


def unfold(x: Tensor, heads: int) -> Tensor:
    """The way back."""
    return x.unflatten(1, (-1, heads)).transpose(0, 1).flatten(0, 1).contiguous()


@contextmanager
def _in_place(arithmetic: Arithmetic, device: torch.device):
    with ExitStack() as stack:
        stack.enter_context(torch.autocast(device.type, enabled=False))
        stack.enter_context(quick())
        if arithmetic.fault:
            name, number = arithmetic.fault
            stack.enter_context(faults.FAULTS[name](number))
        yield


class Call:
    """One call on folded tensors: `forward`, then `backward` as often as one likes."""

    def __init__(self, arithmetic: Arithmetic, q: Tensor, k: Tensor, v: Tensor, length: int) -> None:
        self.arithmetic, self.length, self.heads = arithmetic, length, (q.shape[1], k.shape[1])
        self.scale = q.shape[-1] ** -0.5
        documents = OneDocument.of(length, q.device)
        q, k, v = (fold(x, length) for x in (q, k, v))
        with _in_place(arithmetic, q.device):
            self.problem = Problem(q, k, v, None, documents, arithmetic.forward, self.scale)
            self.o, self.lse, self.residual = solve(self.problem)

    def output(self) -> Tensor:
        return unfold(self.o, self.heads[0])

    def backward(self, do: Tensor, diagnostics: dict | None = None) -> tuple[Tensor, Tensor, Tensor]:
        g, backward = fold(do, self.length), self.arithmetic.backward
        with _in_place(self.arithmetic, do.device):
            if self.arithmetic.shares:
                problem: Problem = Shared(self.problem, g, backward)
            else:
                q, k, v = (self.problem.tensors[name] for name in "qkv")
                problem = Problem(q, k, v, g, self.problem.documents, backward, self.scale)
            dq, dk, dv = pull(problem, None, self.o, self.lse, self.residual, diagnostics)
        return unfold(dq, self.heads[0]), unfold(dk, self.heads[1]), unfold(dv, self.heads[1])


class _Folded(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, arithmetic: Arithmetic, length: int, seen: list | None):  # type: ignore[override]
        ctx.call, ctx.seen = Call(arithmetic, q, k, v, length), seen
        return ctx.call.output()

    @staticmethod
    def backward(ctx, do: Tensor):  # type: ignore[override]
        diagnostics: dict | None = None if ctx.seen is None else {}
        gradients = ctx.call.backward(do, diagnostics)
        if ctx.seen is not None:
            ctx.seen.append(diagnostics)
        del ctx.call
        return *gradients, None, None, None


def sunk(q: Tensor, k: Tensor, length: int, nats: float) -> tuple[Tensor, Tensor]:
    """q and k whose first feature does nothing but raise the logit of each document's first key by `nats`."""
    size = (nats * q.shape[-1] ** 0.5) ** 0.5
    first = torch.arange(len(k), device=k.device) % length == 0
    lean = torch.where(first, size, 0.0).to(k.dtype)[:, None, None].expand(-1, k.shape[1], 1)
    return (
        torch.cat([torch.full_like(q[..., :1], size), q[..., 1:]], -1),
        torch.cat([lean, k[..., 1:]], -1),
    )


def folded(arithmetic: Arithmetic, length: int, seen: list | None = None) -> Attend:
    """The reference, as a model wants it, for documents of `length` tokens. seen: receives what rounding did to the weights
    (reference/diagnostics.py), call by call of the backward."""
    for recipe in (arithmetic.forward, arithmetic.backward):
        check_shape(length, length, recipe)

    def attend(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor) -> Tensor:
        check_shape(len(q), length, arithmetic.forward)
        if arithmetic.sink:
            q, k = sunk(q, k, length, arithmetic.sink)
        out = _Folded.apply(q, k, v, arithmetic, length, seen)
        assert isinstance(out, Tensor)
        return out

    return attend


def dense(length: int, sink: float = 0.0) -> Attend:
    """torch's own 16-bit attention on documents of `length` tokens."""

    def attend(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor) -> Tensor:
        shared = q.shape[1] != k.shape[1]
        if sink:
            q, k = sunk(q, k, length, sink)
        query, key, value = (x.unflatten(0, (-1, length)).transpose(1, 2) for x in (q, k, v))
        o = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=shared)
        return o.transpose(1, 2).flatten(0, 1)

    return attend


def compare(recipes: list[str], length: int, device: torch.device, heads: int = 2, dim: int = 128) -> dict[str, float]:
    """Recipe -> the largest difference of any of O, dQ, dK, dV from the plain reference's, relative to the tensor's largest
    entry, on three documents of Gaussian tokens: 0 where bits agree."""
    from flamia import reference
    from flamia.packing import Documents

    generator = torch.Generator().manual_seed(0)
    count = 3 * length
    q, k, v, do = (torch.randn(count, heads, dim, generator=generator).bfloat16().to(device) for _ in range(4))
    documents = Documents.batched(3, length, length, None, 0, device)
    found = {}
    for text in recipes:
        recipe, scale = Recipe.parse(text), dim**-0.5
        o, lse, residual = reference.forward(q, k, v, documents, recipe, scale)
        expected = (o, *reference.backward(do, None, q, k, v, o, lse, residual, documents, recipe, scale))
        call = Call(Arithmetic(recipe, recipe), q, k, v, length)
        got = (call.output(), *call.backward(do))
        pairs = [(a.double(), b.double()) for a, b in zip(got, expected)]
        found[text] = max(((a - b).abs().max() / b.abs().max()).item() for a, b in pairs)
    return found
