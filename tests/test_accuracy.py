"""Accuracy: the truth is true, inputs are what their names say, and the measures move when they should."""

import pytest
import torch

from flamia import Recipe
from flamia.accuracy import COLUMNS, INPUTS, SHARES, cells, draw, exact, measure, measure_all, quantiles, solved

SMALL = {"tokens": 300, "heads": 2, "kv_heads": 1, "head_dim": 32}


def test_the_truth_agrees_with_autograd_in_float64():
    q, k, v, do = draw("gaussian", tokens=50, heads=4, kv_heads=2, head_dim=16)
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    heads = [leaves[0].transpose(0, 1), *(x.repeat_interleave(2, 1).transpose(0, 1) for x in leaves[1:])]
    o = torch.nn.functional.scaled_dot_product_attention(*heads, is_causal=True, scale=0.3).transpose(0, 1)
    expected = (o, *torch.autograd.grad(o, leaves, do.double()))
    for got, want in zip(exact(q, k, v, do, 0.3), expected):
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("kind", INPUTS)
def test_inputs_have_their_shapes_and_depend_on_the_seed_alone(kind):
    a, b, c = (draw(kind, tokens=40, heads=4, kv_heads=2, head_dim=16, seed=seed) for seed in (1, 1, 2))
    assert [tuple(x.shape) for x in a] == [(40, 4, 16), (40, 2, 16), (40, 2, 16), (40, 4, 16)]
    assert {x.dtype for x in a} == {torch.bfloat16}
    assert all(torch.equal(x, y) for x, y in zip(a, b)) and not torch.equal(a[0], c[0])


def weights(kind: str) -> torch.Tensor:
    q, k, _, _ = draw(kind, **SMALL)
    s = (q.double().transpose(0, 1) @ k.double().transpose(0, 1).mT) * 32**-0.5
    return s.masked_fill(torch.ones(300, 300, dtype=torch.bool).triu(1), -torch.inf).softmax(-1)[:, 100:]


def test_inputs_are_what_their_names_say():
    assert weights("peaked").amax(-1).mean() > 3 * weights("gaussian").amax(-1).mean()
    assert weights("sink")[..., 0].mean() > 20 * weights("gaussian")[..., 0].mean()
    channel = draw("outlier_channels", **SMALL)[1].double().std((0, 1))
    assert (channel > 5).sum() == 4 and (channel < 2).sum() == 28


@pytest.mark.parametrize("kind", INPUTS)
def test_without_rounding_there_is_no_error_and_rows_of_u_sum_to_zero(kind):
    found = measure(Recipe.strict(rounding=False), kind, **SMALL)
    assert max(found.error.values()) < 1e-9 and min(found.cosine.values()) > 1 - 1e-12
    assert abs(found.residual["q0.01"]) < 1e-9 and abs(found.residual_rounded["q0.99"]) < 1e-9
    assert found.shares == dict.fromkeys(SHARES, 0.0)


def test_errors_rank_as_formats_do():
    truth = solved("gaussian", **SMALL)
    bf16, strict, fast, four = (
        measure(recipe, "gaussian", truth=truth) for recipe in ("bf16", "mxfp8/strict", "mxfp8/fast", "nvfp4_fp8/fast")
    )
    for name in ("o", "dq", "dk", "dv"):
        assert bf16.error[name] < 0.005 < strict.error[name] < fast.error[name] < four.error[name] < 0.3
        assert bf16.cosine[name] > strict.cosine[name] > fast.cosine[name] > four.cosine[name] > 0.95


def test_what_rounding_zeroes_is_counted():
    truth = solved("peaked", **SMALL)
    bf16, strict, fast = (measure(recipe, "peaked", truth=truth) for recipe in ("bf16", "mxfp8/strict", "mxfp8/fast"))
    assert bf16.shares["u_zeroed"] == 0.0 < strict.shares["u_zeroed"] < fast.shares["u_zeroed"] < 0.5
    assert bf16.shares["p_zeroed"] == 0.0 < strict.shares["p_zeroed"] < fast.shares["p_zeroed"] < 0.5


def test_quantiles_keep_their_sign():
    found = quantiles(torch.linspace(-1, 3, 401))
    assert found == pytest.approx({"mean": 1.0, "q0.01": -0.96, "q0.5": 1.0, "q0.99": 2.96})


def test_every_recipe_meets_every_input_and_fills_the_table():
    found = list(measure_all(("bf16", "mxfp8/strict"), ("gaussian", "sink"), tokens=40, head_dim=16))
    assert [(x.inputs, x.recipe) for x in found] == [
        ("gaussian", "bf16/strict"),
        ("gaussian", "mxfp8/strict"),
        ("sink", "bf16/strict"),
        ("sink", "mxfp8/strict"),
    ]
    assert all(len(cells(x)) == len(COLUMNS) for x in found)


def test_unknown_inputs_name_those_that_exist():
    with pytest.raises(ValueError, match=r"'gaussian', 'peaked', 'sink', 'outlier_channels'"):
        draw("uniform")
    with pytest.raises(ValueError, match="heads = 3 is not a multiple of kv_heads = 2"):
        draw("gaussian", heads=3, kv_heads=2)
