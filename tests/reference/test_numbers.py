"""Numbers published for these routes, and accuracy relative to what 16-bit attention does on the same input."""

import time

import pytest
import torch
from helpers import cosine, documents, exact_attention, inputs, randn, relative

from flamia import reference
from flamia.recipe import Recipe

DIM = 128


def run(recipe, q, k, v, do, docs, **kwargs):
    scale = q.shape[2] ** -0.5
    o, lse, residual = reference.forward(q, k, v, docs, recipe, scale)
    return o, *reference.backward(do, None, q, k, v, o, lse, residual, docs, recipe, scale, **kwargs)


@pytest.fixture(scope="module")
def gaussian():
    docs = documents([2048])
    x = inputs(2048, heads=(1, 1), dim=DIM)
    o, _, *grads = exact_attention(*x, None, docs, DIM**-0.5)
    return docs, x, (o, *grads)


@pytest.mark.parametrize(
    "recipe, output, gradient, within",
    [(Recipe.fast("mxfp8"), 0.9988, 0.9979, 0.001), (Recipe.fast("nvfp4_fp8"), 0.9920, 0.9906, 0.004)],
    ids=str,
)
def test_cosines_of_the_paper(gaussian, recipe, output, gradient, within):
    """FLAMIA, table 4: 4 x 4096 causal, against FP32. Here one head of 2048."""
    docs, x, expected = gaussian
    o, *grads = run(recipe, *x, docs)
    assert cosine(o, expected[0]) == pytest.approx(output, abs=within)
    worst = min(cosine(a, b) for a, b in zip(grads, expected[1:]))
    assert worst == pytest.approx(gradient, abs=within)


def test_cosines_of_the_four_bit_route(gaussian):
    """The paper: 0.9810 / 0.9456. The output agrees; our gradients are better (0.97), because a power of two per row
    keeps the E4M3 scales of U out of their subnormal range. They must not fall back."""
    docs, x, expected = gaussian
    o, *grads = run(Recipe.fast("nvfp4"), *x, docs)
    assert cosine(o, expected[0]) == pytest.approx(0.9810, abs=0.01)
    assert min(cosine(a, b) for a, b in zip(grads, expected[1:])) > 0.965


@pytest.mark.parametrize(
    "recipe, bounds",
    [
        (Recipe.bf16(), (0.003, 0.003, 0.003, 0.003)),
        (Recipe.strict("mxfp8"), (0.036, 0.052, 0.052, 0.038)),
        (Recipe.strict("mxfp8_scores"), (0.045, 0.054, 0.054, 0.046)),
        (Recipe.strict("nvfp4_fp8"), (0.10, 0.12, 0.12, 0.10)),
    ],
    ids=str,
)
def test_relative_errors_on_gaussian_inputs(gaussian, recipe, bounds):
    docs, x, expected = gaussian
    for value, exact, bound in zip(run(recipe, *x, docs), expected, bounds):
        assert relative(value, exact) < bound


def test_rotation_helps_mxfp4_scores_and_hurts_nvfp4_scores_on_outlier_channels():
    """The paper: NVFP4 from 0.937 to 0.857, MXFP4 from 0.749 to 0.816. The directions are the claim."""
    docs = documents([1024])
    q, k, v, do = inputs(1024, heads=(1, 1), dim=DIM)
    k[:, :, [7, 50, 90, 100]] *= 32
    expected = exact_attention(q, k, v, do, None, docs, DIM**-0.5)[0]
    mxfp4 = (("s_q", "e2m1:feature32"), ("s_k", "e2m1:feature32"))
    score = {}
    for name, cells in (("nvfp4", ()), ("mxfp4", mxfp4)):
        for rotate in (False, True):
            recipe = Recipe.fast("nvfp4_fp8", rotate=rotate, cells=cells)
            score[name, rotate] = cosine(reference.forward(q, k, v, docs, recipe, DIM**-0.5)[0], expected)
    assert score["nvfp4", True] < score["nvfp4", False] - 0.01
    assert score["mxfp4", True] > score["mxfp4", False] + 0.01


def test_cosines_hide_lost_gradients():
    """One entry of 1 and 100 of 0.001: dropping the small ones costs 1% in norm and 5e-5 in cosine."""
    vector = torch.tensor([1.0] + [0.001] * 100, dtype=torch.float64)
    kept = torch.where(vector == 1, vector, 0)
    assert relative(kept, vector) == pytest.approx(0.01, rel=0.01)
    assert cosine(kept, vector) == pytest.approx(0.99995, abs=2e-6)


def sink(strength, rows=1024):
    q, k, v, do = inputs(rows, heads=(1, 1), dim=DIM, seed=11)
    k[0] = 4 * torch.sign(randn(1, DIM, seed=5).float())
    q = (q.float() + strength * torch.sign(k[0].float())).bfloat16()
    return q, k, v, do


