"""What context-parallel attention sends, and in which form: tensors of a row for each token, gathered from all ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from flamia.codes import PER_TOKEN
from flamia.integrations.parallel_rows import decoded, encoded
from flamia.recipe import Recipe

_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # the older name warns since 2.13


class Field(NamedTuple):
    """One tensor (T, heads, width) on the wire: as it is, or its E4M3 codes and scales (`cell`; "" for none)."""

    dtype: torch.dtype
    cell: str

    @classmethod
    def of(cls, x: Tensor, cell: str = "") -> Field:
        return cls(x.dtype, cell)

    def pack(self, x: Tensor) -> tuple[Tensor, ...]:
        return encoded(x, self.cell) if self.cell else (x.contiguous(),)

    def read(self, parts: tuple[Tensor, ...], rows: Tensor) -> Tensor:
        """Some rows of what was packed, (len(rows), heads, width)."""
        if self.cell:
            codes, scales = parts
            return decoded(codes, scales, rows, self.dtype, self.cell)
        return parts[0].index_select(0, rows)


def coded(recipe: Recipe, *names: str) -> str:
    """The cell in whose codes an operand may travel, or "": all that its cells in both tables read is E4M3 with one kind of
    scale per token, in the given basis, and no weight is rounded relative to that scale."""
    folds = {"o_v": "o_p", "dv_g": "dv_p", "dq_k": "dq_u", "dk_q": "dk_u"}
    cells = {getattr(table, name) for table in (recipe.full, recipe.frontier) for name in names}
    weights = {
        getattr(table, folds[name]) for table in (recipe.full, recipe.frontier) for name in names if name in folds
    }
    plain = recipe.rounding and recipe.scale_rule == "ceil" and not (recipe.rotate and names[0][-1] in "qk")
    one = len(cells) == 1 and cells <= PER_TOKEN.keys()
    return cells.pop() if plain and one and weights <= {"bf16:none"} else ""


def gather(data: Tensor, most: int, ranks: int, group: dist.ProcessGroup | None) -> Callable[[], Tensor]:
    """Rows of all ranks, each rank's padded to `most`, in the order of ranks, and a row of zeros behind them. They are sent
    from now on, and are there when what is returned has been called. Gloo goes by way of the host."""
    shape, device = data.shape[1:], data.device
    wide = data.contiguous().flatten(1)
    if len(wide) < most:
        wide = torch.cat([wide, wide.new_zeros(most - len(wide), wide.shape[1])])
    by_host = data.is_cuda and dist.get_backend(group) == "gloo"
    wide = wide.cpu() if by_host else wide
    out = wide.new_empty(ranks * most + 1, wide.shape[1])
    out[-1:].zero_()
    # None where it is not asynchronous: the rows are there then
    work = _all_gather(out[:-1].view(torch.uint8), wide.view(torch.uint8), group=group, async_op=wide.is_cuda)

    def arrived() -> Tensor:
        if work is not None:
            work.wait()
        return (out.to(device) if by_host else out).unflatten(1, shape)

    return arrived
