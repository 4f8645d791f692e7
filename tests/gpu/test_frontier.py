"""Scores from Q and K as given where a pair of blocks straddles the mask's edge (`frontier_scores=bf16`): the kernels against
the oracle, what a row cannot see, and that the public call runs them. Sums, codes and lists are those of the default."""

from __future__ import annotations

import math

import oracle
import pytest
import torch

if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
    pytest.skip("needs an NVIDIA Hopper GPU", allow_module_level=True)

from calls import CASES, NAMES, draw, error, of_document, offsets, run, same
from helpers import GROWTHS, growing

import flamia
from flamia.packing import Documents
from flamia.recipe import Recipe

EDGE = Recipe.strict("mxfp8_scores", frontier_scores="bf16")
SELF = [name for name, case in CASES.items() if case[1] is None and case[4][1] == 0]  # queries and keys alike, causal


def make(case: str, tail: int = 13):
    lengths, _, heads, d, window = CASES[case]
    cu, tokens = offsets(lengths), sum(lengths) + tail
    return *draw(tokens, tokens, heads, d), Documents(cu, cu, *window)


def edge(*arguments, scale=None):
    return run(*arguments, scale=scale, recipe=EDGE)


def alone(q, k, v, do, dlse, documents, span):
    q0, q1, *_ = span
    cu = offsets([q1 - q0])
    return edge(*(x[q0:q1] for x in (q, k, v, do)), dlse[:, q0:q1], Documents(cu, cu, documents.left, documents.right))


@pytest.mark.parametrize("case", SELF)
def test_against_the_oracle(case):
    q, k, v, do, dlse, documents = make(case)
    q[::7] *= 4  # scores so large that 8 bits would show
    got = edge(q, k, v, do, dlse, documents)
    spans, window, scale = documents.spans(), (documents.left, documents.right), q.shape[-1] ** -0.5
    want = oracle.attention(q, k, v, do, spans, *window, scale, dlse, edge=True)
    report = {name: error(g, w) for name, g, w in zip(NAMES, got, want) if name != "lse"}
    print(case, {name: f"{e:.1e}" for name, e in report.items()})
    assert max(report.values()) < 5e-3, report
    coarse = oracle.attention(q, k, v, do, spans, *window, scale, dlse)
    assert all(error(g, w) > 2 * report[name] for name, g, w in zip(NAMES, got, coarse) if name != "lse")


@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("left", [None, 300], ids=["", "window"])
def test_rows_whose_scores_climb(d, left):
    """The reference of a row moves over the blocks, to a first, a middle or a last one, by less and by more than it may lag."""
    cases = [(peak, growth) for peak in ("first", "middle", "last") for growth in GROWTHS]
    given = [torch.cat(x).cuda() for x in zip(*(growing(669, g, p, d, seed) for seed, (p, g) in enumerate(cases)))]
    cu = offsets([669] * len(cases))
    documents = Documents(cu, cu, left, 0)
    got = edge(*given, None, documents, scale=math.log(2))
    want = oracle.attention(*given, documents.spans(), left, 0, math.log(2), edge=True)
    for case, span in zip(cases, documents.spans()):
        pairs = zip(NAMES, of_document(got, span), of_document(want, span))
        errors = {name: error(x, y) if name != "lse" else (x - y).abs().max().item() for name, x, y in pairs}
        assert errors.pop("lse") < 1e-5 * (1 + case[1]) and max(errors.values()) < 4e-3, (case, errors)


@pytest.mark.parametrize("case", ["short", "long", "grouped", "small heads", "window"])
def test_alone_and_again(case):
    q, k, v, do, dlse, documents = make(case)
    packed = edge(q, k, v, do, dlse, documents)
    for _ in range(5):
        assert same(packed, edge(q, k, v, do, dlse, documents))
    for span in documents.spans():
        if span[0] < span[1]:
            assert same(alone(q, k, v, do, dlse, documents, span), of_document(packed, span)), span


@pytest.mark.parametrize("case", ["long", "window", "small heads"])
@pytest.mark.parametrize("cut", [1, 100, 128, 391, 640])
def test_what_comes_after_a_position_shows_in_nothing_before_it(case, cut):
    q, k, v, do, dlse, documents = make(case, tail=0)
    end = documents.spans()[0][1]
    whole = edge(q, k, v, do, dlse, documents)
    kept = [alone(q, k, v, do, dlse, documents, (0, cut, 0, cut))[:3]]
    for value in (2.0**20, 2.0**126, torch.nan, -torch.inf):
        other = [x.clone() for x in (q, k, v, do)]
        for x in other:
            x[cut:end] = torch.randn_like(x[cut:end]) * value
        o, lse, dq, *_ = edge(*other, dlse, documents)
        kept.append((o[:cut], lse[:, :cut], dq[:cut]))
    for o, lse, dq in kept:
        assert same((o, lse, dq), (whole[0][:cut], whole[1][:, :cut], whole[2][:cut]))


