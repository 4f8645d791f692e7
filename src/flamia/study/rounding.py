"""`formats.round_to` as one kernel: the same operations on each float64, in the same order, in one pass over memory.

The one product is exact (a power of two times 1.5 * 2^n), so whether a compiler joins it to the addition changes no bit.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from flamia.formats import Format

BLOCK = 1024


@triton.jit
def round_kernel(x, y, count, largest, smallest, factor, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    value = tl.load(x + at, mask=inside, other=0.0)
    top = tl.zeros_like(value) + largest
    value = tl.where(value > top, top, value)  # comparisons, so that NaN stays NaN
    value = tl.where(value < -top, -top, value)
    power = (value.to(tl.int64, bitcast=True) & 0x7FF0000000000000).to(tl.float64, bitcast=True)
    magic = tl.where(power < smallest, tl.zeros_like(value) + smallest, power) * factor
    tl.store(y + at, (value + magic) - magic, mask=inside)


def rounded(x: Tensor, fmt: Format) -> Tensor:
    """x (float64) rounded to `fmt` at scale 1."""
    y = torch.empty_like(x)
    if y.stride() != x.stride():  # x has gaps, or dimensions that were expanded
        x = x.contiguous()
        y = torch.empty_like(x)
    if x.numel():
        programs = -(-x.numel() // BLOCK)
        factor = 1.5 * 2.0 ** (52 - fmt.mantissa)
        round_kernel[(programs,)](x, y, x.numel(), fmt.largest, 2.0**fmt.emin, factor, BLOCK=BLOCK)
    return y
