"""Recipes: presets, refusals, and the trip through a string."""

import dataclasses

import pytest

from flamia.recipe import CONTROLS, ROUTES, SAFETIES, Operands, Recipe

ALL = [Recipe.parse(f"{route}/{safety}") for route in ROUTES for safety in SAFETIES]


@pytest.mark.parametrize("recipe", [*ALL, *CONTROLS.values()], ids=str)
def test_strings_round_trip(recipe):
    assert Recipe.parse(str(recipe)) == recipe
    assert hash(Recipe.parse(str(recipe))) == hash(recipe)


def test_departures_are_printed_and_parsed():
    recipe = Recipe.strict("mxfp8", lag=0, rotate=True, delta="compensated", cells=(("frontier.o_v", "e4m3:token"),))
    assert str(recipe) == "mxfp8/strict,rotate=True,lag=0,delta=compensated,frontier.o_v=e4m3:token"
    assert Recipe.parse(str(recipe)) == recipe
    assert Recipe.parse("mxfp8") == Recipe.strict("mxfp8") == Recipe()
    assert Recipe.strict() == Recipe.strict("mxfp8_scores")  # the default of the library
    assert Recipe.bf16() == Recipe.parse("bf16/strict")


def test_presets_claim_what_they_can_keep():
    everything = {"prefix", "truncate", "document", "offset", "mask", "repeat"}
    for route in ROUTES:
        assert Recipe.strict(route).claims == everything
    assert Recipe.fold().claims == everything - {"mask"}
    assert Recipe.fast().claims == {"document", "offset", "repeat"}
    assert Recipe.fast("mxfp8_scores").claims == everything
    for route in ROUTES:  # FP16 sums whose boost reads the whole document: nothing causal to promise
        assert Recipe.fold(route, dq_accumulator="fp16_sequence").claims == {"document", "offset", "repeat"}
    assert CONTROLS["current_scaling"].claims == {"repeat"}
    assert CONTROLS["k_centered"].claims == {"document", "offset", "repeat"}
    assert Recipe.strict(cells=(("frontier.o_v", "e4m3:block"),)).claims == {"document", "offset", "repeat"}


def test_strict_reads_sixteen_bits_at_the_frontier_and_one_reconstructed_gradient():
    for route in ("mxfp8", "nvfp4_fp8", "nvfp4"):
        frontier = Recipe.strict(route).frontier
        low = {f.name for f in dataclasses.fields(Operands) if not getattr(frontier, f.name).startswith("bf16")}
        assert low == {"e_g", "dv_g"} and frontier.e_g == frontier.dv_g
    for recipe in ALL:
        if recipe.route != "nvfp4":  # which has two views of G by nature
            assert recipe.full.e_g == recipe.full.dv_g


def test_output_and_its_gradient_read_the_same_v():
    for recipe in ALL:
        if recipe.route != "nvfp4":
            assert recipe.full.o_v == recipe.full.e_v and recipe.frontier.o_v == recipe.frontier.e_v
    sixteen = Recipe.strict("mxfp8_scores", e_format="bf16").full
    assert {sixteen.o_v, sixteen.e_v, sixteen.e_g, sixteen.dv_g} == {"bf16:none"}


def test_scales_per_token_of_the_default_route_are_coarse_and_of_no_other():
    for safety in SAFETIES:
        full = Recipe.parse(f"mxfp8_scores/{safety}").full
        low = {name: cell for name, cell in dataclasses.asdict(full).items() if cell != "bf16:none"}
        assert low == dict.fromkeys(("s_q", "s_k", "o_v", "e_g", "e_v", "dv_g"), "e4m3:coarse")
    for recipe in ALL:
        cells = {*dataclasses.astuple(recipe.full), *dataclasses.astuple(recipe.frontier)}
        assert ("e4m3:coarse" in cells) == (recipe.route == "mxfp8_scores")


