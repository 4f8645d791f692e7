"""The encoders bit for bit against quantize.py, which specifies them: codes and scales of Q, K, V and dO, every magnitude
that BF16 has, and what the backward makes of LSE and D."""

from __future__ import annotations

import math

import pytest
import torch

if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
    pytest.skip("needs an NVIDIA Hopper GPU", allow_module_level=True)

from calls import RECIPE, draw, offsets

from flamia import hopper
from flamia.formats import exp2_int
from flamia.hopper import launch
from flamia.packing import Documents
from flamia.quantize import quantize


class Recorded:
    """A kernel that remembers what it was last called with, by the names of its parameters."""

    def __init__(self, kernel):
        self.kernel, self.seen = kernel, {}

    def __getitem__(self, grid):
        def call(*args, **options):
            self.seen = dict(zip(self.kernel.arg_names, args)) | options
            return self.kernel[grid](*args, **options)

        return call


@pytest.fixture
def encoders(monkeypatch):
    both = Recorded(launch.encode_kernel), Recorded(launch.encode_gradient_kernel)
    monkeypatch.setattr(launch, "encode_kernel", both[0])
    monkeypatch.setattr(launch, "encode_gradient_kernel", both[1])
    return both


def padded_rows(lengths) -> torch.Tensor:
    """Where the tokens of the documents lie in the padded buffers, in order."""
    rows, base = [], 0
    for n in lengths:
        rows += range(base, base + n)
        base += -(-n // 128) * 128
    return torch.tensor(rows, device="cuda")


def codes_of(buffer, heads, d, rows):
    """Codes of the documents' tokens, minus zero (a negative number that rounds to nothing) taken for zero."""
    codes = buffer.view(torch.uint8).view(heads, -1, d)[:, rows].transpose(0, 1)
    return torch.where(codes == 0x80, 0, codes)


def row_values(buffer, heads, rows):
    return buffer.view(heads, -1)[:, rows].T.double()


def common_factors(factors: torch.Tensor, x: torch.Tensor, lengths) -> torch.Tensor:
    """For each token (T, H) the factor that all of its group of 32 have, 0 where two differ or where it is above 1 or below
    2^-64; zeros agree with any."""
    out, first = torch.zeros_like(factors), 0
    for n in lengths:
        for start in range(first, first + n, 32):
            part = slice(start, min(start + 32, first + n))
            for h in range(x.shape[1]):
                some = factors[part, h][x[part, h].any(-1)].unique()
                zero = factors[part, h][:1] if not len(some) else 0.0
                fits = len(some) == 1 and 2.0**-64 <= some[0].abs() <= 1
                out[part, h] = some[0] if fits else zero
        first += n
    return out


def every_magnitude(d: int) -> torch.Tensor:
    """A token for every finite BF16 magnitude: it is the token's largest, the other entries are parts of it, some of them
    ties between two codes."""
    amax = torch.arange(0x7F80, dtype=torch.int16, device="cuda").view(torch.bfloat16)
    generator = torch.Generator("cuda").manual_seed(1)
    part = torch.randint(-64, 65, (len(amax), d), device="cuda", generator=generator) / 64
    part *= torch.exp2(-torch.randint(0, 18, part.shape, device="cuda", generator=generator).float())
    part[:, 0] = 1 - 2 * (torch.arange(len(amax), device="cuda") % 2)
    x = (amax.double()[:, None] * part.double()).to(torch.bfloat16)
    assert torch.equal(x.abs().amax(1), amax)
    return x


@pytest.mark.parametrize("d", [64, 128])
def test_every_magnitude(d, encoders):
    x = every_magnitude(d)
    lengths = [1000, 0, 3, len(x) - 1003]
    cu = offsets(lengths)
    documents = Documents(cu, cu, None, 0)
    q, v = torch.stack([x, x.flip(0)], 1), x.roll(77, 0)[:, None]
    scale = 0.37
    hopper.forward(q, x[:, None], v, documents, RECIPE, scale)
    seen, rows = encoders[0].seen, padded_rows(lengths)
    factor = torch.tensor(scale * math.log2(math.e), dtype=torch.float32).double().item()
    given = (("QC", "QF", q, "q", factor), ("KC", "KF", x[:, None], "k", 1.0), ("VC", "VF", v, "k", 1.0))
    for codes, factors, values, side, times in given:
        want = quantize(values, "e4m3:coarse", documents, side)
        heads = values.shape[1]
        assert torch.equal(codes_of(seen[codes], heads, d, rows), want.codes), codes
        expected = (exp2_int(want.exponent) * times).float().double()
        assert torch.equal(row_values(seen[factors], heads, rows), expected), factors
        if codes == "KC":
            places = rows // 64 * 4 + rows % 64 // 32
            groups = row_values(seen["KG"], heads, places)
            later = row_values(seen["KG"], heads, places - 2)[rows % 128 >= 64]
            assert torch.equal(later, groups[rows % 128 >= 64])
            assert torch.equal(groups, common_factors(expected, values, lengths)), codes
    largest = torch.finfo(
        torch.bfloat16
    ).max  # a code may stand for 2^128, which the kernel reads as the largest number
    want = quantize(v, "e4m3:coarse", documents, "k").values.clamp(-largest, largest)
    decoded = seen["VD"].view(1, -1, d)[:, rows].transpose(0, 1)
    assert torch.equal(decoded, want.to(torch.bfloat16)) and torch.equal(decoded.double(), want)


@pytest.mark.parametrize("with_dlse", [False, True], ids=["", "dlse"])
@pytest.mark.parametrize("d", [64, 128])
def test_gradients(d, with_dlse, encoders):
    """Codes of dO for every magnitude; LSE less the exponent, and D in units of the scale, to float32."""
    g = every_magnitude(d)[:, None]
    lengths = [1000, 0, 3, len(g) - 1003]
    cu = offsets(lengths)
    documents = Documents(cu, cu, None, 0)
    q, k, v, o, _ = draw(len(g), len(g), (1, 1), d, seed=2)
    lse = torch.randn(1, len(g), device="cuda")
    lse[0, 5] = -torch.inf
    dlse = torch.randn(len(g), 1, device="cuda").T if with_dlse else None
    hopper.backward(g, dlse, q, k, v, o, lse, o[:0], documents, RECIPE, 0.1)
    seen, rows = encoders[1].seen, padded_rows(lengths)
    want = quantize(g, "e4m3:coarse", documents, "q")
    assert torch.equal(codes_of(seen["GC"], 1, d, rows), want.codes)
    wide = seen["GB"].view(1, -1, d)[:, rows].transpose(0, 1)
    assert torch.equal(wide.double(), want.units)
    lse2, delta = (row_values(seen[name], 1, rows)[:, 0] for name in ("LSE2", "DELTA"))
    exponent = want.exponent[:, 0].double()
    expected = lse[0].double() * math.log2(math.e) - exponent
    assert lse2[5] == torch.inf and delta[5] == 0
    alive = torch.arange(len(g), device="cuda") != 5
    assert ((lse2 - expected).abs() <= 2.0**-20 * (1 + expected.abs()))[alive].all()
    terms = want.units[:, 0] * o[:, 0].double()
    due = terms.sum(-1)
    size = terms.abs().sum(-1)
    if with_dlse:
        due = due - dlse[0].double() / exp2_int(want.exponent[:, 0])
        size = size + dlse[0].double().abs() / exp2_int(want.exponent[:, 0])
    fits = alive & (size < 2.0**127)  # dLSE over the smallest scales is infinite in float32
    assert fits.sum() > 20_000
    assert ((delta - due).abs() <= 2.0**-20 * size)[fits].all()


def test_what_is_not_finite_has_no_codes(encoders):
    q, k, v, do, _ = draw(300, 300, (2, 1), 128)
    for x, token in ((q, 3), (k, 130), (v, 140), (do, 299)):
        x[token, 0, 9] = torch.inf
        x[token - 1, 0, 9] = torch.nan
    cu = offsets([300])
    documents = Documents(cu, cu, None, 0)
    o, lse, residual, saved = hopper.forward_saving(q, k, v, documents, RECIPE, 0.1)
    hopper.backward(do, None, q, k, None, o, lse, residual, documents, RECIPE, 0.1, saved=saved)
    seen = encoders[0].seen | {name: encoders[1].seen[name] for name in ("GC", "LSE2")}
    rows = padded_rows([300])
    for codes, values, heads, bad in (
        ("QC", "QF", 2, [2, 3]), ("KC", "KF", 1, [129, 130, 139, 140]), ("VC", None, 1, [129, 130, 139, 140]),
        ("GC", "LSE2", 2, [298, 299]),
    ):  # fmt: skip
        zero = (codes_of(seen[codes], heads, 128, rows)[:, 0] == 0).all(-1)
        assert zero.nonzero().flatten().tolist() == bad, codes
        if values and values != "LSE2":
            assert row_values(seen[values], heads, rows)[:, 0].isnan().nonzero().flatten().tolist() == bad
        if values == "LSE2":
            assert row_values(seen[values], heads, rows)[bad, 0].isnan().all()
