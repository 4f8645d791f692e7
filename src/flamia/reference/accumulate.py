"""The three sums over tokens: dV = P^T G, dQ = a U K, dK = a U^T Q, from rounded weights.

dQ belongs to one block of queries and is finished with it. dK and dV gather over the blocks, and over the query heads of
a group, before they are rounded once. Parts that read Q or K in the rotated basis are summed apart and turned back once.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flamia.formats import exp2_int
from flamia.reference.problem import Block, Problem, Segment
from flamia.reference.weights import NONE, round_weights

DV_BOOST = 8
"""P of dV is at most 1, so 2^8 keeps it below E4M3's 448."""
FP16_TARGET = 2.0**14
"""What the boosted FP16 partial sums of dQ may reach; FP16 ends at 2^16."""


class Gradients:
    """dq, dk, dv of a call, in float64 until `finish`; those not wanted stay zero and cost nothing."""

    def __init__(self, problem: Problem, wanted: tuple[bool, bool, bool]) -> None:
        self.problem, self.wanted = problem, wanted
        zeros = {name: torch.zeros_like(x, dtype=torch.float64) for name, x in problem.tensors.items() if name != "g"}
        self.dq, self.dk, self.dv = zeros["q"], zeros["k"], zeros["v"]
        self.dk_rotated = torch.zeros_like(self.dk) if problem.recipe.rotate else None
        self.column: dict[int, Tensor] = {}  # largest exponents of dK's U in a key block so far, by its first row
        half = problem.recipe.dq_accumulator != "fp32" and problem.recipe.rounding
        self.boost = _row_boosts(problem) if half else None

    def add(self, block: Block, p: Tensor, u: Tensor) -> dict[str, Tensor]:
        """Add one block of queries; returns the rounded weights by cell name, for diagnostics."""
        weights: dict[str, list[Tensor]] = {"dq_u": [], "dk_u": [], "dv_p": []}
        dq = [torch.zeros_like(block.queries(self.dq)) for _ in range(2)]  # in the given and in the rotated basis
        carry: Tensor | None = None
        for segment in block.segments:
            if self.wanted[0]:
                rounded, carry = self._round(block, segment, "dq_u", u, carry)
                basis = int(self.problem.rotated("dq_k", segment.operands.dq_k))
                dq[basis] = self._add_dq(block, dq[basis], rounded, block.read("dq_k", segment))
                weights["dq_u"].append(rounded)
            if self.wanted[1]:
                rounded, _ = self._round(block, segment, "dk_u", u)
                rotated = self.problem.rotated("dk_q", segment.operands.dk_q)
                target = self.dk_rotated if rotated and self.dk_rotated is not None else self.dk
                block.add_keys(target, segment, _keys_times(rounded, block.read("dk_q", segment)))
                weights["dk_u"].append(rounded)
            if self.wanted[2]:
                rounded, _ = self._round(block, segment, "dv_p", p)
                block.add_keys(self.dv, segment, _keys_times(rounded, block.read("dv_g", segment)))
                weights["dv_p"].append(rounded)
        if self.wanted[0]:
            total = dq[0] + dq[1] @ self.problem.rotation if self.problem.recipe.rotate else dq[0]
            if self.boost is not None:
                total = total / block.queries(self.boost)[..., None]
            block.write_rows(self.dq, total * self.problem.scale)
        return {name: torch.cat(parts, -1) for name, parts in weights.items() if parts}

    def _round(
        self, block: Block, segment: Segment, cell: str, x: Tensor, before: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Columns of a segment, rounded as its table says, and the exponents that the next segment starts from."""
        recipe = self.problem.recipe
        x = x[..., segment.columns]
        if not recipe.rounding:
            return x, None
        spec = getattr(segment.operands, cell)
        running = recipe.u_range == "running" and cell in ("dq_u", "dk_u")
        if spec.endswith(":column") and running:  # state of each key block: the query blocks arrive in ascending order
            before = self._column_before(block, segment, x)
        rounded, carry = round_weights(
            x, spec, block.fold(cell, segment), boost=DV_BOOST, block=recipe.frontier_block, dtype=self.problem.dtype,
            visible=block.visible[:, segment.columns], running=running, before=before)  # fmt: skip
        if spec.endswith(":column") and running and carry is not None:
            self.column.update(zip(self._key_blocks(block, segment), carry.split(recipe.frontier_block, -1)))
        return rounded, carry if spec.endswith(":row") else None

    def _key_blocks(self, block: Block, segment: Segment) -> range:
        """The first rows, in the buffer, of a segment's key blocks."""
        start = block.key_rows.start
        return range(start + segment.start, start + segment.stop, self.problem.recipe.frontier_block)

    def _column_before(self, block: Block, segment: Segment, x: Tensor) -> Tensor:
        nothing = torch.full_like(x[..., :1, : self.problem.recipe.frontier_block], NONE, dtype=torch.int32)
        return torch.cat([self.column.get(row, nothing) for row in self._key_blocks(block, segment)], -1)

    def _add_dq(self, block: Block, dq: Tensor, u: Tensor, k: Tensor) -> Tensor:
        """dq + U K; with FP16 accumulation one key block after the other, boosted and rounded to FP16 each time."""
        if self.boost is None:
            return dq + (u.flatten(1, 2) @ k).unflatten(1, u.shape[1:3])
        boost, size = block.queries(self.boost)[..., None], self.problem.recipe.frontier_block
        for n in range(0, u.shape[-1], size):
            part = (u[..., n : n + size].flatten(1, 2) @ k[:, n : n + size]).unflatten(1, u.shape[1:3])
            dq = _half(dq + _half(part * boost))
        return dq

    def finish(self) -> tuple[Tensor, Tensor, Tensor]:
        if self.dk_rotated is not None:
            self.dk = self.dk + self.dk_rotated @ self.problem.rotation
        self.dk = self.dk * self.problem.scale
        dtype = self.problem.dtype if self.problem.recipe.rounding else torch.float64
        return self.dq.to(dtype), self.dk.to(dtype), self.dv.to(dtype)


def _half(x: Tensor) -> Tensor:
    return x.to(torch.float16).to(x.dtype)


def _keys_times(weights: Tensor, rows: Tensor) -> Tensor:
    """(Hk, G, R, n) transposed times (Hk, G, R, D): summed over the rows and over the heads of the group."""
    return weights.flatten(1, 2).transpose(-1, -2) @ rows.flatten(1, 2)


def _row_boosts(problem: Problem) -> Tensor:
    """beta_i = 2^floor(log2(2^14 / a_i)) with a_i = 2 |G_i| max|k| max|v|, (Tq, Hq): maxima over the document, or over
    the tokens up to i (the whole document where attention is not causal)."""
    q, k, v, g = (problem.tensors[name].to(torch.float64) for name in "qkvg")
    causal = problem.recipe.dq_accumulator == "fp16_causal"
    norm_g, norm_k, norm_v = g.norm(dim=-1), k.norm(dim=-1), v.norm(dim=-1)
    bound = torch.ones_like(norm_g)
    group = problem.query_heads // problem.key_heads
    for q0, q1, k0, k1 in problem.spans:
        if q1 == q0 or k1 == k0:
            continue
        if causal and problem.documents.right is not None:
            last = torch.arange(q1 - q0, device=q.device) + (k1 - k0) - (q1 - q0) + problem.documents.right
            product = norm_k[k0:k1].cummax(0).values * norm_v[k0:k1].cummax(0).values
            reach = product[last.clamp(0, k1 - k0 - 1)].repeat_interleave(group, 1)
            bound[q0:q1] = norm_g[q0:q1] * reach
        else:
            reach = (norm_k[k0:k1].amax(0) * norm_v[k0:k1].amax(0)).repeat_interleave(group, 0)
            bound[q0:q1] = (norm_g[q0:q1] if causal else norm_g[q0:q1].amax(0)) * reach
    ratio = torch.where(bound == 0, 1.0, FP16_TARGET / (2 * bound))
    exponent = (torch.frexp(ratio).exponent - 1).clamp(-1000, 1000)
    return exp2_int(exponent)
