"""Inputs and comparisons that the tests share."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from flamia.packing import Documents


def offsets(lengths) -> Tensor:
    """cu_seqlens of documents of the given lengths."""
    return torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)


def documents(lengths, left=None, right=0, key_lengths=None) -> Documents:
    return Documents(offsets(lengths), offsets(key_lengths if key_lengths is not None else lengths), left, right)


def randn(*shape, seed=0, dtype=torch.bfloat16) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def inputs(rows, heads=(4, 2), dim=32, dim_v=None, seed=0, key_rows=None, dtype=torch.bfloat16):
    """q, k, v, dO for `rows` queries and `key_rows` keys."""
    hq, hk = heads
    key_rows = rows if key_rows is None else key_rows
    dim_v = dim if dim_v is None else dim_v
    return (
        randn(rows, hq, dim, seed=seed, dtype=dtype),
        randn(key_rows, hk, dim, seed=seed + 1, dtype=dtype),
        randn(key_rows, hk, dim_v, seed=seed + 2, dtype=dtype),
        randn(rows, hq, dim_v, seed=seed + 3, dtype=dtype),
    )


def exact_attention(q, k, v, do, dlse, docs: Documents, scale: float):
    """(o, lse, dq, dk, dv) in float64 by the textbook: a loop over documents and heads, a whole score matrix each."""
    q, k, v, do = (x.double() for x in (q, k, v, do))
    o = torch.zeros(q.shape[0], q.shape[1], v.shape[2], dtype=torch.float64)
    lse = torch.full((q.shape[1], q.shape[0]), -math.inf, dtype=torch.float64)
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    group = q.shape[1] // k.shape[1]
    for a, b, c, d in docs.spans():
        lq, lk = b - a, d - c
        seen = docs.visible(torch.arange(lq) + lk - lq, torch.arange(lk))
        for h in range(q.shape[1]):
            s = (q[a:b, h] @ k[c:d, h // group].T * scale).masked_fill(~seen, -math.inf)
            row = torch.logsumexp(s, -1) if lk else torch.full((lq,), -math.inf, dtype=torch.float64)
            p = torch.where(seen, (s - torch.where(row.isinf(), 0, row)[:, None]).exp(), 0)
            out = p @ v[c:d, h // group]
            o[a:b, h], lse[h, a:b] = out, row
            e = do[a:b, h] @ v[c:d, h // group].T
            delta = (do[a:b, h] * out).sum(-1, keepdim=True)
            if dlse is not None:
                delta = delta - dlse[h, a:b, None]
            u = p * (e - delta)
            dq[a:b, h] = scale * u @ k[c:d, h // group]
            dk[c:d, h // group] += scale * u.T @ q[a:b, h]
            dv[c:d, h // group] += p.T @ do[a:b, h]
    return o, lse, dq, dk, dv


def same(xs, ys) -> bool:
    """Equal bit for bit, one by one."""
    return all(torch.equal(x, y) for x, y in zip(xs, ys, strict=True))


def relative(x: Tensor, reference: Tensor) -> float:
    """Relative L2 error."""
    return float((x.double() - reference.double()).norm() / reference.double().norm().clamp_min(1e-300))


def cosine(x: Tensor, reference: Tensor) -> float:
    return float(torch.nn.functional.cosine_similarity(x.double().flatten(), reference.double().flatten(), 0))


def same_bits(x: Tensor, y: Tensor) -> bool:
    """Bit for bit, NaN matched by position."""
    if x.shape != y.shape or x.dtype != y.dtype:
        return False
    integer = {2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()]
    nan = x.isnan()
    return bool(torch.equal(nan, y.isnan()) and torch.equal(x.view(integer)[~nan], y.view(integer)[~nan]))


GROWTHS = (2.0, 5.875, 6.0, 6.125, 30.0, 300.0)
"""Powers of two by which scores climb over the key blocks of `growing`: below, at and above where a reference moves."""


def growing(length: int, growth: float, peak: str, dim: int = 32, seed: int = 0) -> tuple[Tensor, ...]:
    """q, k, v, dO of one document with heads (2, 1), for a softmax scale of ln 2: scores climb by `growth` powers of two to
    the first, a middle or the last block of 128 keys ("first", "middle", "last") and fall behind it; for the second head by
    half. Within a block they vary by less than two, and reach the block's largest in its sixth key.

    The codes of what makes scores add up exactly in the few bits of an 8-bit accumulator, so that it makes no difference who
    adds them. They are three features, small in K: what K's tokens have in common meets the error of D in dQ. The other
    features are random, in K or in Q, and zero in the other.
    """
    generator = torch.Generator().manual_seed(seed)
    key = torch.arange(length)
    block, last = key // 128, (length - 1) // 128
    top = {"first": 0, "middle": last // 2, "last": last}[peak]
    climb = torch.where(block <= top, block / max(top, 1) + (top == 0), (last - block) / max(last - top, 1))
    high = (growth * climb).to(torch.float8_e4m3fn).float()
    within = torch.randint(0, 16, (length,), generator=generator) * (key % 128 != 5) / 8
    q, k, v, do = (torch.randn(length, h, dim, generator=generator) for h in (2, 1, 1, 2))
    q[..., : dim // 2], k[..., dim // 2 :] = 0, 0
    q[:, 0, :3], q[:, 1, :3] = 64, 32
    k[:, 0, :3] = torch.stack([high, growth * climb - high, -within], -1) / 64
    return q.bfloat16(), k.bfloat16(), (v + 0.5).bfloat16(), do.bfloat16()