@pytest.mark.parametrize("strength", [0.3, 0.4, 0.5])
def test_attention_sinks(strength):
    """With nearly all weight on one key, D from the rounded O ruins dQ and dK of 16-bit attention too; low bits must not
    add more than their own Gaussian error, and D with O's remainder must beat 16 bits on the strongest."""
    docs = documents([1024])
    x = sink(strength)
    _, _, *expected = exact_attention(*x, None, docs, DIM**-0.5)
    expected = expected[:2]
    sixteen = [relative(a, b) for a, b in zip(run(Recipe.bf16(), *x, docs)[1:], expected)]
    for route in ("mxfp8", "mxfp8_scores"):
        low = [relative(a, b) for a, b in zip(run(Recipe.strict(route), *x, docs)[1:], expected)]
        assert all(a < b + 0.07 for a, b in zip(low, sixteen)), (route, low, sixteen)
        compensated = run(Recipe.strict(route, delta="compensated"), *x, docs)[1:]
        if strength == 0.5:
            assert all(relative(a, b) < c for a, b, c in zip(compensated, expected, sixteen))


def test_reading_two_different_v_is_what_breaks_at_a_sink():
    """O from V as given and E from the 8-bit V: D no longer centres U, and the sink multiplies the difference."""
    docs = documents([1024])
    x = sink(0.5)
    exact = exact_attention(*x, None, docs, DIM**-0.5)[2]
    matched = relative(run(Recipe.strict("mxfp8_scores"), *x, docs)[1], exact)
    split = relative(run(Recipe.strict("mxfp8_scores", cells=(("o_v", "bf16:none"),)), *x, docs)[1], exact)
    assert split > 10 * matched


@pytest.mark.parametrize("route", ["mxfp8", "mxfp8_scores", "nvfp4_fp8", "nvfp4", "bf16"])
@pytest.mark.parametrize("length", [64, 1024, 4096])
def test_mass(route, length):
    """With V = 1, O = 1; with dO = 1, dV summed over keys is the number of queries: no bias that grows with length.
    Four-bit weights are the exception: nearest rounding of so few codes loses 2% of a falling density (docs/limits.md)."""
    recipe = Recipe.strict(route)
    docs = documents([length])
    q, k, v, do = inputs(length, heads=(1, 1), dim=64, dim_v=16)
    ones = torch.ones_like
    o, _, _, dv = run(recipe, q, k, ones(v), ones(do), docs)
    bound = 2**-8 if route != "nvfp4" else 0.03
    assert abs(o.double().mean().item() - 1) < bound
    assert abs(dv.double().sum(0).mean().item() / length - 1) < bound
    assert (o.double() - 1).abs().max() < (0.05 if route != "nvfp4" else 0.3)


@pytest.mark.parametrize("recipe", [Recipe.strict(r) for r in ("mxfp8", "mxfp8_scores", "nvfp4_fp8", "bf16")], ids=str)
def test_equal_keys_give_no_query_gradient(recipe):
    """Each row of U sums to zero, so what all keys have in common cannot move dQ."""
    docs = documents([300])
    q, k, v, do = inputs(300, heads=(1, 1), dim=64)
    k = k[:1].expand_as(k).contiguous()
    dq = run(recipe, q, k, v, do, docs)[1]
    assert dq.abs().max() < 0.02 * do.abs().max() * v.abs().max()


def test_diagnostics_count_what_rounding_lost():
    docs = documents([600])
    q, k, v, do = inputs(600, heads=(2, 1), dim=64)
    fine, coarse, none = {}, {}, {}
    run(Recipe.strict("mxfp8"), q * 3, k, v, do, docs, diagnostics=fine)
    run(Recipe.fast(cells=(("dq_u", "e4m3:boost"), ("dk_u", "e4m3:boost"))), q * 3, k, v, do, docs, diagnostics=coarse)
    run(Recipe.parse("mxfp8/strict,rounding=False"), q * 3, k, v, do, docs, diagnostics=none)
    assert 0 < fine["u_zeroed"] < coarse["u_zeroed"]
    assert none["u_zeroed"] == none["p_zeroed"] == none["u_saturated"] == 0
    assert none["row_residual"].abs().max() < 1e-12
    assert fine["row_residual"].shape == (2, 600) and fine["row_residual"].abs().max() > 1e-6
    parts = fine["mean_error"] + fine["mass_error"]
    assert torch.allclose(parts, fine["row_residual"], atol=1e-12)


def test_fp16_query_gradients_keep_their_range():
    """Boosted FP16 partial sums neither overflow nor vanish, whatever the gradient's size."""
    docs = documents([300])
    q, k, v, do = inputs(300, heads=(2, 1), dim=64)
    for size in (2.0**-20, 1.0, 2.0**20):
        expected = exact_attention(q, k, v, do * size, None, docs, 0.125)[2]
        for recipe in (Recipe.fast(), Recipe.fold()):
            assert relative(run(recipe, q, k, v, do * size, docs)[1], expected) < 0.08


def test_speed_on_two_cores():
    """1,024 tokens, four heads of 64: forward and backward in under two seconds."""
    docs = documents([1024])
    x = inputs(1024, heads=(4, 4), dim=64)
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        run(Recipe.strict("mxfp8"), *x, docs)
        seconds.append(time.perf_counter() - start)
    assert min(seconds) < 2
