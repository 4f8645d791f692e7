"""Groups, scales and codes, against loops over documents."""

import itertools
import math

import pytest
import torch
from helpers import documents, randn

from flamia.formats import E2M1, E4M3, MAX_EXPONENT, MIN_EXPONENT, decode, exp2_int, round_to, scale_exponent
from flamia.quantize import COARSE, NVFP4_LARGEST, hadamard, quantize

LENGTHS = [3, 0, 70, 1, 33, 128, 5]
ROWS = sum(LENGTHS)
CELLS = [
    f"{f}:{g}" for f in ("e4m3", "e2m1") for g in ("block", "token", "feature32", "stripe32", "stripe16", "tensor")
] + ["e4m3:coarse"]


def ragged(rows=ROWS, heads=2, dim=40, seed=0):
    """Values whose magnitudes differ by token and feature, so that the group decides the code."""
    x = randn(rows, heads, dim, seed=seed).float()
    return (
        x * torch.exp2(torch.randint(-9, 9, (rows, 1, dim), generator=torch.Generator().manual_seed(seed)))
    ).bfloat16()


def groups(geometry, dim):
    """(rows, columns) of each group, document by document."""
    size = int(geometry[-2:]) if geometry[-2:].isdigit() else 32
    start = 0
    for length in LENGTHS:
        for a in range(0, length, size if geometry.startswith(("block", "stripe")) else 1):
            rows = slice(start + a, start + min(a + (size if geometry.startswith(("block", "stripe")) else 1), length))
            if geometry.startswith("stripe"):
                yield from ((rows, slice(d, d + 1)) for d in range(dim))
            elif geometry.startswith("feature"):
                yield from ((rows, slice(d, d + size)) for d in range(0, dim, size))
            else:
                yield rows, slice(None)
        start += length


@pytest.mark.parametrize("cell", CELLS)
def test_codes_and_scales_group_by_group(cell):
    fmt = E4M3 if cell.startswith("e4m3") else E2M1
    x = ragged()
    got = quantize(x, cell, documents(LENGTHS), "q")
    expected = torch.zeros_like(x, dtype=torch.float64)
    whole = [(slice(None), slice(None))]
    for rows, columns in whole if cell.endswith("tensor") else groups(cell.split(":")[1], x.shape[2]):
        for h in range(x.shape[1]) if not cell.endswith("tensor") else [slice(None)]:
            part = x[rows, h, columns].double()
            exponent = scale_exponent(part.abs().amax(), fmt)
            if cell.endswith("coarse"):
                exponent = torch.tensor(4 * math.ceil(exponent.item() / 4))
            scale = exp2_int(exponent)
            expected[rows, h, columns] = round_to(part / scale, fmt) * scale
    assert torch.equal(got.values, expected)
    assert torch.equal(decode(got.codes, fmt, torch.float64) * got.scale, expected)
    assert (got.exponent is not None) == (cell.split(":")[1] in ("block", "token", "coarse", "tensor"))


@pytest.mark.parametrize("geometry", ["feature16", "stripe16"])
def test_nvfp4_group_by_group(geometry):
    x = ragged()
    got = quantize(x, f"nvfp4:{geometry}", documents(LENGTHS), "q").values
    expected = torch.zeros_like(got)
    starts = list(itertools.accumulate([0, *LENGTHS]))
    for rows, columns in groups(geometry, x.shape[2]):
        document = max(i for i, s in enumerate(starts[:-1]) if s <= rows.start and LENGTHS[i])
        a = starts[document] + (rows.start - starts[document]) // 128 * 128
        common_rows = slice(a, min(a + 128, starts[document + 1])) if geometry == "stripe16" else rows
        for h in range(x.shape[1]):
            common = x[common_rows, h].double().abs().amax()
            power = exp2_int(scale_exponent(common, E2M1, largest=NVFP4_LARGEST))
            part = x[rows, h, columns].double()
            scale = round_to(part.abs().amax() / 6 / power, E4M3) * power
            expected[rows, h, columns] = round_to(part / scale, E2M1) * scale if scale > 0 else 0.0
    assert torch.equal(got, expected)


def test_nvfp4_keeps_small_gradients():
    """Without a power of two in front, E4M3 scales would lose everything at 2^-12."""
    x = randn(64, 1, 32).float() * 2.0**-12
    for geometry in ("feature16", "stripe16"):
        values = quantize(x, f"nvfp4:{geometry}", documents([64]), "q").values
        assert (values - x).norm() / x.norm() < 0.15


@pytest.mark.parametrize("cell", [*CELLS, "nvfp4:feature16", "nvfp4:stripe16"])
def test_a_document_is_encoded_alike_wherever_it_lies(cell):
    if cell.endswith("tensor"):
        pytest.skip("one scale over the call couples documents; that is what the control is for")
    x = ragged(50)
    alone = quantize(x, cell, documents([50]), "q").values
    other = ragged(37, seed=9)
    packed = quantize(torch.cat([other, x, other * 1024]), cell, documents([36, 1, 50, 37]), "q").values
    assert torch.equal(packed[37:87], alone)


def test_two_tokens_share_a_scale():
    """Codes {-1, 0, 1}, scale = the largest magnitude: 1 beside a smaller value reads 1, beside 3 it reads 0."""
    read = lambda x: torch.round(x / x.abs().amax()) * x.abs().amax()  # noqa: E731
    assert read(torch.tensor([1.0, 0.5]))[0] == 1
    assert read(torch.tensor([1.0, 3.0]))[0] == 0


