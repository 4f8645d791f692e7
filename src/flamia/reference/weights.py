"""Rounding P and U, the operands that exist only inside the kernels.

A weight is rounded as `2^E * round(x / 2^E)`; the geometries differ in E. Wherever the companion operand's scale 2^c
varies along the contraction, the weight takes it over before rounding ("fold"): the product then reads plain codes, and
what is rounded is x * 2^c. Scales relative to a maximum never look at entries that the mask hides: those are zero here
already, and their companions' exponents take no part.

Shapes: x is (Hk, G, R, N): key heads, query heads of a group, the query block's rows, keys in whole blocks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flamia.formats import E2M1, E4M3, Format, exp2_int, round_to, scale_exponent
from flamia.quantize import GROUP, NVFP4_LARGEST

NONE = -(2**20)
"""An exponent that never wins a maximum: of groups that are all zero, and of what nobody has seen yet."""


@dataclass
class Fold:
    """The companion's exponents along the contraction, broadcastable to x, and which of them mean anything."""

    exponent: Tensor
    nonzero: Tensor

    @property
    def counted(self) -> Tensor:
        return torch.where(self.nonzero, self.exponent, NONE)


def round_weights(
    x: Tensor,
    cell: str,
    fold: Fold | None,
    *,
    boost: int,
    block: int,
    dtype: torch.dtype,
    visible: Tensor,
    running: bool = False,
    before: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """(x rounded as the cell says, the exponents to carry to the next segment or block).

    fold: the companion's exponents, (.., 1, N) for products over keys, (.., R, 1) for products over queries. visible:
    bool (R, N). running, before: keep the largest exponent so far, starting from `before`.
    """
    fmt_name, geometry = cell.split(":")
    if fmt_name == "bf16":
        return x.to(dtype).to(x.dtype), None
    if fmt_name == "nvfp4":
        return _nvfp4(x, geometry, fold, block), None
    fmt = E4M3 if fmt_name == "e4m3" else E2M1
    shift = torch.zeros((), dtype=torch.int32, device=x.device) if fold is None else fold.exponent
    carry = None
    if geometry == "boost":
        exponent = torch.full_like(shift, -boost)
    elif geometry == "relative" and fold is not None:
        reference, carry = _largest_companion(fold, block, before)
        exponent = reference - torch.where(fold.nonzero, fold.exponent, reference) - boost
    elif geometry == "masked" and fold is not None:
        exponent = _largest_visible(fold, visible) - fold.exponent - boost
    elif geometry in ("relative", "masked"):
        exponent = torch.full_like(shift, -boost)
    elif geometry == "square":
        exponent = scale_exponent(_square_amax(x), fmt)
    else:  # row, column
        largest, carry = _largest_own(_counted(x, fold), geometry, fmt, block, running, before)
        exponent = largest - shift
    scale = exp2_int(exponent)
    return round_to(x / scale, fmt) * scale, carry


def _counted(x: Tensor, fold: Fold | None) -> Tensor:
    """Magnitudes after the fold, for a maximum: zero where the companion's group is all zero. Its exponent of 0 means
    nothing there, and would dwarf companions that are small."""
    return x.abs() if fold is None else torch.where(fold.nonzero, x.abs() * exp2_int(fold.exponent), 0.0)


def _largest_own(
    y: Tensor, geometry: str, fmt: Format, block: int, running: bool, before: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """The exponent that holds y: per query over each key block, or per key over the query block; or the largest so far."""
    amax = y.unflatten(-1, (-1, block)).amax(-1) if geometry == "row" else y.amax(-2, keepdim=True)
    largest = torch.where(amax == 0, NONE, scale_exponent(amax, fmt))
    carry = None
    if running:
        if geometry == "row":
            largest = largest.cummax(-1).values
        if before is not None:
            largest = torch.maximum(largest, before)
        carry = largest[..., -1:] if geometry == "row" else largest
    largest = torch.where(largest == NONE, 0, largest)
    return (largest.repeat_interleave(block, -1) if geometry == "row" else largest), carry


def _largest_companion(fold: Fold, block: int, before: Tensor | None) -> tuple[Tensor, Tensor]:
    """The companion's largest exponent: over the key blocks so far, or over the rows of the query block."""
    if fold.counted.shape[-1] == 1:  # rows: one maximum for the block
        largest = fold.counted.amax(-2, keepdim=True)
        return torch.where(largest == NONE, 0, largest), largest
    largest = fold.counted.unflatten(-1, (-1, block)).amax(-1).cummax(-1).values
    if before is not None:
        largest = torch.maximum(largest, before)
    spread = largest.repeat_interleave(block, -1)
    return torch.where(spread == NONE, 0, spread), largest[..., -1:]


def _largest_visible(fold: Fold, visible: Tensor) -> Tensor:
    """Per row and 32 keys, the largest exponent among the keys that the row sees."""
    seen = torch.where(visible, fold.counted, NONE)
    largest = seen.unflatten(-1, (-1, GROUP)).amax(-1).repeat_interleave(GROUP, -1)
    return torch.where(largest == NONE, fold.exponent, largest)


def _square_amax(x: Tensor) -> Tensor:
    rows = -x.shape[-2] % GROUP
    magnitude = torch.where(x.isnan(), 0.0, x.abs())  # a row that is lost is no reason to round its neighbours coarsely
    tiles = torch.nn.functional.pad(magnitude, (0, 0, 0, rows)).unflatten(-1, (-1, GROUP)).unflatten(-3, (-1, GROUP))
    largest = tiles.amax((-1, -3)).repeat_interleave(GROUP, -1).repeat_interleave(GROUP, -2)
    return largest[..., : x.shape[-2], :]


def _nvfp4(x: Tensor, geometry: str, fold: Fold | None, block: int) -> Tensor:
    """E2M1 with an E4M3 scale per 16 keys or queries, and a power of two per row (or column) of the block in front."""
    shift = 1.0 if fold is None else exp2_int(fold.exponent)
    y = x * shift
    if geometry == "queries16":
        y = y.transpose(-1, -2)
    groups = y.unflatten(-1, (-1, 16))
    counted = _counted(x, fold)
    if geometry == "queries16":
        counted = counted.transpose(-1, -2)
    amax = counted.unflatten(-1, (-1, 16)).amax(-1, keepdim=True)
    blocks = amax.unflatten(-2, (-1, min(block, y.shape[-1]) // 16))
    common = blocks.amax(-2, keepdim=True).expand_as(blocks).flatten(-3, -2)
    power = exp2_int(scale_exponent(common, E2M1, "ceil", NVFP4_LARGEST))
    scale = round_to(amax / 6.0 / power, E4M3) * power
    y = (round_to(torch.where(scale > 0, groups / scale, 0.0), E2M1) * scale).flatten(-2)
    if geometry == "queries16":
        y = y.transpose(-1, -2)
    return y / shift
