"""Causal, windows and unequal lengths: the mask can be read off O, and the backward has the same one.

Origins: MSLK #263, transformers #39408, vllm #17476, sglang #10940 (a backward without the mask, one token too many,
GQA with a window, the marker of an open side); flash-attention #443, #1778, flashinfer #4452 (rows that see no key).
"""

import pytest
import torch
from cases.case_inputs import RECIPES, all_same, at, by_route, rows, run, tensors
from helpers import same_bits

import flamia

MASKS = [  # causal, window, and what query i of 8 sees
    (False, None, lambda i, j: True),
    (True, None, lambda i, j: j <= i),
    (True, (2, 0), lambda i, j: i - 2 <= j <= i),
    (True, (2, 5), lambda i, j: i - 2 <= j <= i),
    (False, (2, 1), lambda i, j: i - 2 <= j <= i + 1),
    (False, (0, 0), lambda i, j: j == i),
    (True, (0, -1), lambda i, j: j == i),
    (False, (-1, 1), lambda i, j: j <= i + 1),
    (False, (None, 1), lambda i, j: j <= i + 1),
    (False, (1, None), lambda i, j: j >= i - 1),
    (True, (8, 0), lambda i, j: j <= i),
    (False, (7, 7), lambda i, j: True),
]


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("mask", MASKS, ids=lambda mask: f"causal={mask[0]},window={mask[1]}")
def test_one_hot_values_draw_the_mask_and_gradients_have_the_same(recipe, mask):
    causal, window, sees = mask
    visible = torch.tensor([[sees(i, j) for j in range(8)] for i in range(8)])
    q, k, _, _ = tensors(8, dims=(8, 8))
    eye = torch.eye(8, dtype=torch.bfloat16)
    v, do = eye[:, None].expand(8, 2, 8), eye[:, None].expand(8, 4, 8)
    result = run(torch.zeros_like(q), k, v, do, causal=causal, window=window, recipe=recipe)
    weights = visible / visible.sum(1, keepdim=True)
    step = by_route(recipe, mxfp8=2**-4, nvfp4_fp8=2**-4, nvfp4=0.35, bf16=2**-8)
    for head in range(4):
        assert torch.equal(result.o[:, head] != 0, visible)
        assert ((result.o[:, head].float() - weights).abs() <= step * weights).all()
    assert torch.allclose(result.lse, visible.sum(1).float().log().expand(4, 8))
    for head in range(2):  # dV = P^T dO with dO one-hot is P^T, summed over the two query heads of a key head
        assert torch.equal(result.dv[:, head] != 0, visible.t())
        assert ((result.dv[:, head].float() - 2 * weights.t()).abs() <= 2 * step * weights.t()).all()


@pytest.mark.parametrize("recipe", ["mxfp8/strict", "mxfp8/fast", "nvfp4_fp8/fold", "bf16/strict"])
@pytest.mark.parametrize("heads", [(1, 1), (4, 2), (6, 1)], ids=str)
def test_no_gradient_reaches_what_no_query_with_a_gradient_sees(recipe, heads):
    """dO only in rows 100 to 103: under a window of 20 back, dK and dV of other keys are exactly zero."""
    q, k, v, do = tensors(160, heads=heads)
    do[:100] = do[104:] = 0
    for causal, window, seen in ((True, (20, 0), (80, 104)), (True, None, (0, 104)), (False, (3, 4), (97, 108))):
        result = run(q, k, v, do, causal=causal, window=window, recipe=recipe)
        for x in (result.dk, result.dv):
            inside = torch.zeros(160, dtype=torch.bool)
            inside[slice(*seen)] = True
            assert not x[~inside].any() and x[inside].any(-1).all()
        assert not result.dq[:100].any() and not result.dq[104:].any()


