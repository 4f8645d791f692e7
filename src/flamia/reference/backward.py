"""The backward, recomputed from the saved O and LSE with the forward's own views of Q, K and V.

    P = 2^(s - lse)    E = G V^T    D = rowsum(G O) - dLSE    U = P (E - D)    dV = P^T G    dQ = a U K    dK = a U^T Q

D, E and dV read the same reconstructed G. If they did not, or if E read another V than O did, D would no longer be the
mean of E under P, and rows with an attention sink would multiply the difference.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flamia.packing import Documents
from flamia.recipe import Recipe
from flamia.reference.accumulate import Gradients
from flamia.reference.diagnostics import Diagnostics
from flamia.reference.exponential import exp2
from flamia.reference.forward import _rows_times, scores
from flamia.reference.problem import LOG2E, Block, Problem


def backward(
    do: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    residual: Tensor,
    documents: Documents,
    recipe: Recipe,
    scale: float,
    diagnostics: dict | None = None,
    wanted: tuple[bool, bool, bool] = (True, True, True),
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v, in their shapes and q's dtype (float64 without rounding).

    do: (Tq, Hq, Dv) gradient of o; dlse: (Hq, Tq) gradient of lse, or None. o, lse, residual: what `forward` returned.
    diagnostics: a dict that receives what rounding did to the weights (diagnostics.py). wanted: which of the three to
    compute; the others come back zero.
    """
    return pull(Problem(q, k, v, do, documents, recipe, scale), dlse, o, lse, residual, diagnostics, wanted)


def pull(
    problem: Problem,
    dlse: Tensor | None,
    o: Tensor,
    lse: Tensor,
    residual: Tensor,
    diagnostics: dict | None = None,
    wanted: tuple[bool, bool, bool] = (True, True, True),
) -> tuple[Tensor, Tensor, Tensor]:
    """`backward` of a call whose operands are encoded already, or will be when they are read."""
    if dlse is not None:
        problem.bad["q"] = problem.bad["q"] | ~dlse.t().isfinite()
    gradients = Gradients(problem, wanted)
    watch = Diagnostics(problem) if diagnostics is not None else None
    for block in problem.blocks():
        if not block.keys:
            continue
        p = probabilities(block, lse)
        e = torch.cat(
            [_rows_times(block.read("e_g", s), block.read("e_v", s).transpose(-1, -2)) for s in block.segments], -1
        )
        d = delta(block, p, e, o, residual)
        if dlse is not None:
            d = d - block.queries(dlse.t().to(torch.float64))[..., None]
        u = torch.where(block.visible, p * (e - d), 0.0)
        weights = gradients.add(block, p, u)
        if watch is not None:
            watch.add(block, p, e, d, u, weights)
    if watch is not None and diagnostics is not None:
        diagnostics.update(watch.summary())
    return gradients.finish()


def probabilities(block: Block, lse: Tensor) -> Tensor:
    """P from the saved LSE, (Hk, G, R, N): zero where hidden, NaN where a visible token (or its dO) is not finite."""
    reference = block.queries(lse.t().to(torch.float64))[..., None] * LOG2E
    reference = torch.where(reference.isneginf(), torch.inf, reference)  # rows that see no key
    p = exp2(scores(block) - reference, block.problem.recipe.exp2)
    return torch.where(block.visible, p, 0.0)


def delta(block: Block, p: Tensor, e: Tensor, o: Tensor, residual: Tensor) -> Tensor:
    """D, (Hk, G, R, 1): from the saved output, with its remainder, or the mean of E under P itself."""
    if block.problem.recipe.delta == "centered":
        mass = p.sum(-1, keepdim=True)
        mean = torch.where(block.visible, p * e, 0.0).sum(-1, keepdim=True)
        return torch.where(mass == 0, 0.0, mean / torch.where(mass == 0, 1.0, mass))
    out = block.queries(o).to(torch.float64)
    if len(residual):
        out = out + block.queries(residual).to(torch.float64)
    return (block.read("e_g", block.segments[0]) * out).sum(-1, keepdim=True)
