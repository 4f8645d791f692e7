"""Every bfloat16 value through every format, bit for bit against torch and ml_dtypes."""

import ml_dtypes
import numpy as np
import pytest
import torch

from flamia.formats import (
    E2M1,
    E4M3,
    decode,
    decode_ue8m0,
    encode,
    encode_ue8m0,
    exp2_int,
    round_to,
    scale_exponent,
)

EVERY = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
FINITE = EVERY[EVERY.isfinite()].float()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_e4m3_equals_torch_over_every_bfloat16(dtype):
    expected = FINITE.clamp(-448, 448).to(torch.float8_e4m3fn)
    assert torch.equal(round_to(FINITE.to(dtype), E4M3).float(), expected.float())
    assert torch.equal(encode(FINITE, E4M3), expected.view(torch.uint8))
    assert torch.equal(decode(encode(FINITE, E4M3), E4M3), expected.float())


def test_e4m3_equals_ml_dtypes():
    expected = FINITE.clamp(-448, 448).numpy().astype(ml_dtypes.float8_e4m3fn)
    assert np.array_equal(encode(FINITE, E4M3).numpy(), expected.view(np.uint8))


def test_e2m1_equals_ml_dtypes_over_every_bfloat16():
    expected = FINITE.clamp(-6, 6).numpy().astype(ml_dtypes.float4_e2m1fn)
    assert np.array_equal(encode(FINITE, E2M1).numpy(), expected.view(np.uint8))
    assert np.array_equal(round_to(FINITE, E2M1).numpy(), expected.astype(np.float32))
    assert np.array_equal(decode(encode(FINITE, E2M1), E2M1).numpy(), expected.astype(np.float32))


def test_every_code_decodes_as_ml_dtypes_says():
    codes = np.arange(256, dtype=np.uint8)
    ours = decode(torch.from_numpy(codes), E4M3).numpy()
    assert np.array_equal(ours, codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32), equal_nan=True)
    codes = np.arange(16, dtype=np.uint8)
    assert np.array_equal(
        decode(torch.from_numpy(codes), E2M1).numpy(), codes.view(ml_dtypes.float4_e2m1fn).astype("f4")
    )


def test_float32_inputs_between_the_codes_round_to_even():
    codes = decode(torch.arange(0x7F, dtype=torch.uint8), E4M3, torch.float64)
    middle = (codes[1:] + codes[:-1]) / 2
    below, above = middle * (1 - 1e-12), middle * (1 + 1e-12)
    assert torch.equal(round_to(below, E4M3), codes[:-1])
    assert torch.equal(round_to(above, E4M3), codes[1:])
    even = torch.where(torch.arange(len(middle)) % 2 == 0, codes[:-1], codes[1:])
    assert torch.equal(round_to(middle, E4M3), even)


def test_no_finite_input_becomes_nan_and_nan_stays():
    x = torch.tensor([448.0, 464.0, 465.0, 480.0, 500.0, 3e38, torch.inf, -torch.inf])
    assert torch.equal(round_to(x, E4M3), torch.tensor([448.0] * 7 + [-448.0]))
    assert round_to(torch.tensor([torch.nan]), E4M3).isnan().all()
    assert encode(torch.tensor([torch.nan]), E4M3).item() == 0x7F


@pytest.mark.parametrize("fmt", [E4M3, E2M1], ids=lambda f: f.name)
def test_the_ceil_rule_is_the_smallest_scale_that_does_not_clip(fmt):
    amax = FINITE.abs().double()
    e = scale_exponent(amax, fmt)
    inside = (e > -127) & (amax > 0)
    assert bool((amax <= fmt.largest * exp2_int(e))[amax > 0].all())
    assert bool((amax > fmt.largest * exp2_int(e - 1))[inside].all())
    assert bool((e[amax == 0] == 0).all())


def test_the_floor_rule_is_floor_log2():
    amax = FINITE.abs().double()
    amax = amax[amax >= 2.0**-110]
    expected = torch.tensor([np.frexp(a)[1] - 1 - 8 for a in amax.numpy()])
    assert torch.equal(scale_exponent(amax, E4M3, "floor").long(), expected)


def test_480_under_both_rules():
    amax = torch.tensor([480.0])
    for rule, e, code, value in (("floor", 0, 448, 448), ("ceil", 1, 240, 480)):
        assert scale_exponent(amax, E4M3, rule).item() == e
        assert round_to(amax / 2.0**e, E4M3).item() == code
        assert code * 2.0**e == value


def test_ue8m0_reaches_both_ends():
    exponents = torch.arange(-127, 128, dtype=torch.int32)
    scales = decode_ue8m0(encode_ue8m0(exponents), torch.float64)
    assert torch.equal(scales, exp2_int(exponents))
    assert scales[0].item() == 2.0**-127 and scales[-1].item() == 2.0**127
    assert decode_ue8m0(torch.tensor([255], dtype=torch.uint8)).isnan().all()
    assert scale_exponent(torch.tensor([2.0**-140]), E4M3).item() == -127
    assert scale_exponent(torch.tensor([448.0 * 2.0**127], dtype=torch.float64), E4M3).item() == 127


def test_doubling_a_scale_keeps_normal_values_and_not_subnormal_ones():
    codes = decode(torch.arange(0x7F, dtype=torch.uint8), E4M3, torch.float64)
    doubled = round_to(codes / 2, E4M3) * 2
    normal_both = (codes >= 2.0**-5) | (codes == 0)
    assert torch.equal(doubled[normal_both], codes[normal_both])
    assert round_to(torch.tensor([2.0**-9 / 2]), E4M3).item() == 0  # a tie, to even


def test_the_clipping_pair():
    """lag 2 and boost 8 admit 1024, which clips: a weight of 4 reads 1.75. Boost 6 holds 256."""
    weight = torch.tensor([4.0])
    assert round_to(weight * 2**8, E4M3).item() / 2**8 == 1.75
    assert round_to(weight * 2**6, E4M3).item() / 2**6 == 4.0


def test_unknown_rule():
    with pytest.raises(ValueError, match=r"scale_rule='round'.*'ceil' and 'floor'"):
        scale_exponent(torch.ones(1), E4M3, "round")
