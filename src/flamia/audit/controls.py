"""Attentions that are known to leak, and one that does not.

A test that has never failed proves nothing: a well-known review found a leak test whose cut lay on the edge of the
very block that leaked. So every audit runs these callables under its own probes and refuses to say "clean" unless
each one is caught in the tensor and through the operand named here, and unless the exact attention comes out
spotless. Each is a few lines on top of ``attend``: float64 inside, one rounding at the end, so that a difference
in its bits is a difference in what it read.

All take ``(q, k, v, cu_seqlens)`` with q (T, Hq, D), k, v (T, Hk, D). Where the fault sits in the backward alone,
the callable brings a ``backward``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor


class _Straight(torch.autograd.Function):
    """Rounds in the forward, passes gradients through: what quantisation-aware training does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rounded: Tensor) -> Tensor:
        return rounded

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return grad, None


def straight(x: Tensor, fn: Callable[[Tensor], Tensor]) -> Tensor:
    return _Straight.apply(x, fn(x.detach()).to(x.dtype))


def e4m3(x: Tensor, amax: Tensor) -> Tensor:
    """Round to E4M3 under the power-of-two scale that admits ``amax`` (ceil rule); a written-out rounding that knows
    no torch format.
    """
    exponent = torch.where(amax > 0, torch.ceil(torch.log2(amax.clamp_min(1e-300) / 448.0)), torch.zeros_like(amax))
    y = x / torch.exp2(exponent)
    step = torch.exp2(torch.floor(torch.log2(y.abs().clamp_min(2.0**-6))) - 3)
    return (torch.round(y / step) * step).clamp(-448, 448) * torch.exp2(exponent)


def documents(cu: Tensor) -> list[tuple[int, int]]:
    ends = cu.tolist()
    return [(a, b) for a, b in pairwise(ends) if b > a]


def mask_of(total: int, cu: Tensor, causal: bool = True) -> Tensor:
    seen = torch.zeros(total, total, dtype=torch.bool, device=cu.device)
    for a, b in documents(cu):
        seen[a:b, a:b] = True
    return seen.tril() if causal else seen


def weights(q: Tensor, k: Tensor, seen: Tensor, scale: float) -> Tensor:
    """(H, T, T) attention weights in float64."""
    s = torch.einsum("ihd,jhd->hij", q, k) * scale
    return s.masked_fill(~seen, -math.inf).softmax(-1).nan_to_num(0.0)


def attend(
    q: Tensor, k: Tensor, v: Tensor, cu: Tensor, *, causal: bool = True, seen: Tensor | None = None, gain: float = 1.0
) -> Tensor:
    """Exact attention: float64 throughout, rounded once to the dtype of q."""
    group = q.shape[1] // k.shape[1]
    q64, k64, v64 = q.double(), k.double().repeat_interleave(group, 1), v.double().repeat_interleave(group, 1)
    seen = mask_of(len(q), cu, causal) if seen is None else seen
    p = weights(q64, k64, seen, gain * q.shape[-1] ** -0.5)
    return torch.einsum("hij,jhd->ihd", p, v64).to(q.dtype)


def by_groups(x: Tensor, size: int, spans: list[tuple[int, int]], fn: Callable[[Tensor], Tensor]) -> Tensor:
    """Apply ``fn`` to every group of ``size`` tokens, counted from the start of each span."""
    out = x.clone()
    for a, b in spans:
        for g in range(a, b, size):
            out[g : min(g + size, b)] = fn(x[g : min(g + size, b)])
    return out


def shared_scale(x: Tensor) -> Tensor:
    """One power-of-two E4M3 scale per head for all the tokens given."""
    x = x.double()
    return e4m3(x, x.abs().amax((0, 2), keepdim=True))


def block_scaled(which: str, size: int, by_address: bool = False) -> Callable[..., Tensor]:
    def fn(q: Tensor, k: Tensor, v: Tensor, cu: Tensor) -> Tensor:
        spans = [(0, len(q))] if by_address else documents(cu)
        given = {"q": q, "k": k, "v": v}
        given[which] = straight(given[which], lambda x: by_groups(x.double(), size, spans, shared_scale))
        return attend(given["q"], given["k"], given["v"], cu)

    return fn


