"""Whether a contender computes attention, before anybody is told how fast.

Two checks of one training call each, on the very tensors that are timed.

* **Mass**: with V = 1 and dO = 1, O is 1 in every row and dV adds up to the number of queries. A cosine does not see a
  sum that loses a quarter of its terms evenly; this does. Limit 2^-8, for the last 128 rows of the longest document (where
  the bias of a truncating accumulator is largest) and for all of dV.
* **Error**: O, dQ, dK and dV of the longest document and the first group of heads against float32 attention on the same
  inputs, relative L2. The limit is each contender's own format's (peers.py).

What is not finite fails both.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from .peers import Contender, Inputs
from .workloads import Workload

LIMIT = 2.0**-8
CHUNK = 2**27
"""Scores in memory at a time."""


@dataclass(frozen=True)
class Verdict:
    """Figures of the two checks, and why they are not good enough: empty if they are."""

    mass_o: float
    mass_dv: float
    errors: tuple[float, ...]
    faults: tuple[str, ...]

    def to_dict(self) -> dict[str, object]:
        errors = dict(zip(("o", "dq", "dk", "dv"), self.errors))
        return {"mass_o": self.mass_o, "mass_dv": self.mass_dv, "errors": errors, "faults": list(self.faults)}


def check(contender: Contender, workload: Workload, inputs: Inputs) -> Verdict:
    """Both checks. V and dO are overwritten meanwhile and hold their numbers again afterwards."""
    v, do = inputs[2], inputs[3]
    kept = v.clone(), do.clone()
    v.fill_(1), do.fill_(1)
    contender.prepare()
    mass = masses(contender.read(contender.train()), workload)
    v.copy_(kept[0]), do.copy_(kept[1])
    contender.prepare()
    errors = differences(contender.read(contender.train()), workload, inputs)
    faults = [
        f"{name} keeps {1 + bias:.4f} of its sum where 1 is right"
        for name, bias in zip(("O", "dV"), mass)
        if not abs(bias) < LIMIT
    ]
    faults += [
        f"{name} is off by {error:.3f} where its format explains {contender.tolerance}"
        for name, error in zip(("O", "dQ", "dK", "dV"), errors)
        if not error < contender.tolerance
    ]
    return Verdict(*mass, errors, tuple(faults))


def longest(workload: Workload) -> tuple[int, int]:
    """First row and end of the longest document."""
    at = workload.lengths.index(max(workload.lengths))
    start = sum(workload.lengths[:at])
    return start, start + workload.lengths[at]


def masses(results: tuple[Tensor, ...], workload: Workload) -> tuple[float, float]:
    """How far O and dV are from what they must be, where V = 1 and dO = 1: 0 is right."""
    o, _, _, dv = results
    end = longest(workload)[1]
    last = o.reshape(workload.tokens, -1)[max(0, end - min(128, max(workload.lengths))) : end]
    due = workload.tokens * workload.heads * workload.dim
    return float(last.double().mean()) - 1, float(dv.double().sum()) / due - 1


def differences(results: tuple[Tensor, ...], workload: Workload, inputs: Inputs) -> tuple[float, ...]:
    """Relative L2 errors of O, dQ, dK, dV, of the longest document and the first group of heads."""
    a, b = longest(workload)
    group = workload.heads // workload.kv_heads
    q, k, v, do, _ = inputs
    want = exact(q[a:b, :group], k[a:b, 0], v[a:b, 0], do[a:b, :group], workload.causal, workload.window)
    found = []
    for x, y, heads in zip(results, want, (group, group, 1, 1)):
        x = x.reshape(workload.tokens, -1, workload.dim)[a:b, :heads].float()
        y = y.view(x.shape)
        found.append(float((x - y).norm() / y.norm()) if bool(x.isfinite().all()) else math.inf)
    return tuple(found)


def exact(
    q: Tensor, k: Tensor, v: Tensor, do: Tensor, causal: bool, window: int | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(o, dq, dk, dv) in float32 of one document and one key head: q, dO (L, heads, D), k, v (L, D)."""
    allowed = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        return _exact(q, k.float(), v.float(), do, causal, window)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = allowed


def _exact(
    q: Tensor, k: Tensor, v: Tensor, do: Tensor, causal: bool, window: int | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    length, heads, dim = q.shape
    scale = dim**-0.5
    o, dq = torch.empty_like(q, dtype=torch.float32), torch.empty_like(q, dtype=torch.float32)
    dk, dv = torch.zeros_like(k), torch.zeros_like(v)
    step = max(1, CHUNK // length)
    for h in range(heads):
        for a in range(0, length, step):
            b = min(length, a + step)
            end = b if causal else length
            x, g = q[a:b, h].float(), do[a:b, h].float()
            p = x @ k[:end].T * scale
            if causal:
                p[:, a:b].masked_fill_(torch.ones(b - a, b - a, dtype=torch.bool, device=p.device).triu_(1), -torch.inf)
            if window is not None:
                p.masked_fill_(torch.ones_like(p, dtype=torch.bool).tril_(a - window - 1), -torch.inf)
            p = p.softmax(-1)
            o[a:b, h] = p @ v[:end]
            dv[:end] += p.T @ g
            u = p * (g @ v[:end].T - (g * o[a:b, h]).sum(-1, keepdim=True)) * scale
            dq[a:b, h] = u @ k[:end]
            dk[:end] += u.T @ x
    return o, dq, dk, dv
