"""The Hopper kernels against an independent oracle that rounds as the route does, and what may be done to their arguments
without changing a bit. The contract is in test_contract.py, sums over long rows in test_sums.py, codes in test_codes.py."""

from __future__ import annotations

import math

import pytest
import torch

if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
    pytest.skip("needs an NVIDIA Hopper GPU", allow_module_level=True)

import oracle
from calls import CASES, NAMES, RECIPE, error, make, offsets, run, same

from flamia import hopper
from flamia.codes import encode_tokens
from flamia.packing import Documents


@pytest.mark.parametrize("with_dlse", [False, True], ids=["", "dlse"])
@pytest.mark.parametrize("case", CASES)
def test_against_the_oracle(case, with_dlse):
    """Tight: what is left is BF16 rounding of the results and, in a few weights, of a number that fell on the other side."""
    q, k, v, do, dlse, documents = make(case)
    dlse = dlse if with_dlse else None
    got = run(q, k, v, do, dlse, documents)
    want = oracle.attention(q, k, v, do, documents.spans(), documents.left, documents.right, q.shape[-1] ** -0.5, dlse)
    alive = want[1] > -torch.inf
    assert torch.equal(got[1] > -torch.inf, alive)
    assert (got[1].double() - want[1])[alive].abs().max() < 2e-3  # the 8-bit accumulator of the card holds some 14 bits
    report = {name: error(g, w) for name, g, w in zip(NAMES, got, want) if name != "lse"}
    print(case, {name: f"{e:.1e}" for name, e in report.items()})
    assert max(report.values()) < 3e-3, report


@pytest.mark.parametrize("which", ["q", "k", "both"])
@pytest.mark.parametrize("case", ["long", "open", "grouped", "window", "small heads"])
def test_scales_that_differ(case, which):
    """A group of 32 tokens mostly has one scale, and then the kernels multiply by one number. Here every 40th token is
    32 times as large (another scale), or a 32th of it, so that most groups go the general way; whole zeros agree with any."""
    q, k, v, do, dlse, documents = make(case)
    for x in (q, k) if which == "both" else ({"q": q, "k": k}[which],):
        x[::40] /= 32
        x[7::160] *= 4
        x[64:96] = 0
        x[5] = 0
    got = run(q, k, v, do, dlse, documents)
    want = oracle.attention(q, k, v, do, documents.spans(), documents.left, documents.right, q.shape[-1] ** -0.5, dlse)
    report = {name: error(g, w) for name, g, w in zip(NAMES, got, want) if name != "lse"}
    print(case, which, {name: f"{e:.1e}" for name, e in report.items()})
    assert max(report.values()) < 4e-3, report


@pytest.mark.parametrize("case", ["long", "grouped", "small heads", "window", "open"])
def test_one_factor_or_many_give_the_same_bits(case):
    """One key in 32 has a score so low that its weight is exactly zero everywhere. Whether it has its neighbours' scale, so
    that they go the fast way, or another, so that they go the general one, must not show in anything."""
    q, k, v, do, dlse, documents = make(case)
    q[..., 0], k[..., 0], k[..., 1] = 64, 0, 4
    lone = torch.arange(len(k), device="cuda") % 32 == 5
    k[lone] = 0
    results = []
    for size, scales in ((28, 1), (112, 2)):
        k[lone, :, 0] = -size
        assert len(encode_tokens(k, "e4m3:coarse")[1].unique()) == scales
        results.append(run(q, k, v, do, dlse, documents))
    assert same(*results)
    assert not any(results[0][i][lone].any() for i in (3, 4))


def test_a_token_of_another_scale_does_not_show_before_it():
    q, k, v, do, dlse, documents = make("long", tail=0)
    plain = run(q, k, v, do, dlse, documents)
    k[600] *= 64  # rows from 640 on see its block whole; those of its own block share a step with it
    other = run(q, k, v, do, dlse, documents)
    assert torch.equal(plain[0][:600], other[0][:600]) and torch.equal(plain[2][:600], other[2][:600])
    assert not torch.equal(plain[0][640:1111], other[0][640:1111])