@pytest.mark.parametrize("recipe", ["mxfp8/strict", "mxfp8/fold", "nvfp4/fast", "bf16/strict"])
def test_a_window_as_long_as_the_document_is_no_window(recipe):
    given = tensors(150)
    plain = run(*given, recipe="bf16/strict")
    for window in ((149, 0), (150, 0), (10**6, 0), (-1, 0), (None, None)):
        assert all_same(run(*given, window=window, recipe="bf16/strict"), plain)
    open_side = run(*given, recipe=recipe)
    for window in ((-1, -1), (None, 0), (-1, 17)):
        assert all_same(run(*given, window=window, recipe=recipe), open_side)
    # a window that could end inside a block decides which pairs are full, so it may round otherwise, by positions alone
    assert torch.allclose(run(*given, window=(149, 0), recipe=recipe).o.float(), open_side.o.float(), atol=0.25)


@pytest.mark.parametrize("recipe", ["mxfp8/strict", "nvfp4_fp8/strict", "mxfp8_scores/strict", "bf16/strict"])
def test_windows_stop_at_the_edges_of_documents(recipe):
    given = tensors(12)
    result = run(*given, at(0, 5, 12), window=(3, 0), recipe=recipe)
    assert all_same(rows(result, slice(5, 12)), run(*(x[5:] for x in given), window=(3, 0), recipe=recipe))


# ---------------------------------------------------------------------------------- unequal numbers of queries and keys


@pytest.mark.parametrize("recipe", RECIPES)
def test_more_queries_than_keys(recipe):
    """Bottom-right: of 4 queries and 1 key, only the last query sees the key."""
    q, k, v, do = tensors(4, 1, dims=(16, 16))
    dlse = torch.ones(4, 4)
    result = run(q, k, v, do, dlse=dlse, recipe=recipe)
    assert not result.o[:3].any() and not result.dq[:3].any() and result.lse[:, :3].isneginf().all()
    alone = run(q[3:], k, v, do[3:], dlse=dlse[:, 3:], recipe=recipe)
    assert all_same(rows(result, slice(3, 4), slice(0, 1)), alone)
    if recipe.split("/")[0] != "nvfp4":  # an E4M3 value of a group of one token is near, of 16 bits it is the same
        assert torch.allclose(result.o[3].float(), v[0].repeat_interleave(2, 0).float(), rtol=2**-4, atol=2**-5)


@pytest.mark.parametrize("recipe", ["mxfp8/strict", "nvfp4/strict", "mxfp8_scores/strict", "bf16/strict"])
def test_the_last_queries_of_a_document_alone_against_its_keys(recipe):
    q, k, v, do = tensors(200)
    whole = run(q, k, v, do, window=(150, 0), recipe=recipe)
    last = run(q[170:], k, v, do[170:], window=(150, 0), recipe=recipe)
    assert same_bits(last.o, whole.o[170:]) and same_bits(last.dq, whole.dq[170:])
    assert same_bits(last.lse, whole.lse[:, 170:].contiguous())


def test_merging_chunks_by_lse_ignores_empty_rows():
    """Keys in two chunks, of which the first rows see one only: exp(-inf) adds nothing, and no NaN appears."""
    q, k, v, _ = tensors(6, 8, heads=(2, 2))
    whole = flamia.attention(q[None], k[None], v[None], causal=True, recipe="bf16")[0]
    chunks = []
    for keys, right in ((slice(0, 5), 3), (slice(5, 8), 0)):  # query i of 6 sees key j of 8 when j <= i + 2
        o, lse = flamia.attention(
            q[None], k[None, keys], v[None, keys], window=(-1, right), recipe="bf16", return_lse=True
        )
        chunks.append((o[0].float(), lse[0]))
    (o1, l1), (o2, l2) = chunks
    assert l2[:, :3].isneginf().all() and not o2[:3].any()
    total = torch.logaddexp(l1, l2)
    merged = o1 * (l1 - total).exp().t()[..., None] + o2 * (l2 - total).exp().t()[..., None]
    assert torch.allclose(merged, whole.float(), atol=2**-6)
