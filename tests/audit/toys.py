"""Attentions to audit: sound ones, unsteady ones, and ones with a fault that no control has."""

from itertools import pairwise

import torch
import torch.nn.functional as F

from flamia.audit.controls import attend, mask_of


def per_row(q, k, v, cu):
    """Exact attention that gathers what a row sees and touches nothing else, so that not even NaN can cross."""
    seen, group, out = mask_of(len(q), cu), q.shape[1] // k.shape[1], []
    for i in range(len(q)):
        js = seen[i].nonzero().flatten()
        kk, vv = (x[js].double().repeat_interleave(group, 1) for x in (k, v))
        s = torch.einsum("hd,jhd->hj", q[i].double(), kk) * q.shape[-1] ** -0.5
        out.append(torch.einsum("hj,jhd->hd", s.softmax(-1), vv))
    return torch.stack(out).to(q.dtype)


def torch_sdpa(q, k, v, cu):
    """PyTorch's own attention, document by document, in the dtype given: its bits may follow the shape."""
    ends = cu.tolist()
    parts = []
    for a, b in pairwise(ends):
        if b > a:
            one = (x[a:b].transpose(0, 1)[None] for x in (q, k, v))
            parts.append(F.scaled_dot_product_attention(*one, is_causal=True, enable_gqa=True)[0].transpose(0, 1))
    return torch.cat(parts)


def batched_exact(q, k, v):
    """(B, T, H, D): each row of the batch on its own."""
    cu = torch.tensor([0, q.shape[1]])
    return torch.stack([attend(q[b], k[b], v[b], cu) for b in range(len(q))])


def batched_packed(fn):
    """A packed callable with the batch's rows as documents."""

    def call(q, k, v):
        cu = torch.arange(len(q) + 1) * q.shape[1]
        return fn(*(x.flatten(0, 1) for x in (q, k, v)), cu).unflatten(0, q.shape[:2])

    return call


class Noisy:
    """Sound, but its last bits are dice; optionally on top of a leaky attention."""

    def __init__(self, fn=attend, size=2.0**-7):
        self.fn, self.size = fn, size
        self.rng = torch.Generator().manual_seed(1)

    def __call__(self, q, k, v, cu):
        o = self.fn(q, k, v, cu)
        return o * (1 + self.size * torch.randn(o.shape, generator=self.rng)).to(o.dtype)


class Delayed:
    """Delayed scaling: V's scale comes from the call before."""

    def __init__(self):
        self.amax = torch.tensor(1.0, dtype=torch.float64)

    def __call__(self, q, k, v, cu):
        step = self.amax / 128
        self.amax = v.detach().double().abs().max().clamp_min(1e-30)
        rounded = (v.detach().double() / step).round() * step
        return attend(q, k, (v + (rounded - v.detach().double()).to(v.dtype)), cu)


def reaching_back(q, k, v, cu):
    """A window one token too long on the left: 41 keys where (40, 0) was asked for means 42."""
    seen = mask_of(len(q), cu)
    i = torch.arange(len(q))
    return attend(q, k, v, cu, seen=seen & (i[:, None] - i[None, :] <= 41))


def windowed(q, k, v, cu):
    """Exact attention with window (40, 0)."""
    i = torch.arange(len(q))
    return attend(q, k, v, cu, seen=mask_of(len(q), cu) & (i[:, None] - i[None, :] <= 40))


def lookahead(q, k, v, cu):
    """A causal mask that is off by three."""
    i = torch.arange(len(q))
    return attend(q, k, v, cu, seen=mask_of(len(q), cu, causal=False) & (i[None, :] - i[:, None] <= 3))


def unboosted(q, k, v, cu):
    """P rounded to E4M3 without a boost while the normaliser keeps what was lost."""
    group = q.shape[1] // k.shape[1]
    k64, v64 = (x.double().repeat_interleave(group, 1) for x in (k, v))
    s = torch.einsum("ihd,jhd->hij", q.double(), k64) * q.shape[-1] ** -0.5
    s = s.masked_fill(~mask_of(len(q), cu), -torch.inf)
    p = (s - s.amax(-1, keepdim=True)).exp()
    rounded = p + (p.detach().to(torch.float8_e4m3fn).double() - p.detach())
    return torch.einsum("hij,jhd->ihd", rounded / p.sum(-1, keepdim=True), v64).to(q.dtype)


def off_by_one(tile):
    """Causal, but the last row of each tile sees the first key of the next."""

    def call(q, k, v, cu):
        seen = mask_of(len(q), cu)
        for a, b in pairwise(cu.tolist()):
            for edge in range(a + tile, b, tile):
                seen[edge - 1, edge] = True
        return attend(q, k, v, cu, seen=seen)

    return call


def with_lse(q, k, v, seen, window=None):
    """Exact attention under a mask (queries, keys), and its LSE (H, T): -inf, and O of 0, where a row sees nothing."""
    group = q.shape[1] // k.shape[1]
    q64, k64, v64 = (x.double().repeat_interleave(group if n else 1, 1) for n, x in enumerate((q, k, v)))
    s = torch.einsum("ihd,jhd->hij", q64, k64) * q.shape[-1] ** -0.5
    s = s.masked_fill(~seen, -1e30)
    m = s.detach().amax(-1, keepdim=True)
    e = (s - m).exp() * seen
    l = e.sum(-1, keepdim=True)
    o = torch.einsum("hij,jhd->ihd", e / l.clamp_min(1e-300), v64)
    lse = torch.where(l > 0, m + l.clamp_min(1e-300).log(), -torch.inf).squeeze(-1)
    return o.to(q.dtype), lse.float() if q.dtype != torch.float64 else lse


def aligned(cu_q, cu_k, right=0, corner="bottom"):
    """(queries, keys) bool: packed documents with other numbers of queries, the last of them at the last key."""
    seen = torch.zeros(int(cu_q[-1]), int(cu_k[-1]), dtype=torch.bool)
    for (a, b), (c, d) in zip(pairwise(cu_q.tolist()), pairwise(cu_k.tolist())):
        shift = (d - c) - (b - a) if corner == "bottom" else 0
        seen[a:b, c:d] = torch.arange(d - c)[None, :] <= torch.arange(b - a)[:, None] + shift + right
    return seen