def test_rows_outside_documents_are_zero():
    q, k, v, do, dlse, documents = make("short", tail=200)
    end = documents.cu_q[-1]
    o, lse, *grads = run(q, k, v, do, dlse, documents)
    assert all(not x[end:].any() for x in (o, *grads))
    assert (lse[:, end:] == -torch.inf).all()


@pytest.mark.parametrize("which", range(4), ids=["q", "k", "v", "do"])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("case", ["short", "window", "long"])
def test_not_finite_tokens_stay_where_they_are(case, which, bad):
    """Rows that see the token are NaN, every other row keeps its bits: O, dQ, and dK and dV through what sees them."""
    q, k, v, do, dlse, documents = make(case)
    clean = run(q, k, v, do, dlse, documents)
    tensors = [x.clone() for x in (q, k, v, do)]
    start = documents.spans()[-3 if case == "short" else 0][0]
    t = start + 100
    tensors[which][t, 0, 7] = bad
    got = run(*tensors, dlse, documents)
    rows = torch.arange(q.shape[0], device="cuda")
    doc, position = documents.positions("q", q.shape[0])
    same = doc == doc[t]
    sees = same & (position >= position[t])
    if documents.left is not None:
        sees &= position <= position[t] + documents.left
    if which in (0, 3):
        sees = rows == t
    o, lse, dq, dk, dv = got
    if which != 3:
        assert o[sees, 0].isnan().all()
        assert torch.equal(o[~sees], clean[0][~sees])
        assert torch.equal(lse[:, ~sees], clean[1][:, ~sees])
    else:
        assert torch.equal(o, clean[0])
    assert dq[sees, 0].isnan().all()
    assert torch.equal(dq[~sees], clean[2][~sees])
    reached = same & (position <= position[sees].max())
    if documents.left is not None:
        reached &= position >= position[sees].min() - documents.left
    for got_kv, clean_kv in ((dk, clean[3]), (dv, clean[4])):
        assert torch.equal(got_kv[~reached], clean_kv[~reached])
        assert got_kv[reached, 0].isnan().all()


def test_a_query_that_is_not_finite_and_sees_no_key():
    """O is zero and LSE -inf there, whether its block has rows that see keys or not."""
    q, k, v, do, dlse, documents = make("more queries")  # of 500 rows the first 400 see none of 100 keys
    clean = run(q, k, v, do, dlse, documents)
    assert (clean[1][:, :400] == -torch.inf).all() and clean[1][:, 400:500].isfinite().all()
    for row in (0, 383, 384, 399):  # the last two share a block with rows that do
        q[row, 0, 7] = torch.nan
    assert all(torch.equal(a, b) for a, b in zip(run(q, k, v, do, dlse, documents), clean))


