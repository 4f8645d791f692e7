"""Scale geometries: which elements share a scale, and the values that encoding leaves.

`quantize` takes a packed tensor (T, H, D) and a cell "format:geometry" and returns codes and scales whose product is
what the matrix products read. It is the specification of the quantising kernels, which give the same codes and scales
bit for bit.

Groups are formed from positions inside a document, group p // 32 for a token at position p, so they restart at every
document and never see where the document lies. Where the largest magnitude of a group is taken over several tokens, all
of them share its fate: that is the channel through which a later token can change how an earlier one is rounded, and why
`recipe.py` allows such groups only where no frontier of the mask can cut one.

A power-of-two scale that does not vary along a contraction factors out of the product. `exponent` holds it per token; a
scale that varies along the contraction is folded into the other operand before that is rounded (reference/weights.py).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from flamia.formats import E2M1, E4M3, encode, exp2_int, round_to, scale_exponent
from flamia.packing import Documents

GROUP = 32
"""Tokens or features that share an MX scale; NVFP4 has 16."""

COARSE = 4
"""Exponents of "coarse" scales are rounded up to a multiple of it.

That buys equal scales: neighbouring tokens often have the *same* one, each from itself alone. Nothing leaks, and a kernel
that finds equal scales in a group of tokens multiplies by one number where it would multiply by a vector. Tokens differ where
their largest elements lie on both sides of a step, 28 * 2^(4 n); docs/lab-log.md has how often.

