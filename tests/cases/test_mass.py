"""Lost mass and unmatched products: errors that leave a cosine near 1 and a model that does not train.

Origins: FlyDSL #1020, flashinfer #5020, aiter #5642 (P without a boost underflows while the normaliser keeps the mass);
flash-attention #1711 and Attn-QAT (a backward that does not know what its forward read); flash-attention #2250,
DeepGEMM #37 (narrow accumulators whose error grows with the length).
"""

import math

import pytest
import torch
from cases.case_inputs import RECIPES, at, by_route, exact, run, tensors
from helpers import relative

import flamia

BIAS = {"mxfp8": 2**-8, "nvfp4_fp8": 2**-8, "nvfp4": 2**-4, "bf16": 2**-9}  # of means over many rows: no bias


def peaked(keys: int, recipe: str) -> torch.Tensor:
    """One query; key 0 has a logit 8 above the others and V = 0, the others V = 1: O is the share of the long tail."""
    q = torch.zeros(1, 1, 16, dtype=torch.bfloat16)
    k = torch.zeros(keys, 1, 16, dtype=torch.bfloat16)
    v = torch.ones(keys, 1, 16, dtype=torch.bfloat16)
    q[..., 0], k[0, :, 0], v[0] = 6.0, 6.0, 0.0  # exact in every format, 4 bits included
    return flamia.attention_varlen(q, k, v, at(0, 1), cu_seqlens_k=at(0, keys), softmax_scale=8 / 36, recipe=recipe)


@pytest.mark.parametrize("keys", [64, 1024])
@pytest.mark.parametrize("recipe", RECIPES)
def test_the_tail_of_a_peaked_row_keeps_its_mass(recipe, keys):
    tail = (keys - 1) * math.exp(-8)
    expected = tail / (1 + tail)  # 0.0207 for 64 keys
    o = peaked(keys, recipe).float()
    bound = by_route(recipe, mxfp8=2**-4, nvfp4_fp8=2**-4, nvfp4=0.35, bf16=2**-7)
    assert ((o - expected).abs() <= bound * expected).all()


def test_without_a_boost_the_tail_is_gone():
    assert not peaked(64, "mxfp8/fast,lag=0,boost=0").any()
    assert peaked(64, "mxfp8/fast").unique().item() == pytest.approx(0.02071, abs=1e-4)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("window", [None, (50, 0)], ids=str)
def test_with_v_one_every_row_is_one_and_lse_is_right(recipe, window):
    q, k, v, do = tensors(300)
    v.fill_(1.0)
    result = run(3 * q, k, v, do, window=window, recipe=recipe)
    assert (
        (result.o.float() - 1).abs() <= by_route(recipe, mxfp8=2**-5, nvfp4_fp8=2**-5, nvfp4=0.25, bf16=2**-8)
    ).all()
    assert abs(result.o.double().mean() - 1) < by_route(recipe, **BIAS)
    truth = exact(3 * q, k, v, do, left=None if window is None else 50)  # LSE has the rounding of the scores alone
    assert (result.lse - truth.lse).abs().mean() < by_route(recipe, mxfp8=0.1, nvfp4_fp8=0.4, nvfp4=0.4, bf16=1e-5)


@pytest.mark.parametrize("recipe", RECIPES)
def test_with_do_one_dv_counts_the_queries(recipe):
    q, k, v, do = tensors(300)
    dv = run(q, k, v, torch.ones_like(do), recipe=recipe).dv.double()
    total = dv.sum(0)  # (key heads, features): each of the 300 queries of two query heads hands out a mass of one
    assert ((total / 600 - 1).abs() < by_route(recipe, **BIAS)).all()


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("tokens", [8, 300])
def test_gradients_are_finite_and_near_the_exact_ones(recipe, tokens):
    given = tensors(tokens)
    result, truth = run(*given, recipe=recipe), exact(*given)
    bound = by_route(recipe, mxfp8=0.13, nvfp4_fp8=0.35, nvfp4=0.45, bf16=0.02)
    for name in ("o", "dq", "dk", "dv"):
        assert getattr(result, name).isfinite().all()
        assert relative(getattr(result, name), getattr(truth, name)) < bound, name


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("tokens", [8, 300])
def test_with_equal_keys_dq_is_nothing(recipe, tokens):
    """Each row of dS sums to zero, so a vector common to all keys drops out, to within rounding."""
    q, k, v, do = tensors(tokens)
    k[:] = k[:1]
    dq = run(q, k, v, do, recipe=recipe).dq
    unit = k.double().norm(dim=-1).max() * do.double().norm(dim=-1).max() * v.double().norm(dim=-1).max() / 4
    assert dq.double().norm(dim=-1).max() < unit * by_route(
        recipe, mxfp8=2**-6, nvfp4_fp8=2**-6, nvfp4=2**-4, bf16=2**-9
    )


@pytest.mark.parametrize("recipe", [name for name in RECIPES if name.startswith(("mxfp8", "bf16"))])
def test_accuracy_does_not_depend_on_the_length(recipe):
    """Uniform P and V = 1: sums must be kept in a wide accumulator. One query sees 64, then 4096 keys."""
    worst = []
    for keys in (64, 4096):
        q, k, v, do = tensors(1, keys, heads=(1, 1))
        result = run(torch.zeros_like(q), k, torch.ones_like(v), torch.ones_like(do), recipe=recipe)
        worst.append(((result.o.double() - 1).abs().max().item(), (result.dv.double().sum(0) - 1).abs().max().item()))
    for short, long in zip(*worst):
        assert short <= 2.0**-8 and long <= 2.0**-8