def test_strided_inputs_and_expanded_gradients():
    q, k, v, do, dlse, documents = make("one", tail=0)
    plain = run(q, k, v, do, dlse, documents)
    fused = torch.stack([q, k, v], 1)
    views = run(fused[:, 0], fused[:, 1], fused[:, 2], do, dlse, documents)
    assert all(torch.equal(a, b) for a, b in zip(plain, views))
    wide = [torch.randn(q.shape[0], 2, 131, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
    for w, x in zip(wide, (q, k, v)):
        w[..., 2:130] = x
    views = run(*(w[..., 2:130] for w in wide), do, dlse, documents)
    assert all(torch.equal(a, b) for a, b in zip(plain, views))
    heads_first = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in (q, k, v)]
    assert all(torch.equal(a, b) for a, b in zip(plain, run(*heads_first, do, dlse, documents)))
    repeated = [x[:1].expand_as(x) for x in (q, k, v, do)]  # every token the same: a stride of zero
    assert all(
        torch.equal(a, b)
        for a, b in zip(run(*repeated, dlse, documents), run(*(x.clone() for x in repeated), dlse, documents))
    )
    g = torch.ones((), device="cuda", dtype=torch.bfloat16)
    expanded = run(q, k, v, g.expand(q.shape), dlse, documents)
    assert all(torch.equal(a, b) for a, b in zip(run(q, k, v, torch.ones_like(q), dlse, documents), expanded))


def test_nothing_saved_and_nothing_wanted():
    """The backward encodes again to the same bits, and each pass computes the same without the other."""
    q, k, v, do, dlse, documents = make("grouped")
    scale = q.shape[-1] ** -0.5
    o, lse, residual, saved = hopper.forward_saving(q, k, v, documents, RECIPE, scale)
    arguments = (do, dlse, q, k, v, o, lse, residual, documents, RECIPE, scale)
    whole = hopper.backward(*arguments, saved=saved)
    for a, b in zip(whole, hopper.backward(*arguments)):
        assert torch.equal(a, b)
    assert torch.equal(whole[0], hopper.backward(*arguments, saved=saved, wanted=(True, False, False))[0])
    for a, b in zip(whole[1:], hopper.backward(*arguments, saved=saved, wanted=(False, True, True))[1:]):
        assert torch.equal(a, b)


def test_scale_of_any_sign():
    q, k, v, do, dlse, documents = make("one", tail=0)
    for scale in (-0.1, 0.0, 1.0):
        got = run(q, k, v, do, dlse, documents, scale=scale)
        want = oracle.attention(q, k, v, do, documents.spans(), None, 0, scale, dlse)
        for name, g, w in zip(NAMES, got, want):
            assert error(g, w) < 2e-2 or not w.any(), name  # at 1.0 weights are peaked, and few numbers decide


def test_graph_replay_with_other_offsets():
    """Nothing depends on the host: a captured call computes whatever `cu_seqlens` holds when it is replayed."""
    q, k, v, do, dlse, _ = make("one", tail=0)
    cu = offsets([300, 0, 0, 0])
    documents = Documents(cu, cu, None, 0)
    run(q, k, v, do, dlse, documents)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run(q, k, v, do, dlse, documents)
    for lengths in ([300, 0, 0, 0], [1, 100, 130, 69], [0, 0, 250, 0]):
        cu.copy_(offsets(lengths))
        graph.replay()
        want = run(q, k, v, do, dlse, Documents(offsets(lengths), offsets(lengths), None, 0))
        for a, b in zip(captured, want):
            assert torch.equal(a, b)


def test_a_second_backward_over_one_forward():
    """What the forward saved is only read: the second backward finds it as the first one did."""
    q, k, v, do, dlse, documents = make("short")
    o, lse, residual, saved = hopper.forward_saving(q, k, v, documents, RECIPE, 0.1)
    kept = saved.clone()
    arguments = (do, dlse, q, k, None, o, lse, residual, documents, RECIPE, 0.1)
    first, second = (hopper.backward(*arguments, saved=saved) for _ in range(2))
    assert torch.equal(saved, kept)
    assert all(torch.equal(a, b) for a, b in zip(first, second))
    moved = torch.empty(saved.numel() + 4, dtype=torch.uint8, device="cuda")[4:].copy_(saved)  # where TMA cannot read
    assert all(torch.equal(a, b) for a, b in zip(first, hopper.backward(*arguments, saved=moved)))


def test_corrupted_offsets_touch_nothing_outside():
    q, k, v, do, dlse, _ = make("one", tail=0)
    cu = torch.tensor([5, -3, 10_000_000, 7, 2**31 - 1, -(2**31)], dtype=torch.int32, device="cuda")
    run(q, k, v, do, dlse, Documents(cu, cu, None, 0))
    torch.cuda.synchronize()