It costs range: such a scale is up to eight times larger than the smallest that fits. E4M3 is a floating-point format, so a
normal number has its four bits whatever the scale. But elements below 2^-10.8 of their token's largest may be subnormal
(2^-13.8 with the smallest scale), with a bit less for each halving, and those below 2^-14.8 (2^-17.8) may read zero."""

NVFP4_LARGEST = 6.0 * 448.0
"""The largest magnitude of NVFP4: the largest code times the largest E4M3 scale. A power of two in front of the E4M3
scales (per token, or per block for stripes) keeps them in range: alone they span 6 * 2^-10 .. 2688, and a gradient of
2^-12 would vanish. Powers of two per token are safe and factor out of products over features."""


@dataclass(frozen=True)
class Quantized:
    """A tensor as the products see it.

    units: (T, H, D) float64, the rounded elements in units of their scale (values of the code's format).
    scale: float64, broadcasts to `units`; `units * scale` is the decoded value, exact in float64.
    exponent: (T, H) int32 where the scale is 2^exponent for the whole token, else None: NVFP4, stripes, 16 bits.
    nonzero: (T, H) bool, False where a token's whole group is zero, so that its exponent means nothing. None with exponent.
    """

    units: Tensor
    scale: Tensor
    exponent: Tensor | None = None
    nonzero: Tensor | None = None
    bits: int = 16

    @cached_property
    def values(self) -> Tensor:
        return self.units * self.scale

    @property
    def codes(self) -> Tensor:
        """(T, H, D) uint8. Raises TypeError for 16-bit cells, which have none."""
        if self.bits == 16:
            raise TypeError("a 16-bit cell has values, not codes")
        return encode(self.units, E4M3 if self.bits == 8 else E2M1)


def quantize(
    x: Tensor, cell: str, documents: Documents, side: str, scale_rule: str = "ceil", block: int = 128
) -> Quantized:
    """Encode a packed tensor.

    x: (T, H, D), any float dtype, finite; side: "q" or "k", whose offsets and positions hold. cell: "format:geometry" of
    a tensor (recipe.py). block: positions of a frontier block, which NVFP4 stripes share a power of two over.
    """
    fmt_name, geometry = cell.split(":")
    x = x.to(torch.float64)
    if fmt_name == "bf16":
        return Quantized(x, torch.ones((), dtype=x.dtype, device=x.device))
    if fmt_name == "nvfp4":
        return _nvfp4(x, geometry, documents, side, block)
    fmt = E4M3 if fmt_name == "e4m3" else E2M1
    amax = _amax(x, geometry, documents, side)
    exponent = scale_exponent(amax, fmt, scale_rule)
    if geometry == "coarse":
        exponent = coarse(exponent)
    scale = exp2_int(exponent)
    units = round_to(x / scale, fmt)
    if amax.shape[2] == 1:
        return Quantized(units, scale, exponent[..., 0], (amax > 0)[..., 0], fmt.bits)
    return Quantized(units, scale, bits=fmt.bits)


def _amax(x: Tensor, geometry: str, documents: Documents, side: str) -> Tensor:
    """The largest magnitude of each element's group: (T, H, D), or (T, H, 1) where a token shares it. NaN propagates."""
    magnitude = x.abs()
    if geometry == "tensor":
        return magnitude.amax().expand(x.shape[0], x.shape[1], 1) if x.numel() else magnitude[..., :1]
    if geometry in ("token", "coarse"):
        return magnitude.amax(-1, keepdim=True)
    if geometry == "block":
        return _over_tokens(magnitude.amax(-1, keepdim=True), GROUP, documents, side)
    size = int(geometry[-2:])
    if geometry.startswith("feature"):
        return _over_features(magnitude, size)
    return _over_tokens(magnitude, size, documents, side)


def coarse(exponent: Tensor) -> Tensor:
    """The next multiple of COARSE at or above an exponent."""
    return torch.div(exponent + (COARSE - 1), COARSE, rounding_mode="floor") * COARSE


def _over_features(magnitude: Tensor, size: int) -> Tensor:
    """Maximum over `size` neighbouring features; the last group may be short."""
    features = magnitude.shape[-1]
    padded = torch.nn.functional.pad(magnitude, (0, -features % size))
    groups = padded.unflatten(-1, (-1, size)).amax(-1)
    return groups.repeat_interleave(size, -1)[..., :features]


def _over_tokens(magnitude: Tensor, size: int, documents: Documents, side: str) -> Tensor:
    """Maximum over the `size` tokens of one document's group; the last group may be short."""
    if not len(magnitude):
        return magnitude
    document, position = documents.positions(side, len(magnitude))
    group = torch.div(position, size, rounding_mode="floor")
    change = (document.diff() != 0) | (group.diff() != 0)
    index = torch.nn.functional.pad(change.cumsum(0), (1, 0))
    shape = (int(index[-1]) + 1, *magnitude.shape[1:])
    largest = magnitude.new_zeros(shape).scatter_reduce(
        0, index.view(-1, *[1] * (magnitude.dim() - 1)).expand_as(magnitude), magnitude, "amax"
    )
    return largest[index]


def _nvfp4(x: Tensor, geometry: str, documents: Documents, side: str, block: int) -> Quantized:
    """E2M1 codes, an E4M3 scale per 16 and a power of two in front. A group whose scale rounds to zero reads zero."""
    amax = _amax(x, geometry, documents, side)
    if geometry.startswith("feature"):
        common = x.abs().amax(-1, keepdim=True)
    else:
        common = _over_tokens(x.abs().amax(-1, keepdim=True), block, documents, side)
    power = exp2_int(scale_exponent(common, E2M1, "ceil", NVFP4_LARGEST))
    local = round_to(amax / 6.0 / power, E4M3)
    scale = local * power
    units = round_to(torch.where(local > 0, x / scale, 0.0), E2M1)
    return Quantized(units, scale, bits=E2M1.bits)


def hadamard(features: int, device=None) -> Tensor:
    """Sylvester's Hadamard matrix / sqrt(features), float64 (features, features): symmetric and orthogonal."""
    if features & (features - 1) or not features:
        raise ValueError(f"rotate=True: a Hadamard matrix needs a head size that is a power of two, not {features}")
    matrix = torch.ones(1, 1, dtype=torch.float64, device=device)
    while len(matrix) < features:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix / math.sqrt(features)