@pytest.mark.parametrize("value", [2.0**20, 2.0**126, torch.nan])
def test_a_neighbour_shows_in_nothing(value):
    """Tiles of Q as given go on into the next document: its loudest numbers reach neither dK nor dV of this one."""
    cu = offsets([300, 100])
    *given, dlse = draw(400, 400, (2, 1), 128)
    documents = Documents(cu, cu, None, 0)
    quiet = edge(*given, dlse, documents)
    for x in given:
        x[300:320] = torch.randn_like(x[300:320]) * value
    span = (0, 300, 0, 300)
    assert same(of_document(edge(*given, dlse, documents), span), of_document(quiet, span))


@pytest.mark.parametrize("which", range(4), ids=["q", "k", "v", "do"])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_not_finite_tokens_stay_where_they_are(which, bad):
    q, k, v, do, dlse, documents = make("long")
    clean = edge(q, k, v, do, dlse, documents)
    tensors = [x.clone() for x in (q, k, v, do)]
    tensors[which][100, 0, 7] = bad
    o, lse, dq, dk, dv = edge(*tensors, dlse, documents)
    rows = torch.arange(len(q), device="cuda")
    sees = (rows == 100) if which in (0, 3) else (rows >= 100) & (rows < 1111)
    reached = (rows <= 100) if which in (0, 3) else rows < 1111
    if which == 3:
        assert torch.equal(o, clean[0])
    else:
        assert o[sees, 0].isnan().all() and same((o[~sees], lse[:, ~sees]), (clean[0][~sees], clean[1][:, ~sees]))
    assert dq[sees, 0].isnan().all() and torch.equal(dq[~sees], clean[2][~sees])
    for x, y in ((dk, clean[3]), (dv, clean[4])):
        assert x[reached, 0].isnan().all() and torch.equal(x[~reached], y[~reached])


def test_the_public_call(kernel_calls):
    q, k, v, do, _, documents = make("long", tail=0)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    o = flamia.attention_varlen(*leaves, documents.cu_q, causal=True, recipe=EDGE)
    got = [o.detach(), *torch.autograd.grad(o, leaves, do)]
    assert len(kernel_calls) == 1
    want = run(q.detach(), k.detach(), v.detach(), do, None, documents, recipe=EDGE)
    assert same(got, (want[0], *want[2:]))
    with pytest.raises(flamia.UnsupportedError, match="cu_seqlens_k"):
        flamia.attention_varlen(*leaves, documents.cu_q, cu_seqlens_k=documents.cu_q + 0, causal=True, recipe=EDGE)
    with pytest.raises(flamia.UnsupportedError, match="causal"):
        flamia.attention_varlen(*leaves, documents.cu_q, window=(300, 40), recipe=EDGE)
    batched = [x.detach()[:1024].unflatten(0, (2, 512)) for x in (q, k, v)]
    packed = flamia.attention_varlen(
        *(x.detach()[:1024] for x in (q, k, v)), offsets([512, 512]), causal=True, recipe=EDGE
    )
    assert torch.equal(flamia.attention(*batched, causal=True, recipe=EDGE).flatten(0, 1), packed)


def test_on_peaked_scores_it_is_nearer_to_exact():
    """What it is for: large scores of near tokens, as trained models have. Keys change slowly, and queries look for their own."""
    noise, _, v, do, _ = draw(1111, 1111, (2, 2), 128)
    k = noise.clone().float()
    for i in range(1, len(k)):
        k[i] = 0.98 * k[i - 1] + (1 - 0.98**2) ** 0.5 * noise[i].float()
    q, k, cu = (2 * k).bfloat16(), k.bfloat16(), offsets([len(k)])
    documents, scale = Documents(cu, cu, None, 0), q.shape[-1] ** -0.5
    want = oracle.attention(q, k, v, do, documents.spans(), None, 0, scale, rounding=False)
    near, far = (run(q, k, v, do, None, documents, recipe=recipe) for recipe in (EDGE, Recipe.strict()))
    for name, x, y, z in zip(NAMES, near, far, want):
        if name != "lse":
            print(name, f"{error(x, z):.3f} {error(y, z):.3f}")
            assert error(x, z) < 0.7 * error(y, z)
