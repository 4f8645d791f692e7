"""The number formats: E4M3, E2M1 and the power-of-two scale UE8M0.

A microscaled value is `code * 2^e`: a code of 8 or 4 bits, and a scale shared by a group. This module knows single
numbers and exponents; which numbers share a scale is the business of `quantize.py`.

Rounding is done by arithmetic, not by a cast: adding and subtracting `1.5 * 2^(p-1)` times the spacing of the format at
x (p = bits of the working significand) rounds x to that spacing, ties to even, in one IEEE operation. The same three
lines serve every format, every device and float32 or float64, and cannot depend on how a library's cast treats
overflow: values beyond the largest finite one saturate, NaN stays NaN, and no finite input becomes NaN.

Exponents come from `frexp`, so they are exact: no logarithm that is off by an ulp at a power of two.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

MIN_EXPONENT, MAX_EXPONENT = -127, 127
"""What UE8M0 can express: 2^(b - 127) for b = 0..254; b = 255 is NaN."""


@dataclass(frozen=True)
class Format:
    """A sign-magnitude floating-point format without infinities.

    mantissa: stored fraction bits. emin: exponent of the smallest normal number, and of all subnormal ones.
    largest: largest finite magnitude. emax: exponent of `largest`. bits: width of a code.
    """

    name: str
    mantissa: int
    emin: int
    emax: int
    largest: float
    bits: int


E4M3 = Format("e4m3", mantissa=3, emin=-6, emax=8, largest=448.0, bits=8)
E2M1 = Format("e2m1", mantissa=1, emin=0, emax=2, largest=6.0, bits=4)

_SIGNIFICAND = {torch.float32: 24, torch.float64: 53}
_EXPONENT_BITS = {torch.float32: (torch.int32, 0x7F800000), torch.float64: (torch.int64, 0x7FF0000000000000)}


def round_to(x: Tensor, fmt: Format) -> Tensor:
    """x (float32 or float64) rounded to `fmt` at scale 1: nearest, ties to even, saturating; NaN stays NaN. The sign of
    a zero is not kept."""
    x = x.clamp(-fmt.largest, fmt.largest)
    integer, mask = _EXPONENT_BITS[x.dtype]
    power = (x.view(integer) & mask).view(x.dtype).clamp_(min=2.0**fmt.emin)  # 2^floor(log2 |x|), at least 2^emin
    magic = power.mul_(1.5 * 2.0 ** (_SIGNIFICAND[x.dtype] - 1 - fmt.mantissa))
    return x.add_(magic).sub_(magic)


def encode(x: Tensor, fmt: Format) -> Tensor:
    """Codes (uint8) of x rounded to `fmt` at scale 1. E2M1 codes use the low four bits, sign in bit 3. NaN in E4M3 is
    0x7F (with its sign dropped); E2M1 has none, and NaN is refused by `quantize.py` before it gets here."""
    value = round_to(x.to(torch.float64), fmt)
    magnitude = value.abs()
    exponent = torch.where(magnitude == 0, fmt.emin, (torch.frexp(magnitude).exponent - 1).clamp(min=fmt.emin))
    steps = magnitude * exp2_int(fmt.mantissa - exponent)  # in units of the spacing: 0 .. 2^(mantissa + 1) - 1
    biased = exponent - fmt.emin
    code = (biased << fmt.mantissa) + steps.nan_to_num(0).to(
        exponent.dtype
    )  # a hidden bit in `steps` carries into the exponent
    code = code | (torch.signbit(x).to(code.dtype) << (fmt.bits - 1))
    if fmt is E4M3:
        code = torch.where(value.isnan(), 0x7F, code)
    return code.to(torch.uint8)


def decode(codes: Tensor, fmt: Format, dtype: torch.dtype = torch.float32) -> Tensor:
    """Values of uint8 codes, in `dtype`."""
    code = codes.to(torch.int32)
    magnitude = code & ((1 << (fmt.bits - 1)) - 1)
    biased, fraction = magnitude >> fmt.mantissa, magnitude & ((1 << fmt.mantissa) - 1)
    hidden = (biased > 0).to(torch.int32) << fmt.mantissa
    exponent = (biased - 1).clamp(min=0) + fmt.emin - fmt.mantissa
    value = (fraction + hidden) * exp2_int(exponent)
    if fmt is E4M3:
        value = torch.where(magnitude == 0x7F, torch.nan, value)
    return torch.where((code >> (fmt.bits - 1)) > 0, -value, value).to(dtype)


def scale_exponent(amax: Tensor, fmt: Format, rule: str = "ceil", largest: float | None = None) -> Tensor:
    """The exponent e (int32) of the scale 2^e for a group whose largest magnitude is exactly `amax`.

    ceil: the smallest e with amax <= largest * 2^e: nothing clips. floor (OCP's): floor(log2 amax) - emax: the top of
    the range clips, up to an eighth of E4M3's. Limited to what UE8M0 holds; a group of zeros has e = 0.
    `largest` replaces the format's own (NVFP4 counts a scale and a code together).
    """
    fraction, exponent = torch.frexp(amax)
    if rule == "floor":
        e = exponent - 1 - fmt.emax
    elif rule == "ceil":
        top_fraction, top_exponent = math.frexp(largest or fmt.largest)
        e = exponent - top_exponent + (fraction > top_fraction).to(exponent.dtype)
    else:
        raise ValueError(f"scale_rule={rule!r}: allowed are 'ceil' and 'floor'")
    return torch.where(amax == 0, 0, e.clamp(MIN_EXPONENT, MAX_EXPONENT)).to(torch.int32)


def exp2_int(exponent: Tensor, dtype: torch.dtype = torch.float64) -> Tensor:
    """2^exponent for integer exponents in -1022..1023, exact: the bits of a float64 are put together."""
    return ((exponent.to(torch.int64) + 1023) << 52).view(torch.float64).to(dtype)


def encode_ue8m0(exponent: Tensor) -> Tensor:
    """Scale bytes of exponents -127..127."""
    return (exponent + 127).to(torch.uint8)


def decode_ue8m0(byte: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Scales of bytes: 0 is 2^-127, 254 is 2^127, 255 is NaN."""
    value = exp2_int(byte.to(torch.int32) - 127)
    return torch.where(byte == 255, torch.nan, value).to(dtype)
