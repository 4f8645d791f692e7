"""Scales that look ahead: what an earlier row must not notice, and proof that the tests would notice it.

Origins: TransformerEngine #3248, flash-attention #2707, cudnn-frontend #983 and #1123. Each test has a twin that runs a
recipe which does leak ("fast", or a control that imitates a shipped design) and finds exactly the predicted damage, so
that a pass of the safe ones means something.
"""

import pytest
import torch
from cases.case_inputs import all_same, at, claiming, run, tensors
from helpers import same_bits as same

import flamia
from flamia import Recipe
from flamia.recipe import CONTROLS

SAFE = claiming("prefix", "document")


def values_only(values: dict[int, float], tokens: int, recipe, cu=None, dim=16):
    """O where q = k = 1 and V is zero but for some tokens: row 0 reads exactly the decoded V[0]."""
    ones = torch.ones(tokens, 1, dim, dtype=torch.bfloat16)
    v = torch.zeros_like(ones)
    for token, value in values.items():
        v[token] = value
    return flamia.attention_varlen(ones, ones, v, at(0, tokens) if cu is None else cu, causal=True, recipe=recipe)


TINY = 2.0**-20
PAIRS = [  # (tokens, value of token 0, later token, its value)
    (33, TINY, 16, 1.0),
    (33, TINY, 32, 1.0),
    (65, 2.0**-10, 64, 1024.0),
    (33, 1.125 * 2.0**-15, 16, 1.0),
    (33, 1.0, 8, 3.0),
    (200, TINY, 140, 1.0),
]


@pytest.mark.parametrize("recipe", SAFE)
@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_a_later_value_changes_no_earlier_row(recipe, pair):
    tokens, value, later, large = pair
    alone = values_only({0: value}, tokens, recipe)
    beside = values_only({0: value, later: large}, tokens, recipe)
    assert same(alone[:later], beside[:later])
    assert beside[later].any()


@pytest.mark.parametrize("recipe", claiming("document"))
@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_nor_does_one_in_another_document(recipe, pair):
    tokens, value, later, large = pair
    cu = at(0, later, tokens)
    alone = values_only({0: value}, tokens, recipe, cu)
    beside = values_only({0: value, later: large}, tokens, recipe, cu)
    assert same(alone[:later], beside[:later])


def test_shared_scales_do_exactly_the_damage_predicted():
    def first(values, recipe, tokens=65):
        return values_only(values, tokens, recipe)[0].unique().item()

    fast, current = Recipe.fast("mxfp8"), CONTROLS["current_scaling"]
    stripes = Recipe.fast("nvfp4", cells=(("o_p", "bf16:none"),))  # P as it is, to see V alone
    assert first({0: TINY}, fast) == TINY
    assert first({0: TINY, 16: 1.0}, fast) == 0.0  # same 32 tokens
    assert first({0: TINY, 32: 1.0}, fast) == TINY  # the next 32
    assert first({0: 1.125 * 2.0**-15}, fast) == 1.125 * 2.0**-15
    assert first({0: 1.125 * 2.0**-15, 16: 1.0}, fast) == 2.0**-15  # 8/9 of itself: pushed into E4M3's subnormals
    assert first({0: 2.0**-10}, current) == 2.0**-10
    assert first({0: 2.0**-10, 64: 1024.0}, current) == 0.0  # another block altogether
    assert first({0: 1.0}, stripes) == 1.03125
    assert first({0: 1.0, 8: 3.0}, stripes) == 1.0


@pytest.mark.parametrize("recipe", SAFE)
@pytest.mark.parametrize("which", ["k", "v", "both"])
def test_one_later_token_leaves_earlier_rows_and_their_gradients(recipe, which):
    """32 tokens, one group; K or V of token 20 changes, dO stays. dK and dV of earlier tokens may change: no leak."""
    q, k, v, do = tensors(32)
    before = run(q, k, v, do, recipe=recipe)
    for x in (k, v) if which == "both" else (k if which == "k" else v,):
        x[20] = x[20] * 2.0**12
    after = run(q, k, v, do, recipe=recipe)
    assert same(before.o[:20], after.o[:20]) and same(before.dq[:20], after.dq[:20])
    assert not same(before.o[20:], after.o[20:])
    assert after.dk.isfinite().all() and after.dv.isfinite().all()


