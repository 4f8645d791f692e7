"""The kernels of the route `mxfp8`, strict and fast, against the reference with the same recipe, and the contract that each
promises, bit for bit. They read no offset of the host's and are replayed with others."""

from __future__ import annotations

import random

import pytest
import torch

if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
    pytest.skip("needs an NVIDIA Hopper GPU", allow_module_level=True)

from calls import CASES, NAMES, bits, draw, error, no_waiting, of_document, offsets, same

import flamia
from flamia import hopper, reference
from flamia.formats import exp2_int
from flamia.hopper import mxfp8
from flamia.packing import Documents
from flamia.quantize import quantize
from flamia.recipe import Recipe

STRICT, FAST = mxfp8.RECIPES
BOTH = pytest.mark.parametrize("recipe", mxfp8.RECIPES, ids=["strict", "fast"])
ALIKE = [case for case, (_, keys, *_rest) in CASES.items() if keys is None]


def make(case: str, tail: int = 13, seed: int = 0):
    lengths, _, heads, d, window = CASES[case]
    cu = offsets(lengths)
    return *draw(sum(lengths) + tail, sum(lengths) + tail, heads, d, seed), Documents(cu, cu, *window)


def run(q, k, v, do, dlse, documents, recipe, room=hopper, scale=None):
    """o, lse, dq, dk, dv."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    o, lse, residual = room.forward(q, k, v, documents, recipe, scale)
    return o, lse, *room.backward(do, dlse, q, k, v, o, lse, residual, documents, recipe, scale)


def run_alone(q, k, v, do, dlse, documents, span, recipe):
    a, b = span[:2]
    cu = offsets([b - a])
    alone = Documents(cu, cu, documents.left, documents.right)
    return run(q[a:b], k[a:b], v[a:b], do[a:b], None if dlse is None else dlse[:, a:b], alone, recipe)


def differences(got, want) -> dict[str, float]:
    """By how much results differ; the LSE by its largest difference."""
    alive = torch.isfinite(want[1])
    assert torch.equal(torch.isfinite(got[1]), alive)
    report = {name: error(g, w.double()) for name, g, w in zip(NAMES, got, want) if name != "lse"}
    return report | {"lse": (got[1] - want[1])[alive].abs().max().item() if alive.any() else 0.0}


@pytest.mark.parametrize("with_dlse", [False, True], ids=["", "dlse"])
@pytest.mark.parametrize("case", ALIKE)
@BOTH
def test_against_the_reference(recipe, case, with_dlse):
    """Products are exact and sums in FP32, so only a weight at the edge between two E4M3 numbers may fall elsewhere."""
    *given, documents = make(case)
    given[4] = given[4] if with_dlse else None
    report = differences(run(*given, documents, recipe), run(*given, documents, recipe, reference))
    print(recipe, case, {name: f"{e:.1e}" for name, e in report.items()})
    assert report.pop("lse") < 1e-5
    assert max(report.values()) < 1e-3, report


@pytest.mark.parametrize("scale", [-0.2, 0.0, 1.0])
@BOTH
def test_other_scales(recipe, scale):
    *given, documents = make("grouped")
    report = differences(
        run(*given, documents, recipe, scale=scale), run(*given, documents, recipe, reference, scale=scale)
    )
    assert report.pop("lse") < 1e-4
    assert max(report.values()) < 3e-3, report


@pytest.mark.parametrize("block", [False, True], ids=["token", "block"])
@pytest.mark.parametrize("factor", [1.0, 2.0**-100, 2.0**100])
def test_encoded_bits(block, factor):
    """The values that codes and scales stand for, and the scales, are those of flamia/quantize.py."""
    q, *_, documents = make("short", tail=0)
    x = q.clone()
    x[3], x[70:110], x[120, :, ::2] = 0, 0, 448 * 2.0**-7
    x[200:230] *= 2.0 ** torch.randint(-9, 9, (30, 1, 1), device="cuda").to(torch.bfloat16)
    x *= factor
    plan = mxfp8.launch.plan_of(x, x, documents)
    got = mxfp8.launch.encode(x, plan, 0, block, True)
    want = quantize(x, "e4m3:block" if block else "e4m3:token", documents, "q")
    rows = torch.cat(
        [torch.arange(b - a, device="cuda") + 128 * n for (a, b, *_), n in zip(documents.spans(), firsts(documents))]
    )
    assert torch.equal(got.rounded[:, rows].transpose(0, 1).double(), want.values)
    assert torch.equal(got.given[:, rows].transpose(0, 1), x)
    scales = torch.where(want.nonzero, exp2_int(want.exponent), 0.0)
    assert torch.equal(got.factor[:, rows].t().double(), scales)


def firsts(documents) -> list[int]:
    """The first padded block of each document."""
    sizes = [-(-(b - a) // 128) for a, b, *_ in documents.spans()]
    return [sum(sizes[:i]) for i in range(len(sizes))]


@pytest.mark.parametrize("case", ["short", "grouped", "window", "two-sided window"])
@BOTH
def test_alone_equals_packed(recipe, case):
    *given, documents = make(case)
    packed = run(*given, documents, recipe)
    for span in documents.spans():
        if span[0] < span[1]:
            assert same(run_alone(*given, documents, span, recipe), of_document(packed, span)), span


@pytest.mark.parametrize("case", ["long", "window"])
@pytest.mark.parametrize("cut", [1, 100, 128, 391, 640])
def test_prefix_and_truncation(case, cut):
    """strict: changing or cutting what comes after a position leaves O, LSE and dQ up to it alone."""
    q, k, v, do, dlse, documents = make(case, tail=0)
    end = documents.spans()[0][1]
    whole = run(q, k, v, do, dlse, documents, STRICT)
    short = run_alone(q, k, v, do, dlse, documents, (0, cut, 0, cut), STRICT)
    kept = [(short[0], short[1], short[2])]
    for value in (2.0**20, 2.0**126, torch.nan, -torch.inf):
        other = [x.clone() for x in (q, k, v, do)]
        for x in other:
            x[cut:end] = torch.randn_like(x[cut:end]) * value
        changed = run(*other, dlse, documents, STRICT)
        kept.append((changed[0][:cut], changed[1][:, :cut], changed[2][:cut]))
        second = documents.spans()[1]
        assert same(of_document(changed, second), of_document(whole, second)), "another document saw it"
    for o, lse, dq in kept:
        assert torch.equal(o, whole[0][:cut])
        assert torch.equal(lse, whole[1][:, :cut])
        assert torch.equal(dq, whole[2][:cut])


def test_fast_leaks_inside_its_groups():
    """What `fast` is for: the control. A later token of the same 32 changes an earlier row, and none before the group."""
    *given, documents = make("one", tail=0)
    whole = run(*given, documents, FAST)
    other = [x.clone() for x in given]
    other[1][210] *= 2.0**10
    changed = run(*other, documents, FAST)
    assert torch.equal(changed[0][:192], whole[0][:192])
    assert not torch.equal(changed[0][192:210], whole[0][192:210])


@pytest.mark.parametrize("value", [2.0**126, torch.nan, torch.inf])
@pytest.mark.parametrize("position", [330, 511, 640])
def test_behind_a_window(position, value):
    q, k, v, do, dlse, documents = make("window", tail=0)
    whole = run(q, k, v, do, dlse, documents, STRICT)
    gone = position - documents.left
    other = [x.clone() for x in (q, k, v, do)]
    for x in other:
        x[:gone] = value
    o, lse, dq, *_ = run(*other, dlse, documents, STRICT)
    assert torch.equal(o[position:], whole[0][position:]) and torch.equal(dq[position:], whole[2][position:])
    assert torch.equal(lse[:, position:], whole[1][:, position:])


@pytest.mark.parametrize("where", ["q", "k", "v", "do", "dlse"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@BOTH
def test_a_token_that_is_not_finite(recipe, value, where):
    """Exactly the rows that see it turn into NaN, and the gradients of keys that such rows see: as in the reference."""
    given = make("long")
    given[("q", "k", "v", "do", "dlse").index(where)][0 if where == "dlse" else 900, 0] = value
    if where == "dlse":
        given[4][0, :900] = 0
    got, want = (run(*given, recipe, room) for room in (hopper, reference))
    assert any(x.isnan().any() for x in want)
    for name, g, w in zip(NAMES, got, want):
        assert torch.equal(g.isnan(), w.isnan()), name


def test_the_largest_finite_numbers_cross_no_mask():
    """Numbers between the largest of BF16 and 2^128, which rounding to a code may make, must not become infinite: in pairs at the
    mask's edge a hidden weight of zero would meet them."""
    q, k, v, do, _, documents = make("one", tail=0)
    whole = run(q, k, v, do, None, documents, STRICT)
    do[140, 0, 3] = 3.35e38
    changed = run(q, k, v, do, None, documents, STRICT)
    assert torch.equal(changed[4][141:], whole[4][141:])  # of keys that row 140 does not see


