"""The route `mxfp8_scores` once more, in plain torch, for comparison with the kernels on the card.

Written from the contract and not from the kernels or the reference: document by document, dense, in float64 except where
the route rounds. `exact` is attention without any rounding.
"""

from __future__ import annotations

import torch
from torch import Tensor


def encode(x: Tensor) -> Tensor:
    """The value that the E4M3 code and scale of each token stand for; (..., D) bfloat16 -> float64."""
    wide = x.double()
    amax = wide.abs().amax(-1, keepdim=True)
    mantissa, exponent = torch.frexp(amax / 448)
    e = torch.where(mantissa == 0.5, exponent - 1, exponent)
    e = torch.where(amax == 0, torch.zeros_like(e), e.clamp(min=-127)).double()
    return (wide / 2**e).float().to(torch.float8_e4m3fn).double() * 2**e


def round16(x: Tensor) -> Tensor:
    return x.to(torch.bfloat16).double()


def attention(q, k, v, do, spans, left, right, scale, dlse=None, rounding=True):
    """(o, lse, dq, dk, dv) in float64; inputs (T, H, D), spans of (q0, q1, k0, k1), left/right None = open."""
    group = q.shape[1] // k.shape[1]
    o = torch.zeros(q.shape, dtype=torch.float64, device=q.device)
    lse = torch.full((q.shape[1], q.shape[0]), -torch.inf, dtype=torch.float64, device=q.device)
    dq, dk, dv = (torch.zeros(x.shape, dtype=torch.float64, device=q.device) for x in (q, k, v))
    rounded, encoded = (round16, encode) if rounding else (torch.Tensor.double, torch.Tensor.double)
    for q0, q1, k0, k1 in spans:
        lq, lk = q1 - q0, k1 - k0
        if lq == 0 or lk == 0:
            continue
        i = torch.arange(lq, device=q.device)[:, None] + lk - lq
        j = torch.arange(lk, device=q.device)[None, :]
        seen = torch.ones(lq, lk, dtype=torch.bool, device=q.device)
        if right is not None:
            seen &= j <= i + right
        if left is not None:
            seen &= j >= i - left
        for h in range(q.shape[1]):
            qh, kh, vh, gh = q[q0:q1, h], k[k0:k1, h // group], v[k0:k1, h // group], do[q0:q1, h]
            s = (encoded(qh) @ encoded(kh).T * scale).masked_fill(~seen, -torch.inf)
            value, g = encoded(vh), encoded(gh)
            steps = range(0, lk, 128)
            references = torch.stack([s[:, n : n + 128].amax(1) for n in steps], 1).cummax(1).values
            m = torch.where(references == -torch.inf, 0, references)
            last = m[:, -1:]
            total = (s - last).exp().sum(1)
            number = sum(
                (rounded((s[:, n : n + 128] - m[:, b : b + 1]).exp()) @ value[n : n + 128])
                * (m[:, b : b + 1] - last).exp()
                for b, n in enumerate(steps)
            )
            alive = total > 0
            o[q0:q1, h] = torch.where(alive[:, None], number / total[:, None], 0)
            lse[h, q0:q1] = torch.where(alive, last[:, 0] + total.log(), -torch.inf)
            out = o[q0:q1, h].to(torch.bfloat16).double() if rounding else o[q0:q1, h]
            p = (s - torch.where(alive, lse[h, q0:q1], torch.inf)[:, None]).exp()
            delta = (g * out).sum(1)
            if dlse is not None:
                delta = delta - dlse[h, q0:q1].double()
            u = p * (g @ value.T - delta[:, None])
            dv[k0:k1, h // group] += rounded(p).T @ g
            dq[q0:q1, h] = rounded(u) @ kh.double() * scale
            dk[k0:k1, h // group] += rounded(u).T @ qh.double() * scale
    return o, lse, dq, dk, dv