def per_tensor(q: Tensor, k: Tensor, v: Tensor, cu: Tensor) -> Tensor:
    """Current scaling: one amax over each whole tensor."""
    q, k, v = (straight(x, lambda y: e4m3(y.double(), y.double().abs().amax())) for x in (q, k, v))
    return attend(q, k, v, cu)


def block_means(which: str, size: int) -> Callable[..., Tensor]:
    """Tokens are mixed with the mean of their block, later members included."""

    def fn(q: Tensor, k: Tensor, v: Tensor, cu: Tensor) -> Tensor:
        given = {"q": q, "k": k, "v": v}
        given[which] = by_groups(given[which], size, documents(cu), lambda x: 0.5 * (x + x.mean(0, keepdim=True)))
        return attend(given["q"], given["k"], given["v"], cu)

    return fn


def fft_filter(q: Tensor, k: Tensor, v: Tensor, cu: Tensor) -> Tensor:
    """A filter along positions by a discrete Fourier transform: circular, so the last token reaches the first."""

    def smooth(x: Tensor) -> Tensor:
        f = torch.fft.rfft(x.double(), dim=0)
        keep = torch.exp(-torch.linspace(0, 3, len(f), dtype=torch.float64, device=x.device))
        return torch.fft.irfft(f * keep[:, None, None], n=len(x), dim=0).to(x.dtype)

    return attend(q, torch.cat([smooth(k[a:b]) for a, b in documents(cu)]), v, cu)


def centred_keys(q: Tensor, k: Tensor, v: Tensor, cu: Tensor) -> Tensor:
    """K minus its mean over the call, as some 8-bit kernels smooth it: harmless in real arithmetic, not after
    rounding.
    """
    return attend(q, straight(k, lambda x: x.double() - x.double().mean(0, keepdim=True)), v, cu)


def mask_lost(q: Tensor, k: Tensor, v: Tensor, cu: Tensor) -> Tensor:
    return attend(q, k, v, cu, causal=False)


def packing_lost(q: Tensor, k: Tensor, v: Tensor, cu: Tensor) -> Tensor:
    return attend(q, k, v, torch.tensor([0, len(q)], device=cu.device))


def length_gain(q: Tensor, k: Tensor, v: Tensor, cu: Tensor) -> Tensor:
    """A softmax temperature that follows the longest document's length: contents stay put, the length leaks."""
    return attend(q, k, v, cu, gain=math.log(2 + max(b - a for a, b in documents(cu))) / math.log(64))


