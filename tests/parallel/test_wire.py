"""Operands on the wire: which travel as codes, of which cell, and that they arrive as numbers with the same codes."""

import pytest
import torch
from helpers import randn, same_bits

from flamia.codes import encode_tokens
from flamia.integrations.parallel_wire import Field, coded
from flamia.recipe import Recipe

V, G = ("o_v", "e_v"), ("e_g", "dv_g")


def recipe(text):
    return Recipe.parse(text)


def test_the_default_recipe_sends_coarse_codes():
    default = Recipe.strict()
    assert [coded(default, *names) for names in (("s_k",), V, G)] == ["e4m3:coarse"] * 3
    assert coded(default, "s_k", "dq_k") == coded(default, "s_q", "dk_q") == ""  # the gradients read them in 16 bits
    finer = recipe("mxfp8_scores/strict,o_v=e4m3:token,e_v=e4m3:token")
    assert coded(finer, *V) == "e4m3:token" and coded(finer, "s_k") == "e4m3:coarse"


@pytest.mark.parametrize(
    "text, names",
    [
        ("mxfp8_scores/strict,e_v=e4m3:token", V),  # two scales of one token
        ("mxfp8_scores/strict,frontier.o_v=e4m3:token", V),
        ("mxfp8_scores/strict,scale_rule=floor", V),
        ("mxfp8_scores/strict,rotate=True", ("s_k",)),
        ("mxfp8_scores/strict,rounding=False", V),
        ("mxfp8_scores/strict,e_format=bf16", V),
        ("mxfp8/strict", V),  # a scale for 32 tokens
        ("mxfp8/strict,o_v=e4m3:coarse,e_v=e4m3:coarse", V),  # 16 bits at the frontier
    ],
)
def test_what_cannot_travel_as_codes(text, names):
    assert coded(recipe(text), *names) == ""


@pytest.mark.parametrize("cell", ["e4m3:token", "e4m3:coarse"])
def test_codes_arrive(cell):
    x = randn(500, 2, 16, seed=1).bfloat16()
    x[3, 1, 2] = torch.nan
    field = Field.of(x, cell)
    codes, scales = field.pack(x)
    assert (codes.shape, scales.shape) == ((500, 2, 16), (500, 2, 1)) and codes.dtype == scales.dtype == torch.uint8
    got = field.read((codes, scales), torch.arange(500))
    assert got.dtype == x.dtype and got[3, 1].isnan().all() and got.isnan().sum() == 16
    for again, first in zip(encode_tokens(got, cell), encode_tokens(x, cell), strict=True):
        assert torch.equal(again, first)


def test_numbers_arrive_as_they_are():
    x = randn(20, 2, 16, seed=1).bfloat16()
    field = Field.of(x)
    rows = torch.tensor([3, 3, 19, 0])
    assert same_bits(field.read(field.pack(x), rows), x[rows])