@pytest.mark.parametrize(
    "options, message",
    [
        ({"route": "fp8"}, "route='fp8'.*'mxfp8'"),
        ({"safety": "safe"}, "safety='safe'.*'strict'"),
        ({"frontier_block": 48}, "frontier_block=48.*multiple of 32"),
        ({"lag": 2, "boost": 8}, "lag=2, boost=8.*448.*at most 8"),
        ({"lag": -1}, "lag=-1"),
        ({"boost": 10**9}, "boost=1000000000.*0..15"),
        ({"route": "bf16", "lag": 0, "boost": 1}, "boost=1.*16 bits.*nothing reads it"),
        ({"route": "mxfp8_scores", "lag": 0, "boost": 6}, "boost=6.*16 bits.*nothing reads it"),
        ({"frontier_block": 2**30}, "frontier_block=1073741824.*32..4096"),
        ({"route": "bf16", "scale_rule": "floor", "lag": 0, "boost": 0}, "scale_rule='floor'.*nothing"),
        ({"route": "nvfp4", "scale_rule": "floor"}, "scale_rule='floor'.*FP4"),
        ({"route": "bf16", "rotate": True, "lag": 0, "boost": 0}, "rotate=True.*16 bits"),
        ({"e_format": "bf16"}, "e_format='bf16'.*mxfp8_scores"),
        ({"dq_accumulator": "fp16_causal"}, "dq_accumulator='fp16_causal'.*window"),
        ({"safety": "fast", "u_range": "running"}, "u_range='running'.*row or column"),
        ({"safety": "fast", "dv_scale": "boost"}, "dv_scale='boost'.*strict"),
        ({"cells": (("o_w", "e4m3:token"),)}, "cell 'o_w'.*o_v"),
        ({"cells": (("o_v", "e5m2:token"),)}, "o_v='e5m2:token'.*e4m3"),
        ({"cells": (("o_v", "nvfp4:token"),)}, "nvfp4 with feature16 and stripe16"),
        ({"cells": (("o_v", "e2m1:coarse"),)}, "o_v='e2m1:coarse'.*e4m3:coarse"),
        ({"cells": (("o_p", "e4m3:token"),)}, "o_p='e4m3:token'.*relative"),
        ({"cells": (("o_p", "e2m1:boost"),)}, "o_p='e2m1:boost'.*clip"),
        ({"cells": (("dv_p", "e2m1:relative"),)}, "dv_p='e2m1:relative'.*clip"),
        ({"cells": [("o_v", "e4m3:token")]}, "cells=.*tuple"),
        ({"cells": {"o_v": "e4m3:token"}}, "cells=.*tuple"),
        ({"exp2": "table"}, "exp2='table'.*'exact'"),
        # equal to what is allowed, so that a cache would mix them up, but with strings that do not parse
        ({"frontier_block": 128.0}, "frontier_block=128.0.*integer"),
        ({"frontier_block": "128"}, "frontier_block='128'.*integer"),
        ({"lag": 2.5}, "lag=2.5.*integer"),
        ({"boost": True}, "boost=True.*integer"),
        ({"rotate": 1}, "rotate=1: allowed are True and False"),
        ({"rotate": "False"}, "rotate='False': allowed are True and False"),
        ({"rounding": 0}, "rounding=0: allowed are True and False"),
    ],
)
def test_refusals_name_the_option_and_the_rule(options, message):
    with pytest.raises(ValueError, match=message):
        Recipe(**options)


@pytest.mark.parametrize(
    "text",
    [
        "mxfp8/strict,lag",
        "mxfp8/strict,lag=1,lag=2",
        "mxfp8/strict,lag=x",
        "mxfp8/strict,speed=9",
        "mxfp8/strict,rotate=yes",
        "mxfp8/strict,route=bf16",
    ],
)
def test_bad_strings(text):
    with pytest.raises(ValueError):
        Recipe.parse(text)
