"""The Hopper kernels against an independent oracle that rounds as the route does, and the contract, bit for bit."""

from __future__ import annotations

import math

import pytest
import torch

if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
    pytest.skip("needs an NVIDIA Hopper GPU", allow_module_level=True)

import oracle

from flamia import hopper
from flamia.packing import Documents
from flamia.recipe import Recipe

RECIPE = Recipe.strict("mxfp8_scores")
NAMES = ("o", "lse", "dq", "dk", "dv")

# lengths of queries (and of keys, where they differ), heads, D, (left, right)
CASES = {
    "one": ([300], None, (2, 2), 128, (None, 0)),
    "short": ([1, 0, 5, 64, 127, 0, 128, 129, 3], None, (2, 1), 128, (None, 0)),
    "long": ([1111, 900], None, (2, 2), 128, (None, 0)),
    "open": ([300, 77, 513], None, (2, 2), 128, (None, None)),
    "grouped": ([257, 400], None, (8, 2), 128, (None, 0)),
    "many heads on one": ([257, 130], None, (4, 1), 64, (None, 0)),
    "small heads": ([700, 31, 200], None, (4, 4), 64, (None, 0)),
    "window": ([900, 50, 300], None, (2, 1), 128, (200, 0)),
    "two-sided window": ([700, 300], None, (2, 2), 128, (130, 40)),
    "narrow window": ([500], None, (2, 2), 64, (3, 0)),
    "future window": ([500, 20], None, (2, 2), 128, (None, 100)),
    "more keys": ([100, 1, 300], [500, 129, 300], (2, 1), 128, (None, 0)),
    "more queries": ([500, 129], [100, 129], (2, 1), 128, (None, 0)),
    "more queries, window": ([500, 129, 40], [100, 0, 333], (2, 2), 64, (60, 20)),
}


def offsets(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0).to(torch.int32).cuda()


def make(case: str, tail: int = 13, seed: int = 0):
    lq, lk, (hq, hk), d, window = CASES[case]
    torch.manual_seed(seed)
    documents = Documents(offsets(lq), offsets(lk or lq), *window)
    tq, tk = sum(lq) + tail, sum(lk or lq) + tail
    q, k, v, do = (
        torch.randn(t, h, d, device="cuda", dtype=torch.bfloat16) for t, h in ((tq, hq), (tk, hk), (tk, hk), (tq, hq))
    )
    v = v + 0.5
    return q, k, v, do, torch.randn(hq, tq, device="cuda"), documents


def run(q, k, v, do, dlse, documents, scale=None):
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    o, lse, residual, saved = hopper.forward_saving(q, k, v, documents, RECIPE, scale)
    grads = hopper.backward(do, dlse, q, k, v, o, lse, residual, documents, RECIPE, scale, saved=saved)
    return o, lse, *grads


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    return ((got.double() - want).norm() / want.norm().clamp_min(1e-30)).item()


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


def test_rows_outside_documents_are_zero():
    q, k, v, do, dlse, documents = make("short", tail=200)
    end = documents.cu_q[-1]
    o, lse, *grads = run(q, k, v, do, dlse, documents)
    assert all(not x[end:].any() for x in (o, *grads))
    assert (lse[:, end:] == -torch.inf).all()


@pytest.mark.parametrize("case", ["short", "grouped", "window", "more keys"])
def test_alone_equals_packed(case):
    """Every document gives the same bits alone, at offset zero, as in the pack; and so does a second run."""
    q, k, v, do, dlse, documents = make(case)
    packed = run(q, k, v, do, dlse, documents)
    for a, b in zip(packed, run(q, k, v, do, dlse, documents)):
        assert torch.equal(a, b)
    for q0, q1, k0, k1 in documents.spans():
        if q0 == q1 or k0 == k1:
            continue
        alone = Documents(offsets([q1 - q0]), offsets([k1 - k0]), documents.left, documents.right)
        rows = run(q[q0:q1], k[k0:k1], v[k0:k1], do[q0:q1], dlse[:, q0:q1], alone)
        o, lse, dq, dk, dv = packed
        for name, a, b in zip(NAMES, rows, (o[q0:q1], lse[:, q0:q1], dq[q0:q1], dk[k0:k1], dv[k0:k1])):
            assert torch.equal(a, b), name


def test_prefix_and_truncation():
    """Changing or cutting what comes after a position leaves O and dQ up to it alone."""
    q, k, v, do, dlse, documents = make("long", tail=0)
    whole = run(q, k, v, do, dlse, documents)
    for cut in (1, 100, 128, 391, 640):
        other = [x.clone() for x in (q, k, v, do)]
        for x in other:
            x[cut:1111] = torch.randn_like(x[cut:1111]) * 2.0**20
        changed = run(*other, dlse, documents)
        alone = Documents(offsets([cut]), offsets([cut]), None, 0)
        short = run(*(x[:cut] for x in (q, k, v, do)), dlse[:, :cut], alone)
        for got in (changed, short):
            assert torch.equal(got[0][:cut], whole[0][:cut])
            assert torch.equal(got[1][:, :cut], whole[1][:, :cut])
            assert torch.equal(got[2][:cut], whole[2][:cut])


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


def test_masses():
    """V = 1 gives O = 1; dO = 1 gives dV that sums to the number of queries: no bias that grows with the row."""
    t = 16384
    cu = offsets([t])
    documents = Documents(cu, cu, None, 0)
    torch.manual_seed(0)
    q, k = (torch.randn(t, 1, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    ones = torch.ones_like(q)
    o, _, _, _, dv = run(q, k, ones, ones, None, documents)
    assert (o.float() - 1).abs().max() <= 2**-8
    assert abs(dv.double().sum().item() / (t * 128) - 1) < 2**-10


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
            assert error(g, w) < 8e-3 or not w.any(), name


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


def test_corrupted_offsets_touch_nothing_outside():
    q, k, v, do, dlse, _ = make("one", tail=0)
    cu = torch.tensor([5, -3, 10_000_000, 7, 2**31 - 1, -(2**31)], dtype=torch.int32, device="cuda")
    run(q, k, v, do, dlse, Documents(cu, cu, None, 0))
    torch.cuda.synchronize()
