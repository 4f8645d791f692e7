"""The route `mxfp8_scores` once more, in plain torch, for comparison with the kernels on the card.

Written from the contract and not from the kernels or the reference: document by document, dense, all heads at once, in
float64 except where the route rounds. Without `rounding` it is attention without any.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

LAG = 6 * math.log(2)


def encode(x: Tensor) -> Tensor:
    """The value that the E4M3 code and scale of each token stand for; (..., D) bfloat16 -> float64."""
    wide = x.double()
    amax = wide.abs().amax(-1, keepdim=True)
    mantissa, exponent = torch.frexp(amax / 448)
    e = torch.where(mantissa == 0.5, exponent - 1, exponent)
    e = torch.where(amax == 0, 0, 4 * torch.ceil(e.clamp(min=-127) / 4)).double()  # a multiple of four
    return (wide / 2**e).float().to(torch.float8_e4m3fn).double() * 2**e


def round16(x: Tensor) -> Tensor:
    return x.to(torch.bfloat16).double()


def visible(lq: int, lk: int, left: int | None, right: int | None, device) -> Tensor:
    """(lq, lk) bool: queries are counted from the bottom right."""
    i = torch.arange(lq, device=device)[:, None] + lk - lq
    j = torch.arange(lk, device=device)[None, :]
    seen = torch.ones(lq, lk, dtype=torch.bool, device=device)
    if right is not None:
        seen &= j <= i + right
    if left is not None:
        seen &= j >= i - left
    return seen


def whole(lq: int, lk: int, left: int | None, right: int | None, device) -> Tensor:
    """(lq, lk) bool: pairs of blocks of 128 positions of which every query sees every key, were there no end."""
    i = (torch.arange(lq, device=device)[:, None] + lk - lq) // 128 * 128
    j = torch.arange(lk, device=device)[None, :] // 128 * 128
    full = torch.ones(lq, lk, dtype=torch.bool, device=device)
    if right is not None:
        full &= j + 127 <= i + right
    if left is not None:
        full &= j >= i + 127 - left
    return full


def attention(q, k, v, do, spans, left, right, scale, dlse=None, rounding=True, edge=False):
    """(o, lse, dq, dk, dv) in float64; inputs (T, H, D), spans of (q0, q1, k0, k1), left/right None = open. edge: scores
    from Q and K as given wherever a pair of blocks straddles the mask's edge."""
    o = torch.zeros(q.shape, dtype=torch.float64, device=q.device)
    lse = torch.full((q.shape[1], q.shape[0]), -torch.inf, dtype=torch.float64, device=q.device)
    dq, dk, dv = (torch.zeros(x.shape, dtype=torch.float64, device=q.device) for x in (q, k, v))
    for q0, q1, k0, k1 in spans:
        if q0 == q1 or k0 == k1:
            continue
        seen = visible(q1 - q0, k1 - k0, left, right, q.device)
        g = None if dlse is None else dlse[:, q0:q1].double()
        full = whole(q1 - q0, k1 - k0, left, right, q.device) if edge else None
        found = document(q[q0:q1], k[k0:k1], v[k0:k1], do[q0:q1], g, seen, full, right == 0, scale, rounding)
        o[q0:q1], lse[:, q0:q1], dq[q0:q1], dk[k0:k1], dv[k0:k1] = found
    return o, lse, dq, dk, dv


def follow(s: Tensor, steps) -> Tensor:
    """The reference in each of some steps, (first key, lag), in their order."""
    found = [torch.full_like(s[..., 0], -torch.inf)]
    for n, lag in steps:
        largest = s[..., n : n + 128].amax(-1)
        found.append(torch.where(largest > found[-1] + lag, largest, found[-1]))
    return torch.stack(found[1:], -1)


def document(q, k, v, do, dlse, seen, full, causal, scale, rounding):
    """The same for one document; heads lead inside."""
    group, heads = q.shape[1] // k.shape[1], k.shape[1]
    rounded, encoded = (round16, encode) if rounding else (torch.Tensor.double, torch.Tensor.double)
    q, do = (x.transpose(0, 1) for x in (q, do))
    k, v = (x.transpose(0, 1).repeat_interleave(group, 0) for x in (k, v))
    s = encoded(q) @ encoded(k).mT
    if full is not None:
        s = torch.where(full, s, q.double() @ k.double().mT)
    s = (s * scale).masked_fill(~seen, -torch.inf)
    value, g = encoded(v), encoded(do)
    steps = range(0, k.shape[1], 128)
    if full is None or not causal:  # a reference moves, to the maximum, when a step exceeds it by 2^6
        references = follow(s, [(n, LAG) for n in steps])
    else:  # a row of blocks begins with the last that it sees, and the one after that moves it by any excess
        references = torch.full((*s.shape[:2], len(steps)), -torch.inf, dtype=s.dtype, device=s.device)
        blocks = (torch.arange(s.shape[1], device=s.device) + s.shape[2] - s.shape[1]) // 128
        for block in blocks.unique():
            rows = blocks == block
            seen_steps = [n for n in steps if seen[rows, n : n + 128].any()]
            order = [*seen_steps[-1:], *seen_steps[:-1]]
            moved = follow(s[:, rows], [(n, 0 if i == 1 else LAG) for i, n in enumerate(order)])
            for i, n in enumerate(order):
                references[:, rows, n // 128] = moved[..., i]
    m = torch.where(references == -torch.inf, 0, references)
    last = references.amax(-1, keepdim=True)
    last = torch.where(last == -torch.inf, 0, last)
    total = (s - last).exp().sum(-1)
    number = sum(
        (rounded((s[..., n : n + 128] - m[..., b : b + 1]).exp()) @ value[:, n : n + 128])
        * (m[..., b : b + 1] - last).exp()
        for b, n in enumerate(steps)
    )
    alive = total > 0
    o = torch.where(alive[..., None], number / total[..., None], 0)
    lse = torch.where(alive, last[..., 0] + total.log(), -torch.inf)
    out = o.to(torch.bfloat16).double() if rounding else o
    p = (s - torch.where(alive, lse, torch.inf)[..., None]).exp()
    delta = (g * out).sum(-1)
    if dlse is not None:
        delta = delta - dlse
    u = p * (g @ value.mT - delta[..., None])
    dv = rounded(p).mT @ g
    dq = rounded(u) @ k.double() * scale
    dk = rounded(u).mT @ q.double() * scale
    dk, dv = (x.unflatten(0, (heads, group)).sum(1) for x in (dk, dv))
    return o.transpose(0, 1), lse, *(x.transpose(0, 1) for x in (dq, dk, dv))
