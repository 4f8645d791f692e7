"""The edges of the formats, seen from outside: with one token O is the decoded V, so a single call reads a code.

Origins: flashinfer #4023, TransformerEngine #3262, compressed-tensors #595, Model-Optimizer #1397 (UE8M0's ends, zero
blocks); torchao #1912 and #4364, pytorch #178817, ml_dtypes #260 and #400, mlx #4353 (casts beyond the largest value).
"""

import pytest
import torch
from cases.case_inputs import RECIPES, all_same, at, by_route, claiming, rows, run, tensors
from helpers import same_bits

import flamia

LEAST = 2.0**-126  # the least normal bfloat16
UE8M0 = [
    name for name in RECIPES if not name.startswith("nvfp4/")
]  # V has E4M3 codes and power-of-two scales, or 16 bits


def decoded(value: float, recipe: str, dtype=torch.bfloat16) -> float:
    """What a single token's V reads as."""
    v = torch.full((1, 1, 16), value, dtype=dtype)
    ones = torch.ones(1, 1, 16, dtype=dtype)
    return flamia.attention_varlen(ones, ones, v, at(0, 1), causal=True, recipe=recipe).unique().item()


@pytest.mark.parametrize("recipe", UE8M0)
@pytest.mark.parametrize("value", [LEAST, -LEAST, 2.0**-127, 2.0**-133, 2.0**126, 2.0**127])
def test_powers_of_two_at_the_ends_of_the_scales_read_exactly(recipe, value):
    assert decoded(value, recipe) == value


@pytest.mark.parametrize("recipe", RECIPES)
def test_all_zero(recipe):
    zeros = [torch.zeros(33, heads, 16, dtype=torch.bfloat16) for heads in (4, 2, 2)]
    for do in (torch.zeros(33, 4, 16, dtype=torch.bfloat16), torch.ones(33, 4, 16, dtype=torch.bfloat16)):
        result = run(*zeros, do, recipe=recipe)
        assert not result.o.any() and not result.dq.any() and not result.dk.any()
        assert torch.allclose(result.lse, torch.arange(1.0, 34.0).log().expand(4, -1))
        assert result.dv.isfinite().all() and result.dv.any() == do.any()


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("zeroed", ["q", "k", "v", "do", "all"])
def test_a_zero_token_among_others(recipe, zeroed):
    given = tensors(40)
    for name, x in zip(("q", "k", "v", "do"), given):
        if zeroed in (name, "all"):
            x[7] = 0
    result = run(*given, recipe=recipe)
    assert all(x.isfinite().all() for x in result)
    if zeroed in ("do", "all"):
        assert not result.dq[7].any()


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_zero_block_before_others(recipe):
    """Its scale is a placeholder: it must not become NaN, nor count in any maximum of exponents."""
    given = tensors(300)
    for x in given:
        x[:32] = 0
    small = [x * 2.0**-24 if i == 3 else x for i, x in enumerate(given)]  # gradients as small as late in training
    large, tiny = run(*given, recipe=recipe), run(*small, recipe=recipe)
    assert all(x.isfinite().all() for x in (*large, *tiny))
    for name in ("dq", "dk", "dv"):
        x, y = getattr(large, name).double(), getattr(tiny, name).double() * 2.0**24
        assert (x - y).norm() < 0.02 * x.norm(), name


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("small", ["q", "k", "v", "do"])
def test_zeros_among_small_values_count_in_no_maximum(recipe, small):
    """A power of two on one operand moves no code, whichever tokens and whole groups of it are zero. If the placeholder
    exponent 0 of those counted, it would dwarf the small ones, and their weights would round to zero. The zeros lie in
    later blocks as well: the first block of a causal document has no full pair."""
    given = tensors(300)
    which = ("q", "k", "v", "do").index(small)
    given[which][torch.rand(300, generator=torch.Generator().manual_seed(0)) < 0.2] = 0  # tokens without loss
    for start in (32, 96, 160):
        given[which][start : start + 32] = 0
    options = {"recipe": recipe, "softmax_scale": 0.25}
    large = run(*given, **options)
    given[which] = given[which] * 2.0**-24
    if small in ("q", "k"):
        options["softmax_scale"] *= 2.0**24  # the same logits
    tiny = run(*given, **options)
    powers = {
        "q": {"dq": 24},
        "k": {"dk": 24},
        "v": {"o": -24, "dq": -24, "dk": -24},
        "do": {"dq": -24, "dk": -24, "dv": -24},
    }
    for name in ("o", "dq", "dk", "dv"):
        power = powers[small].get(name, 0)
        x, y = getattr(large, name).double(), getattr(tiny, name).double() * 2.0**-power
        assert (x - y).norm() < 1e-3 * x.norm(), name