@pytest.mark.parametrize(
    "length, window", [(130, (None, 130)), (260, (None, 127)), (260, (300, 300)), (300, (128, 128))]
)
@BOTH
def test_wide_windows_to_the_right(recipe, length, window):
    """A full pair then holds keys behind the document's end; with scores far below zero their weights would be huge."""
    q, k, v, do, _ = draw(length, length, (2, 2), 128)
    q[..., 0], k[..., 0] = 15, -15
    cu = offsets([length])
    documents = Documents(cu, cu, *window)
    report = differences(*(run(q, k, v, do, None, documents, recipe, room) for room in (hopper, reference)))
    assert report.pop("lse") < 1e-4
    assert max(report.values()) < 5e-3, report


@pytest.mark.parametrize("which", ["o", "dq"])
def test_scales_that_lie_far_apart(which):
    """What folds a scale into a weight and out again passes the end of float32 there; the result does not."""
    q, k, v, do, _, documents = make("one", tail=0)
    if which == "o":
        v[:32] *= 2.0**-16
        v[40] *= 2.0**122
    else:
        q *= 2.0**-30
        k[:32] *= 2.0**-60
        k[32:64] *= 2.0**30
        do *= 2.0**60
    got, want = (run(q, k, v, do, None, documents, STRICT, room) for room in (hopper, reference))
    index = NAMES.index(which)
    assert torch.isfinite(want[index]).all()
    assert torch.isfinite(got[index]).all()


