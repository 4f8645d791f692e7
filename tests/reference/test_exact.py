"""With rounding switched off every route and preset is exact attention, forward and backward, on every mask."""

import dataclasses

import pytest
import torch
from helpers import documents, exact_attention, inputs, randn, relative

from flamia import reference
from flamia.recipe import ROUTES, SAFETIES, Recipe

QUERIES = [1, 0, 139, 160, 8]
KEYS = [3, 2, 145, 140, 10]
MASKS = [(None, 0), (None, None), (40, 0), (130, 0), (300, 0), (0, 0), (10, 20), (200, 150)]
SCALE = 0.2


@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_without_rounding_every_recipe_is_exact(mask):
    docs = documents(QUERIES, *mask, key_lengths=KEYS)
    q, k, v, do = inputs(sum(QUERIES) + 4, dim=32, dim_v=24, key_rows=sum(KEYS) + 5)
    dlse = randn(q.shape[1], len(q), seed=7, dtype=torch.float32)
    expected = exact_attention(q, k, v, do, dlse, docs, SCALE)
    for route in ROUTES:
        for safety in SAFETIES:
            for rotate in (False, True) if route != "bf16" else (False,):
                for delta in ("output", "centered"):
                    recipe = Recipe.parse(f"{route}/{safety},rounding=False,rotate={rotate},delta={delta}")
                    o, lse, residual = reference.forward(q, k, v, docs, recipe, SCALE)
                    grads = reference.backward(do, dlse, q, k, v, o, lse, residual, docs, recipe, SCALE)
                    seen = expected[1].isfinite()
                    assert torch.equal(seen, lse.isfinite())
                    assert relative(lse[seen], expected[1][seen]) < 1e-12
                    for x, y in zip((o, *grads), (expected[0], *expected[2:])):
                        assert relative(x, y) < 1e-12, recipe


@pytest.mark.parametrize("variant, bound", [("polynomial", 2e-4), ("schraudolph", 0.05), ("mitchell", 0.05)])
def test_approximate_exponentials_stay_near(variant, bound):
    docs = documents([150])
    q, k, v, do = inputs(150)
    expected = exact_attention(q, k, v, do, None, docs, SCALE)
    recipe = dataclasses.replace(Recipe.bf16(), rounding=False, exp2=variant)
    o, lse, residual = reference.forward(q, k, v, docs, recipe, SCALE)
    assert 1e-7 < relative(o, expected[0]) < bound
    grads = reference.backward(do, None, q, k, v, o, lse, residual, docs, recipe, SCALE)
    assert all(relative(x, y) < 3 * bound for x, y in zip(grads, expected[2:]))


def test_exponential_variants_at_their_worst_points():
    from flamia.reference.exponential import exp2

    x = torch.linspace(-8, 0, 80001, dtype=torch.float64)
    ratio = {name: exp2(x, name) / torch.exp2(x) - 1 for name in ("polynomial", "mitchell", "schraudolph")}
    assert ratio["polynomial"].abs().max() < 1.04e-4
    assert ratio["mitchell"].max().item() == pytest.approx(0.0615, abs=1e-4)
    assert float(x[ratio["mitchell"].argmax()] % 1) == pytest.approx(0.4427, abs=1e-3)
    assert abs(ratio["schraudolph"].mean().item()) < 1e-4
    edge = torch.tensor([-torch.inf, torch.nan], dtype=torch.float64)
    for name in ("exact", "polynomial", "mitchell", "schraudolph"):
        assert exp2(edge, name)[0] == 0 and exp2(edge, name)[1].isnan()


@pytest.mark.parametrize("head_dims", [(1, 1), (8, 3), (48, 48), (192, 128), (256, 256)], ids=str)
def test_any_head_size(head_dims):
    docs = documents([40, 9])
    q, k, v, do = inputs(49, heads=(6, 3), dim=head_dims[0], dim_v=head_dims[1])
    expected = exact_attention(q, k, v, do, None, docs, head_dims[0] ** -0.5)
    o, lse, residual = reference.forward(q, k, v, docs, Recipe.bf16(), head_dims[0] ** -0.5)
    grads = reference.backward(do, None, q, k, v, o, lse, residual, docs, Recipe.bf16(), head_dims[0] ** -0.5)
    for x, y in zip((o, *grads), (expected[0], *expected[2:])):
        assert x.dtype == torch.bfloat16 and relative(x, y) < 0.02 if y.norm() > 1e-12 else x.abs().max() < 1e-2


def test_float16_stays_float16():
    docs = documents([150])
    q, k, v, do = inputs(150, dtype=torch.float16)
    expected = exact_attention(q, k, v, do, None, docs, SCALE)
    for recipe, bound in ((Recipe.bf16(), 1e-3), (Recipe.strict("mxfp8"), 0.05)):
        o, lse, residual = reference.forward(q, k, v, docs, recipe, SCALE)
        grads = reference.backward(do, None, q, k, v, o, lse, residual, docs, recipe, SCALE)
        for x, y in zip((o, *grads), (expected[0], *expected[2:])):
            assert x.dtype == torch.float16 and relative(x, y) < bound