@pytest.mark.parametrize("which", ["k", "v"])
def test_fast_is_caught_by_the_same_change(which):
    q, k, v, do = tensors(32)
    before = run(q, k, v, do, recipe="mxfp8/fast,dq_accumulator=fp32")
    changed = k if which == "k" else v
    changed[20] = changed[20] * 2.0**12
    after = run(q, k, v, do, recipe="mxfp8/fast,dq_accumulator=fp32")
    assert not same(before.o[:20], after.o[:20]) and not same(before.dq[:20], after.dq[:20])


@pytest.mark.parametrize("recipe", SAFE)
@pytest.mark.parametrize("cut", [1, 16, 64, 70, 127, 128, 150])
def test_cuts_inside_and_between_groups(recipe, cut):
    """Everything from the cut on changes, dO included: a cut on an edge of the groups would see no shared scale."""
    before = tensors(170)
    after = [x.clone() for x in before]
    for x in after:
        x[cut:] = 2.0**8 * torch.roll(x, 1, -1)[cut:]
    first, second = run(*before, recipe=recipe), run(*after, recipe=recipe)
    assert same(first.o[:cut], second.o[:cut])
    assert same(first.lse[:, :cut], second.lse[:, :cut])
    assert same(first.dq[:cut], second.dq[:cut])


@pytest.mark.parametrize("recipe", claiming("truncate"))
@pytest.mark.parametrize("tokens", [33, 65, 260])
def test_a_row_is_the_last_row_of_the_shorter_call(recipe, tokens):
    """What incremental decoding sees; catches what depends on the length or on padding, which no suffix change does."""
    q, k, v, do = tensors(tokens, heads=(2, 1))
    full = run(q, k, v, do, recipe=recipe)
    for t in {33: (0, 1, 15, 30, 31), 65: (31, 32, 63), 260: (127, 128, 200, 255)}[tokens]:
        short = run(*(x[: t + 1] for x in (q, k, v, do)), recipe=recipe)
        assert same(short.o[t], full.o[t]) and same(short.lse[:, t], full.lse[:, t]) and same(short.dq[t], full.dq[t])
        one = run(q[t : t + 1], k[: t + 1], v[: t + 1], do[t : t + 1], recipe=recipe)  # one query against all its keys
        assert same(one.o[0], full.o[t]) and same(one.dq[0], full.dq[t])


OPTIONS = [
    {},
    {"window": (5, 0)},
    {"window": (40, 7)},
    {"softmax_scale": 3.0},
    {"check_offsets": False},
    {"check_offsets": True},
    {"backend": "reference"},
]


@pytest.mark.parametrize("recipe", ["mxfp8/strict", "nvfp4/fold", "mxfp8_scores/strict"])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("form", ["packed", "batched", "flash", "flash varlen"])
def test_every_option_is_causal(recipe, options, form):
    """transformers #48748, keras #23038: causal under one backend or option, and not under another."""
    q, k, v, _ = tensors(70)

    def call():
        cu, named = at(0, 70), dict(options)
        if form == "batched" or form == "flash":
            named.pop("check_offsets", None)
        if form.startswith("flash"):
            named["window_size"] = named.pop("window", (-1, -1))
        batch = [x[None] for x in (q, k, v)]
        function, arguments = {
            "packed": (flamia.attention_varlen, (q, k, v, cu)),
            "batched": (flamia.attention, batch),
            "flash": (flamia.flash_attn_func, batch),
            "flash varlen": (flamia.flash_attn_varlen_func, (q, k, v, cu, cu, 70, 70)),
        }[form]
        plain = function(*arguments, causal=True, recipe=recipe, **named)
        o, lse = function(*arguments, causal=True, recipe=recipe, return_lse=True, **named)
        assert same(plain, o)
        return o.view(70, 4, 16), lse.view(4, 70)

    before, before_lse = call()
    for x in (q, k, v):
        x[41:] = 2.0**9
    after, after_lse = call()
    assert all_same([before[:41], before_lse[:, :41]], [after[:41], after_lse[:, :41]])
    assert not same(before[41:], after[41:])