@pytest.mark.parametrize("case", ["short", "grouped", "window", "small heads"])
@BOTH
def test_twenty_runs(recipe, case):
    *given, documents = make(case)
    first = run(*given, documents, recipe)
    for _ in range(19):
        assert same(run(*given, documents, recipe), first)


@pytest.mark.parametrize("case", ["short", "grouped", "window", "open", "small heads"])
@BOTH
def test_poisoned_memory(recipe, case):
    """Nothing reads what nobody has written."""
    *given, documents = make(case, tail=150)
    clean = run(*given, documents, recipe)
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.empty(1000, device="cuda").isnan().all()
        assert same(run(*given, documents, recipe), clean)
    finally:
        torch.use_deterministic_algorithms(False)
    assert not any(x.isnan().any() for x in clean)


@pytest.mark.slow
def test_random_packings():
    wrong = []
    for seed in range(60):
        pick = random.Random(seed)
        heads, d = pick.choice([(2, 2), (4, 2), (3, 1)]), pick.choice([64, 128])
        lengths = [
            pick.choice([0, 1, 2, 31, 33, 127, 128, 129, pick.randint(1, 400)]) for _ in range(pick.randint(1, 6))
        ]
        left, right = (
            pick.choice([None, None, 5, pick.randint(3, 300)]),
            pick.choice([None, 0, 0, pick.randint(1, 200)]),
        )
        cu, recipe = offsets(lengths), mxfp8.RECIPES[seed % 2]
        documents = Documents(cu, cu, left, right)
        given = draw(sum(lengths) + 5, sum(lengths) + 5, heads, d, seed)
        got = run(*given, documents, recipe)
        report = differences(got, run(*given, documents, recipe, reference))
        bad = {name: e for name, e in report.items() if not e < 5e-3}
        for span in documents.spans():
            if span[0] < span[1] and not same(run_alone(*given, documents, span, recipe), of_document(got, span)):
                bad["alone"] = 1.0
        if bad:
            wrong.append(f"seed {seed}: {lengths}, heads {heads}, D {d}, window {left}, {right}, {recipe}: {bad}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    "recipe, tokens", [(STRICT, 4096), (STRICT, 131072), (FAST, 4096)], ids=["4k", "131k", "fast 4k"]
)
def test_mass(recipe, tokens):
    """V of ones, dO of ones: rows of O are one, and dV sums to the number of queries, both within 2^-8. `strict` at any length;
    the constant scale of P in the dV of `fast` rounds weights below 2^-17 badly, and at 131,072 tokens 5% of dV is missing."""
    cu = offsets([tokens])
    documents = Documents(cu, cu, None, None)
    q, k, *_ = draw(tokens, tokens, (1, 1), 128)
    v = torch.ones_like(k)
    o, _, _, _, dv = run(q, k, v, torch.ones_like(q), None, documents, recipe)
    assert (o.double() - 1).abs().max() < 2**-7  # a row; BF16 has a step of 2^-8 below one
    assert abs(o.double().mean().item() - 1) < 2**-8
    assert abs(dv.double().sum().item() / (tokens * 128) - 1) < 2**-8