@pytest.mark.parametrize("recipe", claiming("prefix"))
@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("where", ["q", "k", "v", "do"])
def test_a_value_that_is_not_finite_reaches_those_who_see_it_and_no_one_else(recipe, value, where):
    given = tensors(140)
    clean = run(*given, recipe=recipe)
    dirty = [x.clone() for x in given]
    dirty[("q", "k", "v", "do").index(where)][75, 0, 3] = value
    result = run(*dirty, recipe=recipe)
    assert all_same(rows(result, slice(0, 75))[:3], rows(clean, slice(0, 75))[:3])
    seen = {"q": slice(75, 76), "k": slice(75, None), "v": slice(75, None), "do": slice(75, 76)}[where]
    heads = slice(0, 1) if where in ("q", "do") else slice(0, 2)  # the query heads that read key head 0
    if where != "do":
        assert not result.o[seen, heads].isfinite().any(-1).any()
    assert not result.dq[seen, heads].isfinite().any(-1).any()
    assert same_bits(result.o[:, 2:], clean.o[:, 2:]) and same_bits(result.dq[:, 2:], clean.dq[:, 2:])


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_group_that_mixes_the_ends_of_the_range(recipe):
    ones = torch.ones(33, 1, 16, dtype=torch.bfloat16)
    v = torch.full((33, 1, 16), LEAST, dtype=torch.bfloat16)
    v[20] = 2.0**120
    o = flamia.attention_varlen(ones, ones, v, at(0, 33), causal=True, recipe=recipe)
    assert o.isfinite().all()
    expected = 2.0**120 / torch.arange(21.0, 34.0)[:, None]
    error = (o[20:, 0].float() / expected - 1).abs()
    assert (error < by_route(recipe, mxfp8=2**-4, nvfp4_fp8=2**-4, nvfp4=0.25, bf16=2**-7)).all()


# ---------------------------------------------------------------------------------------- beyond the largest E4M3 value


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("value", [448.0, 464.0, 465.0, 480.0, 500.0, 50000.0])
def test_values_beyond_448_are_never_nan_and_lose_little(recipe, value):
    for dtype in (torch.bfloat16, torch.float16):
        x = decoded(value, recipe, dtype)
        assert abs(x - value) <= value * by_route(recipe, mxfp8=2**-4, nvfp4_fp8=2**-4, nvfp4=0.25, bf16=2**-8), dtype


def test_the_round_up_rule_keeps_480_and_the_floor_rule_clips_it():
    ceil, floor = "mxfp8/fast", "mxfp8/fast,scale_rule=floor"
    read = {value: decoded(value, ceil, torch.float16) for value in (464.0, 465.0, 480.0, 500.0)}
    assert read == {464.0: 448.0, 465.0: 480.0, 480.0: 480.0, 500.0: 512.0}  # nearest at scale 2, ties to even
    assert {decoded(value, floor, torch.float16) for value in read} == {448.0}


def test_the_floor_rule_leaks_by_clipping_and_strict_does_not_even_then():
    """480 alone clips to 448; a later 512 in its group raises the scale, and it reads 480."""
    ones = torch.ones(33, 1, 16, dtype=torch.bfloat16)
    v = torch.zeros_like(ones)
    v[0] = 480

    def first(recipe, later):
        v[16] = later
        return flamia.attention_varlen(ones, ones, v, at(0, 33), causal=True, recipe=recipe)[0].unique().item()

    assert (first("mxfp8/fast,scale_rule=floor", 0), first("mxfp8/fast,scale_rule=floor", 512)) == (448.0, 480.0)
    assert (first("mxfp8/strict,scale_rule=floor", 0), first("mxfp8/strict,scale_rule=floor", 512)) == (480.0, 480.0)
