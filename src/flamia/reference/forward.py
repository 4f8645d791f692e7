"""The forward: O = softmax(a Q K^T) V, rounded as the recipe says. docs/contract.md has the mathematics.

Per block of queries, in base 2: scores from each segment's view of Q and K; the running reference m of the online
softmax, which moves only when a step of keys exceeds it by more than `lag`; weights 2^(s - m); their rounded twins,
which multiply V; and at the end everything relative to the last m. Steps ascend from the first key to the last (one
exception: `row_reference`). P is rounded relative to the reference of its own step, as a kernel that goes through the
keys in that order rounds it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flamia.packing import Documents
from flamia.recipe import Recipe
from flamia.reference.exponential import exp2
from flamia.reference.problem import LOG2E, Block, Problem
from flamia.reference.weights import round_weights


def forward(
    q: Tensor, k: Tensor, v: Tensor, documents: Documents, recipe: Recipe, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Attention over packed documents.

    q: (Tq, Hq, D); k: (Tk, Hk, D); v: (Tk, Hk, Dv), all bfloat16 or float16 (any dtype without rounding). scale: a.
    Returns o (Tq, Hq, Dv) in q's dtype, zero where a row sees nothing; lse (Hq, Tq) float32, natural logarithm, -inf
    there; and the remainder of O that its rounding lost, in q's dtype, empty unless recipe.delta is "compensated".
    Without rounding, o and lse are float64.
    """
    return solve(Problem(q, k, v, None, documents, recipe, scale))


def solve(problem: Problem) -> tuple[Tensor, Tensor, Tensor]:
    """`forward` of a call whose operands are encoded already, or will be when they are read."""
    recipe = problem.recipe
    q, v = problem.tensors["q"], problem.tensors["v"]
    wide = not recipe.rounding
    o = q.new_zeros(q.shape[0], q.shape[1], v.shape[2], dtype=torch.float64 if wide else q.dtype)
    residual = torch.zeros_like(o) if recipe.delta == "compensated" else o.new_zeros(0)
    lse = torch.full(q.shape[:2], -torch.inf, dtype=torch.float64 if wide else torch.float32, device=q.device)
    for block in problem.blocks():
        if not block.keys:
            continue
        s = scores(block)
        m = row_reference(s, recipe, problem.documents.right == 0)
        last = m.amax(-1, keepdim=True)  # it never falls
        p = exp2(s - torch.where(m.isneginf(), 0.0, m).repeat_interleave(recipe.frontier_block, -1), recipe.exp2)
        last = torch.where(last.isneginf(), 0.0, last)
        to_last = torch.exp2(m - last).repeat_interleave(recipe.frontier_block, -1)
        rounded = round_by_segment(block, "o_p", p, recipe.boost)
        total = ((rounded if recipe.normalizer == "rounded" else p) * to_last).sum(-1, keepdim=True)
        weighted = rounded * to_last
        out = sum(_rows_times(weighted[..., seg.columns], block.read("o_v", seg)) for seg in block.segments)
        out = torch.where(total == 0, 0.0, out / torch.where(total == 0, 1.0, total))
        block.write_rows(o, out)
        block.write_rows(lse, (last + torch.log2(total))[..., 0] / LOG2E)
        if len(residual):
            block.write_rows(residual, out - block.queries(o).to(out.dtype))
    return o, lse.t().contiguous(), residual


def scores(block: Block) -> Tensor:
    """Logits in base 2, (Hk, G, R, N): -inf where the mask hides a key, NaN where a visible token is not finite."""
    problem = block.problem
    parts = []
    for segment in block.segments:
        keys = block.read("s_k", segment)
        parts.append(_rows_times(block.read("s_q", segment), keys.transpose(-1, -2)))
    s = torch.cat(parts, -1) * (problem.scale * LOG2E)
    s = torch.where(block.visible, s, -torch.inf)
    bad = block.queries(problem.bad["q"])[..., None] | block.key_side(problem.bad["k"])[:, None, None, :]
    return torch.where(bad & block.visible, torch.nan, s)


def row_reference(s: Tensor, recipe: Recipe, causal: bool = True) -> Tensor:
    """The online softmax's reference in each step of `frontier_block` keys, (Hk, G, R, steps).

    Steps ascend. Where scores at the frontier are made of other operands and the mask is causal, the last step comes first,
    the one with the row's own token, and the one after it moves the reference as if lag were 0: the first may have had one
    key alone. (Under other masks the last step that a row sees may be its document's last, a matter of length.)
    """
    own_first = recipe.frontier_scores != "e4m3" and causal
    largest = s.unflatten(-1, (-1, recipe.frontier_block)).amax(-1)
    if own_first:
        largest = largest.roll(1, -1)
    if recipe.lag == 0:
        m = largest.cummax(-1).values
    else:
        steps = [torch.full_like(largest[..., 0], -torch.inf)]
        for n, step in enumerate(largest.unbind(-1)):
            lag = 0 if own_first and n == 1 else recipe.lag
            steps.append(torch.where(step > steps[-1] + lag, step, steps[-1]))
        m = torch.stack(steps[1:], -1)
    return m.roll(-1, -1) if own_first else m


def round_by_segment(block: Block, cell: str, x: Tensor, boost: int) -> Tensor:
    """Weights (Hk, G, R, N) that meet a key-side operand, rounded as each segment's table says."""
    recipe = block.problem.recipe
    if not recipe.rounding:
        return x
    parts = []
    for segment in block.segments:
        rounded, _ = round_weights(
            x[..., segment.columns],
            getattr(segment.operands, cell),
            block.fold(cell, segment),
            boost=boost,
            block=recipe.frontier_block,
            dtype=block.problem.dtype,
            visible=block.visible[:, segment.columns],
            running=recipe.u_range == "running",
        )
        parts.append(rounded)
    return torch.cat(parts, -1)


def _rows_times(x: Tensor, y: Tensor) -> Tensor:
    """(Hk, G, R, n) times (Hk, n, m): the group's rows lie behind each other, so keys are read once per key head."""
    return (x.flatten(1, 2) @ y).unflatten(1, x.shape[1:3])