@BOTH
def test_a_graph_replayed_with_other_documents(recipe):
    q, k, v, do, _ = draw(700, 700, (4, 2), 128)
    cu = offsets([300, 400])
    documents = Documents(cu, cu, None, 0)
    run(q, k, v, do, None, documents, recipe)
    with no_waiting():
        run(q, k, v, do, None, documents, recipe)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = run(q, k, v, do, None, documents, recipe)
    for lengths in ([300, 400], [1, 699], [513, 187]):
        cu.copy_(offsets(lengths))
        graph.replay()
        assert same(got, run(q, k, v, do, None, documents, recipe)), lengths


@BOTH
def test_through_the_public_functions(recipe):
    """`attention_varlen` is these kernels; it saves V and no codes; batched and packed calls have the same bits."""
    q, k, v, do, _ = draw(600, 600, (4, 2), 128)
    cu = offsets([200, 400])
    tensors = [x.clone().requires_grad_() for x in (q, k, v)]
    o = flamia.attention_varlen(*tensors, cu, causal=True, recipe=recipe)
    o.backward(do)
    want = run(q, k, v, do, None, Documents(cu, cu, None, 0), recipe)
    assert same([o.detach(), *(x.grad for x in tensors)], [want[0], *want[2:]])
    batched = flamia.attention(*(x.view(2, 300, -1, 128) for x in (q, k, v)), causal=True, recipe=recipe)
    cu = offsets([300, 300])
    assert torch.equal(bits(batched.flatten(0, 1)), bits(run(q, k, v, do, None, Documents(cu, cu, None, 0), recipe)[0]))


def test_what_they_do_not_compute_is_refused():
    q, k, v, *_ = draw(10, 30, (2, 2), 128)
    with pytest.raises(flamia.UnsupportedError, match="same tokens"):
        flamia.attention_varlen(q, k, v, offsets([10]), cu_seqlens_k=offsets([30]), causal=True, recipe=STRICT)
    with pytest.raises(flamia.UnsupportedError, match="dq_accumulator=fp32"):
        flamia.attention_varlen(k, k, v, offsets([30]), causal=True, recipe=Recipe.fast("mxfp8"))


def test_a_strided_view_and_a_copy_have_the_same_bits():
    q, k, v, do, dlse, documents = make("grouped")
    wide = torch.randn(len(q), 8, 3, 128, device="cuda", dtype=torch.bfloat16)
    wide[:, :, 1] = q
    got = run(wide[:, :, 1], k, v, do.transpose(0, 1).contiguous().transpose(0, 1), dlse, documents, STRICT)
    assert same(got, run(q, k, v, do, dlse, documents, STRICT))
