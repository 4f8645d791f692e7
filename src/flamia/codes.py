"""Encoded operands as bytes: what a cache keeps, and what goes over a wire.

`quantize.py` gives codes in units of their scale, in float64, for arithmetic. Here the same information has its real size:
a byte (E4M3) or half a byte (E2M1) an element, and each scale once.

    cell               codes             scales                  powers
    e4m3:token         D bytes a token   1 byte a token          -
    e4m3:coarse        the same
    e4m3:block         D bytes a token   1 byte every 32 tokens  -
    nvfp4:feature16    D/2               D/16 bytes a token      1 byte a token
    nvfp4:stripe16     D/2               D bytes every 16        1 byte every frontier block

Scales of E4M3 are UE8M0; those of NVFP4 are E4M3 bytes in units of a power of two, which is found again from the scales
themselves: the largest decides it, and all others stay exact. So `unpack(pack(x))` is x, bit for bit.

A token that is not finite was zeroed before it was encoded, and what must be known of it later is that it was. Its bytes
say so: all its E4M3 codes, or the E4M3 scales of its features, are NaN. Stripes have no room for that; their tensor's
companion carries the mark (in a cache, K marks the tokens whose K or V is not finite).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from flamia.formats import E2M1, E4M3, decode, decode_ue8m0, encode, encode_ue8m0, exp2_int, scale_exponent
from flamia.quantize import GROUP, Quantized, coarse

NAN = 0x7F
PER_TOKEN = {"e4m3:token": (0x76, 232.0), "e4m3:coarse": (0x5E, 29.0)}
"""The cells of `encode_tokens`. Of each: the code of the number of units above which a token's largest element lies, and
the largest number that rounds to that code (see `token_values`)."""
TOKEN_LOCAL = ("token", "coarse", "feature16")
"""Geometries whose scales read one token and no other: such a token can be encoded when it arrives."""


@dataclass(frozen=True)
class Part:
    """One byte tensor of a packed operand, (entries, heads, width): an entry stands for `rows` tokens."""

    rows: int
    width: int


def parts(cell: str, features: int, block: int) -> tuple[Part, ...]:
    """The byte tensors of a cell, codes first. Raises ValueError for a cell that has no bytes here."""
    half, groups = -(-features // 2), -(-features // 16)
    layouts = {
        "e4m3:token": (Part(1, features), Part(1, 1)),
        "e4m3:coarse": (Part(1, features), Part(1, 1)),
        "e4m3:block": (Part(1, features), Part(GROUP, 1)),
        "nvfp4:feature16": (Part(1, half), Part(1, groups), Part(1, 1)),
        "nvfp4:stripe16": (Part(1, half), Part(16, features), Part(block, 1)),
    }
    if cell not in layouts:
        raise ValueError(f"cell {cell!r} cannot be packed; {', '.join(layouts)} can")
    return layouts[cell]


def bytes_per_token(cell: str, features: int, block: int) -> float:
    """Of one head."""
    return sum(part.width / part.rows for part in parts(cell, features, block))


def pack(x: Quantized, cell: str, block: int, bad: Tensor | None = None) -> list[Tensor]:
    """The byte tensors of x, (T, H, D), whose first row begins a group (and for stripes a block): a trailing group may be
    short. bad: (T, H) bool, tokens to mark as not finite."""
    layout = parts(cell, x.units.shape[-1], block)
    if cell.startswith("e4m3"):
        assert x.exponent is not None
        scales = encode_ue8m0(x.exponent[:: layout[1].rows])[..., None]
        return [_marked(encode(x.units, E4M3), bad), scales]
    step = layout[1].rows
    local = x.scale[..., ::16] if step == 1 else x.scale[::step]
    exponent = scale_exponent(_largest(local, layout[2].rows // step), E4M3)
    local = local / exp2_int(exponent).repeat_interleave(layout[2].rows // step, 0)[: len(local)]
    scales = encode(local, E4M3)
    codes = encode(x.units, E2M1)
    if codes.shape[-1] % 2:
        codes = torch.nn.functional.pad(codes, (0, 1))
    codes = codes[..., 0::2] | (codes[..., 1::2] << 4)
    return [codes, _marked(scales, bad) if step == 1 else scales, encode_ue8m0(exponent)]


def unpack(packed: list[Tensor], cell: str, features: int, block: int) -> tuple[Quantized, Tensor]:
    """(x, bad): what `pack` was given; tokens marked as not finite read zero. bad is all False for stripes."""
    layout = parts(cell, features, block)
    codes, rows = packed[0], len(packed[0])
    if cell.startswith("e4m3"):
        bad = (codes == NAN).all(-1)
        units = torch.where(bad[..., None], 0.0, _values(codes, "e4m3"))
        exponent = (packed[1][..., 0].to(torch.int32) - 127).repeat_interleave(layout[1].rows, 0)[:rows]
        nonzero = (units != 0).any(-1)
        if layout[1].rows > 1:
            nonzero = _any_of_group(nonzero, layout[1].rows)
        return Quantized(units, exp2_int(exponent)[..., None], exponent, nonzero, E4M3.bits), bad
    units = torch.stack([_values(codes & 15, "e2m1"), _values(codes >> 4, "e2m1")], -1).flatten(-2)[..., :features]
    local, powers = _values(packed[1], "e4m3"), decode_ue8m0(packed[2], torch.float64)
    bad = local.isnan().all(-1)
    local = local.nan_to_num(0.0)
    if layout[1].rows == 1:
        scale = (local * powers).repeat_interleave(16, -1)[..., :features]
    else:
        scale = local.repeat_interleave(layout[1].rows, 0)[:rows] * powers.repeat_interleave(block, 0)[:rows]
        bad = torch.zeros(codes.shape[:2], dtype=torch.bool, device=codes.device)
    return Quantized(torch.where(bad[..., None], 0.0, units), scale, bits=E2M1.bits), bad


def encode_tokens(x: Tensor, cell: str) -> tuple[Tensor, Tensor]:
    """(codes, scales) of 16-bit x (T, H, D): the bytes that `pack` gives for a cell in PER_TOKEN with the ceil rule, in
    float32 and one cast, with tokens that are not finite marked. For the large tensors of a wire."""
    magnitude = x.abs().amax(-1, keepdim=True)
    bad = ~magnitude.isfinite()  # the maximum propagates NaN
    exponent = scale_exponent(torch.where(bad, 0, magnitude).float(), E4M3)
    if cell == "e4m3:coarse":
        exponent = coarse(exponent)
    units = x.float() * exp2_int(-exponent, torch.float32)
    codes = units.to(torch.float8_e4m3fn).view(torch.uint8)
    codes = torch.where(codes == 0x80, 0, codes)  # zeros have no sign
    return torch.where(bad, NAN, codes).to(torch.uint8), encode_ue8m0(exponent)


def token_values(codes: Tensor, scales: Tensor, dtype: torch.dtype, cell: str) -> Tensor:
    """16-bit numbers that encode to these bytes of a cell in PER_TOKEN, codes and scale alike, NaN throughout a marked token.

    They are the values of the codes, but for two places where those would be encoded in another way. The largest element
    of a token may have rounded down to 224 units (28 of a coarse scale), whose own scale is smaller than the token's.
    Values would survive that, bits not: a kernel adds the scale's exponent to a row's LSE, and another sum rounds in
    another way. Such elements read 232 (29), the largest number that rounds to the same code (a tie, to even). And what
    rounded up past the end of the 16-bit format reads the largest number in place of infinity.
    """
    magnitude = codes & 0x7F
    units = codes.view(torch.float8_e4m3fn).to(torch.float32)
    code, instead = PER_TOKEN[cell]
    below = (magnitude == code) & (magnitude.amax(-1, keepdim=True) == code)
    units = torch.where(below, units.sign() * instead, units)
    end = torch.finfo(dtype).max
    return units.mul_(decode_ue8m0(scales)).clamp_(-end, end).to(dtype)


def _values(codes: Tensor, name: str, dtype: torch.dtype = torch.float64) -> Tensor:
    return _table(name, dtype, codes.device)[codes.int()]


@lru_cache(maxsize=16)
def _table(name: str, dtype: torch.dtype, device: torch.device) -> Tensor:
    fmt = E4M3 if name == "e4m3" else E2M1
    return decode(torch.arange(2**fmt.bits, device=device), fmt, dtype)


def _marked(x: Tensor, bad: Tensor | None) -> Tensor:
    return x if bad is None else torch.where(bad[..., None], NAN, x).to(torch.uint8)


def _largest(x: Tensor, entries: int) -> Tensor:
    """The largest scale over all features and `entries` entries, (groups, H, 1); the last group may be short."""
    padded = torch.nn.functional.pad(x.amax(-1, keepdim=True), (0, 0, 0, 0, 0, -len(x) % entries))
    return padded.unflatten(0, (-1, entries)).amax(1)


def _any_of_group(x: Tensor, rows: int) -> Tensor:
    padded = torch.nn.functional.pad(x, (0, 0, 0, -len(x) % rows))
    return padded.unflatten(0, (-1, rows)).any(1).repeat_interleave(rows, 0)[: len(x)]