def test_a_later_token_changes_an_earlier_one_inside_its_group_only():
    """What a shared scale does: 2^-20 reads 0 beside a 1 in its group of 32, and itself when the 1 is in the next."""
    for at, expected in ((16, 0.0), (32, 2.0**-20)):
        v = torch.zeros(64, 1, 16)
        v[0], v[at] = 2.0**-20, 1.0
        assert quantize(v, "e4m3:block", documents([64]), "k").values[0].unique().tolist() == [expected]
    harder = torch.zeros(64, 1, 16)
    harder[0], harder[16] = 1.125 * 2.0**-15, 1.0
    assert quantize(harder, "e4m3:block", documents([64]), "k").values[0, 0, 0] / harder[0, 0, 0] == pytest.approx(
        8 / 9
    )
    fp4 = torch.zeros(64, 1, 16)
    fp4[0] = 1.0
    read = lambda: quantize(fp4, "nvfp4:stripe16", documents([64]), "k").values[0, 0, 0].item()  # noqa: E731
    alone = read()
    fp4[8] = 3.0
    assert (alone, read()) == (1.03125, 1.0)


def test_zero_tokens_and_groups_of_zeros():
    empty = quantize(torch.zeros(0, 2, 16), "e4m3:block", documents([0]), "q")
    assert empty.values.shape == (0, 2, 16)
    x = torch.zeros(40, 1, 16)
    x[35] = 2.0**-30
    got = quantize(x, "e4m3:block", documents([40]), "q")
    assert torch.equal(got.values, x.double())
    assert got.nonzero[:, 0].tolist() == [False] * 32 + [True] * 8
    assert got.exponent[:32].unique().tolist() == [0]


def coarse_and_fine(x, rule="ceil"):
    """x: (T, D)."""
    return [quantize(x[:, None], f"e4m3:{g}", documents([len(x)]), "k", rule) for g in ("coarse", "token")]


@pytest.mark.parametrize("rule", ["ceil", "floor"])
def test_coarse_exponents_are_the_next_multiple_of_four(rule):
    """Of every magnitude that 16 bits can hold, subnormal ones and the largest included."""
    for dtype in (torch.bfloat16, torch.float16):
        every = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(dtype)
        x = every[every.isfinite()][:, None]
        coarse, fine = coarse_and_fine(x, rule)
        assert (coarse.exponent % COARSE == 0).all() and COARSE == 4
        assert ((coarse.exponent >= fine.exponent) & (coarse.exponent < fine.exponent + 4)).all()
        assert coarse.exponent.min() >= MIN_EXPONENT and coarse.exponent.max() <= MAX_EXPONENT
        zero = x[:, 0] == 0
        assert (coarse.exponent[zero] == 0).all() and not coarse.nonzero[zero].any() and coarse.nonzero[~zero].all()
        if rule == "ceil":
            units = x.double() / exp2_int(coarse.exponent)
            assert (units.abs() <= 448).all()
            assert (units[(coarse.exponent > -124) & ~zero[:, None]].abs() > 28).all()


def test_coarse_scales_keep_every_bit_within_ten_binades():
    """The largest element sets the scale: what it reads is the same with any power of two, and so does all that stays a
    normal number. Below that a bit goes with each halving, and at last all of it."""
    largest = 28 * (1 + torch.arange(1, 129, dtype=torch.float64) / 128)  # every significand, just above a boundary
    for exponent in (-100, 0, 96):
        for below in range(22):
            small = 1.875 * 2.0**4 * 2.0**-below
            x = torch.stack([largest, torch.full_like(largest, small)], 1) * 2.0**exponent
            coarse, fine = coarse_and_fine(x)
            assert torch.equal(coarse.values[:, 0, 0], fine.values[:, 0, 0])
            assert (coarse.exponent == exponent).all() and (fine.exponent < exponent).all()
            for got, more in ((coarse, 0), (fine, 3)):  # 1.875 * 2^-6 is a normal number, half of it is not
                read = got.values[:, 0, 1]
                assert (read == x[:, 1]).all() == (below <= 10 + more)
                assert (read == 0).all() == (below >= 15 + more) and (read == 0).any() == (below >= 15 + more)


def test_coarse_scales_look_at_one_token_and_are_mostly_alike():
    x = randn(4096, 64, seed=3)
    coarse, fine = coarse_and_fine(x)
    alone = coarse_and_fine(x[1234:1235])[0]
    assert torch.equal(alone.units[0], coarse.units[1234]) and alone.exponent[0] == coarse.exponent[1234]
    alike = [(q.exponent == q.exponent.mode().values).double().mean() for q in (coarse, fine)]
    assert alike[0] > 0.99 and alike[1] < 0.99


def test_hadamard_is_symmetric_orthogonal_and_refuses_other_sizes():
    for size in (1, 2, 64, 128):
        h = hadamard(size)
        assert torch.equal(h, h.T)
        assert torch.allclose(h @ h, torch.eye(size, dtype=h.dtype), atol=1e-14)
    with pytest.raises(ValueError, match=r"power of two, not 96"):
        hadamard(96)


def test_sixteen_bits_have_no_codes():
    got = quantize(randn(4, 1, 8), "bf16:none", documents([4]), "q")
    with pytest.raises(TypeError, match="16-bit"):
        got.codes  # noqa: B018