class OwnBackward:
    """Exact forward, exact dK and dV, and a dQ that reads something shared: the faults that looking at O cannot find.

    ``view(do, cu)`` is the dO that dQ reads, ``product(u, k, v, do, cu)`` the sum over keys of U (H, T, T) against
    K (T, H, D).
    """

    def __init__(self, view: Callable[..., Tensor] | None = None, product: Callable[..., Tensor] | None = None) -> None:
        self.view, self.product = view, product

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, cu: Tensor) -> Tensor:
        return attend(q, k, v, cu)

    def backward(self, q: Tensor, k: Tensor, v: Tensor, cu: Tensor, do: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        group, scale = q.shape[1] // k.shape[1], q.shape[-1] ** -0.5
        q64, g = q.double(), do.double()
        k64, v64 = k.double().repeat_interleave(group, 1), v.double().repeat_interleave(group, 1)
        p = weights(q64, k64, mask_of(len(q), cu), scale)

        def u_of(grad: Tensor) -> Tensor:
            e = torch.where(p > 0, torch.einsum("ihd,jhd->hij", grad, v64), 0.0)
            return p * (e - (p * e).sum(-1, keepdim=True))

        u = u_of(g)
        read = u if self.view is None else u_of(self.view(g, cu))
        dq = torch.einsum("hij,jhd->ihd", read, k64) if self.product is None else self.product(read, k64, v64, g, cu)
        dk, dv = torch.einsum("hij,ihd->jhd", u, q64) * scale, torch.einsum("hij,ihd->jhd", p, g)
        dk, dv = (x.unflatten(1, (-1, group)).sum(2) for x in (dk, dv))
        return (dq * scale).to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def square_scaled(u: Tensor, k: Tensor, v: Tensor, do: Tensor, cu: Tensor) -> Tensor:
    """U in E4M3 with one scale per square of 32 queries and 32 keys."""
    out = torch.zeros_like(u)
    for a, b in documents(cu):
        for i in range(a, b, 32):
            for j in range(a, i + 1, 32):
                tile = u[:, i : min(i + 32, b), j : min(j + 32, b)]
                out[:, i : min(i + 32, b), j : min(j + 32, b)] = e4m3(tile, tile.abs().amax((1, 2), keepdim=True))
    return torch.einsum("hij,jhd->ihd", out, k)


def boosted_half(u: Tensor, k: Tensor, v: Tensor, do: Tensor, cu: Tensor) -> Tensor:
    """dQ held in float16 under one power of two for the call, sized by the largest operands anywhere in it."""
    bound = 2 * do.abs().max() * k.abs().max() * v.abs().max()
    boost = torch.exp2(torch.floor(torch.log2(2.0**14 / bound.clamp_min(1e-300))))
    return (torch.einsum("hij,jhd->ihd", u, k) * boost).half().double() / boost


def shared_gradient(do: Tensor, cu: Tensor) -> Tensor:
    return by_groups(do, 32, documents(cu), shared_scale)


@dataclass(frozen=True)
class Control:
    """A callable, and every (contract, tensor, operand) in which it must be caught. Nothing expected: it must come
    out clean.
    """

    name: str
    fn: Callable[..., Any]
    expects: tuple[tuple[str, str, str], ...]
    group: int | None = None  # tokens that share whatever is shared; None: no fixed group


EXACT = Control("exact attention", attend, ())

LEAKY: tuple[Control, ...] = (
    Control("V scale per 32 tokens", block_scaled("v", 32), (("prefix", "O", "v"), ("prefix", "dQ", "v")), 32),
    Control("K scale per 32 tokens", block_scaled("k", 32), (("prefix", "O", "k"), ("prefix", "dQ", "k")), 32),
    Control("Q scale per 32 tokens", block_scaled("q", 32), (("prefix", "O", "q"), ("prefix", "dQ", "q")), 32),
    Control(
        "V scale per 32 addresses", block_scaled("v", 32, True), (("document", "O", "v"), ("offset", "O", "layout")), 32
    ),
    Control(
        "one scale per tensor", per_tensor, (("prefix", "O", "v"), ("document", "O", "v"), ("document", "dK", "q"))
    ),
    Control(
        "K mixed with 64-token means", block_means("k", 64), (("prefix", "O", "k"), ("truncate", "O", "layout")), 64
    ),
    Control("V mixed with 16-token means", block_means("v", 16), (("prefix", "O", "v"),), 16),
    Control("circular filter on K", fft_filter, (("prefix", "O", "k"),)),
    Control("K centred over all documents", centred_keys, (("prefix", "O", "k"), ("document", "O", "k"))),
    Control("causal mask lost", mask_lost, (("prefix", "O", "v"), ("prefix", "dQ", "k"))),
    Control(
        "packing lost", packing_lost, (("document", "O", "v"), ("document", "dV", "do"), ("offset", "O", "layout"))
    ),
    Control(
        "dQ: U scale per 32 x 32 square",
        OwnBackward(product=square_scaled),
        (("prefix", "dQ", "v"), ("prefix", "dQ", "do")),
        32,
    ),
    Control("dQ: dO scale per 32 tokens", OwnBackward(view=shared_gradient), (("prefix", "dQ", "do"),), 32),
    Control(
        "dQ: float16 boost over the call",
        OwnBackward(product=boosted_half),
        (("prefix", "dQ", "do"), ("document", "dQ", "v")),
    ),
    Control("temperature follows the length", length_gain, (("truncate", "O", "layout"),)),
)
