"""What rounding did to the weights: the numbers that a cosine hides.

The row residual is the sum of a row of U, which is zero in real arithmetic; it is reported relative to the sum of the
magnitudes, signed, and splits exactly into what D got wrong about the mean of E and what P's mass lacks:
sum_j U_ij = (R_i - D_i) + (1 - rho_i) D_i, with rho_i = sum_j P_ij and R_i = sum_j P_ij E_ij.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flamia.reference.problem import Block, Problem


class Diagnostics:
    """Gathers over the blocks of a backward; `summary` gives

    row_residual, row_residual_rounded: (Hq, Tq) float64, signed and relative, of U before and after rounding (dQ side).
    mean_error, mass_error: (Hq, Tq) float64, the two parts of row_residual.
    u_zeroed_dq, u_zeroed_dk, p_zeroed: shares of the visible nonzero weights that rounding made zero; u_zeroed is the
    larger of the two sides. u_saturated, p_saturated: shares that lost more than an eighth of their magnitude at the top
    of the format (a clip: rounding alone loses at most a sixteenth of a normal number).
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        shape = (problem.tensors["q"].shape[0], problem.query_heads)
        zeros = [torch.zeros(shape, dtype=torch.float64, device=problem.tensors["q"].device) for _ in range(4)]
        self.rows = dict(zip(("row_residual", "row_residual_rounded", "mean_error", "mass_error"), zeros))
        self.counts: dict[str, list[int]] = {}

    def add(self, block: Block, p: Tensor, e: Tensor, d: Tensor, u: Tensor, weights: dict[str, Tensor]) -> None:
        magnitude = u.abs().sum(-1)
        unit = torch.where(magnitude == 0, 1.0, magnitude)
        mass = p.sum(-1)
        mean = torch.where(block.visible, p * e, 0.0).sum(-1)
        d = d[..., 0]
        for name, x in (
            ("row_residual", u.sum(-1)),
            ("row_residual_rounded", weights["dq_u"].sum(-1)),
            ("mean_error", mean - d),
            ("mass_error", (1 - mass) * d),
        ):
            block.write_rows(self.rows[name], x / unit)
        for name, exact, rounded in (("p", p, "dv_p"), ("u_dq", u, "dq_u"), ("u_dk", u, "dk_u")):
            given, left = exact.abs(), weights[rounded].abs()
            real = given > 0
            self._count(f"{name}_zeroed", real & (left == 0), real)
            largest = left == left.amax()
            self._count(f"{name}_saturated", real & largest & (left < given * 0.875), real)

    def _count(self, name: str, hits: Tensor, of: Tensor) -> None:
        counts = self.counts.setdefault(name, [0, 0])
        counts[0] += int(hits.sum())
        counts[1] += int(of.sum())

    def summary(self) -> dict:
        shares = {name: hits / max(total, 1) for name, (hits, total) in self.counts.items()}
        result: dict = {name: x.t().contiguous() for name, x in self.rows.items()}
        result |= {"p_zeroed": shares.get("p_zeroed", 0.0), "p_saturated": shares.get("p_saturated", 0.0)}
        result |= {f"u_zeroed_{side}": shares.get(f"u_{side}_zeroed", 0.0) for side in ("dq", "dk")}
        result["u_zeroed"] = max(result["u_zeroed_dq"], result["u_zeroed_dk"])
        result["u_saturated"] = max(shares.get("u_dq_saturated", 0.0), shares.get("u_dk_saturated", 0.0))
        return result
