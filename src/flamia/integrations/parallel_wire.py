"""What context-parallel attention sends, and in which form: a row of bytes for each token, one gather for each pass."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from flamia.codes import PER_TOKEN, encode_tokens, token_values
from flamia.recipe import Recipe

_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # the older name warns since 2.13


class Field(NamedTuple):
    """One tensor of a token on the wire: (heads, width) of a dtype, or its E4M3 codes and scales (`cell`; "" for none)."""

    heads: int
    width: int
    dtype: torch.dtype
    cell: str

    @classmethod
    def of(cls, x: Tensor, cell: str = "") -> Field:
        return cls(x.shape[1], x.shape[2], x.dtype, cell)

    @property
    def nbytes(self) -> int:
        return self.heads * (self.width + 1 if self.cell else self.width * self.dtype.itemsize)

    def pack(self, x: Tensor) -> Tensor:
        """(T, heads, width) -> (T, nbytes) uint8."""
        if self.cell:
            return torch.cat([part.flatten(1) for part in encode_tokens(x, self.cell)], 1)
        return x.to(self.dtype).contiguous().flatten(1).view(torch.uint8)

    def unpack(self, data: Tensor) -> Tensor:
        shape = (len(data), self.heads, self.width)
        if self.cell:
            codes, scales = data.split([self.heads * self.width, self.heads], 1)
            return token_values(codes.reshape(shape), scales[..., None], self.dtype, self.cell)
        return data.contiguous().view(self.dtype).view(shape)


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


def gather(data: Tensor, most: int, ranks: int, group: dist.ProcessGroup | None) -> Tensor:
    """Rows of bytes of all ranks, each rank's padded to `most`, in the order of ranks. Gloo goes by way of the host."""
    padded = torch.nn.functional.pad(data, (0, 0, 0, most - len(data)))
    padded = padded.cpu() if data.is_cuda and dist.get_backend(group) == "gloo" else padded.contiguous()
    out = padded.new_empty(ranks * most, data.shape[1])
    _all_gather(out, padded, group=group)
    return out.to(data.device)
