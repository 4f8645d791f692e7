"""The sums that cosines do not see.

P in eight bits may drop the tail of a row while the normaliser keeps it: rows then weigh .64 in place of 1, the
loss is small against the whole in every norm, and training still drifts. These probes read the sums themselves, as
one number per length.

* ``O``      V = 1 and random weights: the mean of O - 1 over rows and heads, and the worst entry;
* ``dV``     dO = 1: dV summed over keys against the number of queries that feed them;
* ``dQ``     all keys of a document equal: every row of dQ is a row residual times that key, and should vanish
  against |dO| |v| |k|;
* ``common`` one large vector added to all keys moves no weight, so it moves dQ by nothing but rounding: |change| /
  |dQ|. In low bits that includes the rounding of K itself, which the vector makes coarser: read it beside bf16's;
* ``tail``   64 keys, one logit 8 above the rest with V = 0 there and 1 elsewhere: exact O is 63 e^-8 / (1 + 63
  e^-8) = .0207, and 0 if P underflows.

A contract on the first two: |bias| below 2^-8 at every length and not growing with it; the others are reported,
and only gross failures (a tail lost to the last bit, residuals as large as the gradient) are called broken.
Attentions with sinks or gates fail the first by design.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace

import torch

from .contract import Packing
from .probes import draw
from .targets import Inputs, Refused, Target

LIMIT = 2.0**-8


@dataclass(frozen=True)
class Mass:
    """Numbers of one length; None where the callable has no gradients or refused."""

    length: int
    o_bias: float | None = None
    o_worst: float | None = None
    dv_bias: float | None = None
    dq_equal: float | None = None
    dq_common: float | None = None
    tail: float | None = None
    refused: str | None = None

    def as_dict(self) -> dict[str, float | int | str | None]:
        return asdict(self)


def _packing(target: Target, length: int, cross: bool) -> Packing:
    lengths = (length,) if target.layout == "packed" else (length, length)
    return Packing(lengths, lengths if cross else None)


def measure(target: Target, length: int, left: int | None = None, seed: int = 0, cross: bool = False) -> Mass:
    """All sums at one length; ``left`` is how far back a row sees (the tail probe needs 64 visible keys). ``cross``: the
    callable takes the offsets of queries and of keys, here equal ones.
    """
    through, target.lse_gradient = target.lse_gradient, False  # a gradient of the LSE would add to the sums
    try:
        return _measure(target, length, left, seed, cross)
    finally:
        target.lse_gradient = through


def _measure(target: Target, length: int, left: int | None, seed: int, cross: bool) -> Mass:
    packing = _packing(target, length, cross)
    base = draw("plain", packing, target.heads, target.head_dim, target.dtype, seed + 77 + length)
    base = replace(base, q=(base.q.double() / 4).to(target.dtype))
    ones = replace(base, v=torch.ones_like(base.v), do=torch.ones_like(base.do))
    try:
        out = target.run(ones)
        o = out["O"].double() - 1
        got = Mass(length, o_bias=float(o.mean().abs()), o_worst=float(o.abs().max()))
        if "dV" in out:
            feeding = packing.total * target.heads[0] // target.heads[1]
            # dV's own entries are rounded to 16 bits; summed, those roundings cancel as they should.
            sums = out["dV"].double().sum(0) / feeding - 1
            equal, common = _residuals(target, base)
            got = replace(got, dv_bias=float(sums.mean().abs()), dq_equal=equal, dq_common=common)
        return replace(got, tail=_tail(target, cross) if length >= 64 and (left is None or left >= 63) else None)
    except Refused as refusal:
        return Mass(length, refused=str(refusal))


def _residuals(target: Target, base: Inputs) -> tuple[float, float]:
    """``dq_equal`` and ``dq_common``."""
    equal = replace(base, k=base.k[:1].expand_as(base.k).contiguous())
    dq = target.run(equal)["dQ"].double()
    scale = target.head_dim**-0.5
    size = (
        scale
        * base.do.double().norm(dim=-1).max()
        * base.v.double().norm(dim=-1).max()
        * equal.k.double().norm(dim=-1).max()
    )
    # Keys on a grid of halves stay exact when a vector of +-16 is added, so only arithmetic can tell the two calls
    # apart.
    grid = replace(base, k=(base.k.double() * 2).round().clamp(-4, 4).div(2).to(target.dtype))
    signs = torch.where(torch.arange(target.head_dim) % 2 == 0, 16.0, -16.0).to(target.dtype)
    plain, shifted = target.run(grid)["dQ"].double(), target.run(replace(grid, k=grid.k + signs))["dQ"].double()
    return float(dq.abs().max() / size), float((plain - shifted).norm() / plain.norm())


def _tail(target: Target, cross: bool) -> float:
    """O of the last row at 64 keys, as a fraction of the exact value."""
    packing, (hq, hk), dim = _packing(target, 64, cross), target.heads, target.head_dim
    q = torch.zeros(packing.total, hq, dim, dtype=target.dtype)
    k, v = (torch.zeros(packing.total, hk, dim, dtype=target.dtype) for _ in range(2))
    # Numbers that every format holds exactly, with a logit as near 8 as they allow.
    peak = min((m * 2.0**e for m in (1.0, 1.5) for e in range(8)), key=lambda x: abs(6 * x * dim**-0.5 - 8))
    q[..., 0] = peak
    for d in range(len(packing.lengths)):
        k[packing.start(d), :, 0] = 6.0
        v[packing.start(d) + 1 : packing.start(d) + 64] = 1.0
    logit = 6 * peak * dim**-0.5
    exact = 63 * math.exp(-logit) / (1 + 63 * math.exp(-logit))
    out = target.run(Inputs(q, k, v, torch.ones_like(q), packing))["O"]
    return float(out[packing.total - 1].double().mean()) / exact


def verdict(masses: list[Mass]) -> tuple[str, list[str]]:
    """("clean" | "leak" | "untried", reasons)."""
    seen = [m for m in masses if m.refused is None and m.o_bias is not None]
    if not seen:
        return "untried", ["no length was accepted"]
    wrong = []
    for name, label in (("o_bias", "O with V = 1"), ("dv_bias", "summed dV with dO = 1")):
        values = [(m.length, getattr(m, name)) for m in seen if getattr(m, name) is not None]
        if not values:
            continue
        for length, value in values:
            if not value < LIMIT:
                wrong.append(f"{label} is off by {value:.3g} at {length} tokens (limit {LIMIT:.3g})")
        first, last = values[0], values[-1]
        if len(values) > 1 and last[1] > max(2 * first[1], LIMIT / 4):
            wrong.append(
                f"{label}: the bias grows from {first[1]:.2g} at {first[0]} tokens to {last[1]:.2g} at {last[0]}"
            )
    for m in seen:
        if m.tail is not None and not 0.5 < m.tail < 1.5:
            wrong.append(f"a long tail under one peak reads {m.tail:.2g} of its weight: P underflows")
        if m.dq_equal is not None and not m.dq_equal < 2.0**-6:
            wrong.append(
                f"equal keys leave a dQ of {m.dq_equal:.2g} of |dO||v||k| at {m.length} tokens: rows of U do not "
                "sum to 0"
            )
    return ("leak" if wrong else "clean"), list(dict.fromkeys(wrong))
