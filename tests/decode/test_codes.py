"""Operands as bytes: nothing is lost on the way, and what 16 bits hold of them encodes to the same bytes again."""

import pytest
import torch
from helpers import offsets, same_bits

from flamia.codes import bytes_per_token, encode_tokens, pack, parts, token_values, unpack
from flamia.formats import E4M3, decode
from flamia.packing import Documents
from flamia.quantize import quantize

CELLS = ("e4m3:token", "e4m3:coarse", "e4m3:block", "nvfp4:feature16", "nvfp4:stripe16")
# Units above which a token's largest element lies, and what it reads in 16 bits if it rounded down to them.
BOUNDARY = {"e4m3:token": (224, 232), "e4m3:coarse": (28, 29)}
per_token = pytest.mark.parametrize("cell", BOUNDARY)


def rows(tokens, dim, size, dtype=torch.bfloat16, seed=0):
    """Tokens of very different magnitudes, whole groups of zeros among them."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, 2, dim, generator=generator, dtype=torch.float64)
    x = x * torch.randn(tokens, 2, 1, generator=generator, dtype=torch.float64).mul(3).exp() * size
    x[33:70] = 0
    x[128:] *= torch.rand(max(tokens - 128, 0), 2, 1, generator=generator) < 0.3
    x = x.to(dtype)
    return torch.where(x.isfinite(), x, 0)


def encoded(x, cell, rule="ceil"):
    cu = offsets([len(x)])
    return quantize(x, cell, Documents(cu, cu, None, 0), "k", rule)


@pytest.mark.parametrize("size", [1.0, 2.0**-133, 2.0**-120, 2.0**100])
@pytest.mark.parametrize("dim", [32, 17])
@pytest.mark.parametrize("cell", CELLS)
def test_a_round_trip_keeps_everything(cell, dim, size):
    for tokens in (0, 1, 31, 300):
        for rule in ("ceil", "floor") if cell.startswith("e4m3") else ("ceil",):
            x = encoded(rows(tokens, dim, size), cell, rule)
            packed = pack(x, cell, 128)
            for part, layout in zip(packed, parts(cell, dim, 128), strict=True):
                assert part.dtype == torch.uint8 and part.shape == (-(-tokens // layout.rows), 2, layout.width)
            back, bad = unpack(packed, cell, dim, 128)
            assert not bad.any() and torch.equal(back.values, x.values) and torch.equal(back.units, x.units)
            if x.exponent is not None:
                assert torch.equal(back.exponent, x.exponent) and torch.equal(back.nonzero, x.nonzero)


@pytest.mark.parametrize("cell", CELLS[:4])
def test_marked_tokens_are_found_again_and_no_others(cell):
    x = rows(100, 32, 1.0)
    bad = torch.rand(100, 2, generator=torch.Generator().manual_seed(1)) < 0.2
    x[bad] = 0
    back, found = unpack(pack(encoded(x, cell), cell, 128, bad), cell, 32, 128)
    assert torch.equal(found, bad) and torch.equal(back.values, encoded(x, cell).values)


def test_real_sizes():
    assert [bytes_per_token(cell, 128, 128) for cell in CELLS] == [129, 129, 128 + 1 / 32, 64 + 8 + 1, 64 + 8 + 1 / 128]
    for cell in CELLS:
        packed = pack(encoded(rows(256, 64, 1.0), cell), cell, 128)
        assert sum(part.numel() for part in packed) == 256 * 2 * bytes_per_token(cell, 64, 128)


def reencoded(x, cell):
    """The bytes of x decoded to 16 bits: (x encoded, those numbers, which of them are not the codes' own values). They must
    encode to the same bytes."""
    first = encoded(x, cell)
    codes, scales = pack(first, cell, 128)
    values = token_values(codes, scales, x.dtype, cell)
    assert values.dtype == x.dtype
    for got, want in zip(pack(encoded(values, cell), cell, 128), (codes, scales), strict=True):
        assert torch.equal(got, want)
    for got, want in zip(encode_tokens(values, cell), (codes, scales), strict=True):
        assert torch.equal(got, want)
    return first, values, values.double() != first.values


@per_token
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_decoded_tokens_encode_to_the_same_bytes(dtype, cell):
    for size in (1.0, 2.0**-20, 2.0**-120, 2.0**-133):
        first, values, other = reencoded(rows(300, 64, size, dtype), cell)
        assert (first.units.abs().amax(-1, keepdim=True).expand_as(other)[other] == BOUNDARY[cell][0]).all()
    assert other.dtype == torch.bool and values.isfinite().all()


@per_token
def test_decoded_tokens_encode_to_the_same_bytes_at_every_boundary(cell):
    """Every bfloat16 significand as the largest element, beside every E4M3 value as the other: what rounds down to 224 units
    (28) keeps its scale, and small codes are subnormal."""
    edge, instead = BOUNDARY[cell]
    step = 1 if cell == "e4m3:token" else 4
    largest = 1 + torch.arange(128, dtype=torch.float64) / 128
    other = decode(torch.arange(0x7F), E4M3, torch.float64)
    x = torch.stack(torch.broadcast_tensors(largest[:, None] * 256, other[None, :] * 0.7), -1).flatten(0, 1)[:, None]
    for exponent in (-133, -120, -9, 0, 110):
        found = []
        for binade in range(step):
            first, values, other = reencoded((x * 2.0 ** (exponent + binade)).bfloat16(), cell)
            assert torch.equal(other, (first.units.amax(-1, keepdim=True) == edge) & (first.units == edge))
            assert (values.double()[other] == (first.values / edge * instead)[other]).all()
            found.append(bool(other.any()))
        assert sum(found) == (exponent > -133)  # one binade in four; at the least scale nothing can be smaller


@per_token
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_16_bit_number_decodes_to_the_same_bytes(dtype, cell):
    """Alone and beside a small one; subnormal numbers, and the end of the format, where a code may stand for infinity."""
    every = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(dtype)
    every = every[every.isfinite()]
    for x in (every[:, None], torch.stack([every, every / 37], -1)):
        _, values, _ = reencoded(x[:, None], cell)
        assert values.isfinite().all()
    _, values, _ = reencoded(torch.full((1, 1, 2), torch.finfo(dtype).max, dtype=dtype), cell)
    assert (values == torch.finfo(dtype).max).all()


@per_token
def test_marks_survive_in_16_bits(cell):
    x = rows(3, 32, 1.0)
    bad = torch.tensor([[True, False], [False, False], [False, True]])
    values, plain = (
        token_values(*pack(encoded(x, cell), cell, 128, marks), torch.bfloat16, cell) for marks in (bad, None)
    )
    assert torch.equal(values.isnan().all(-1), bad) and plain.isfinite().all()
    assert same_bits(values[~bad], plain[~bad]) and values[bad].isnan().all()


@per_token
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_fast_encoder_gives_the_same_bytes(dtype, cell):
    for size in (1.0, 2.0**-8, 2.0**-120, 2.0**-133, 2.0**100):
        x = rows(300, 32, size, dtype)
        for fast, slow in zip(encode_tokens(x, cell), pack(encoded(x, cell), cell, 128), strict=True):
            assert torch.equal(fast, slow)
    every = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(dtype)  # beside 1, and alone
    for x in (torch.stack([every, torch.ones_like(every)], -1), every[:, None]):
        x = x[:, None]
        bad = ~x.isfinite().all(-1)
        slow = pack(encoded(torch.where(bad[..., None], 0, x), cell), cell, 128, bad)
        for fast, expected in zip(encode_tokens(x, cell), slow, strict=True):
            assert torch.equal(fast, expected)
