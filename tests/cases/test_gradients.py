"""Which gradients come, of what, and how often; and calls with nothing in them.

Origins: flash-attention #906, #889, #1137, #141, #1973, #2102 and #2706, pytorch #136101 (gradients of frozen inputs, a
loss on LSE that contributed nothing); torchtitan #2542, musubi-tuner #1037, flash-attention #1159 and #2776 (zero tokens).
"""

import itertools

import pytest
import torch
from cases.case_inputs import RECIPES, all_same, at, by_route, exact, run, tensors
from helpers import relative, same_bits

import flamia

SUBSETS = list(itertools.product([False, True], repeat=3))


@pytest.mark.parametrize("recipe", ["mxfp8/strict", "mxfp8/fast", "nvfp4/fold", "mxfp8_scores/strict"])
@pytest.mark.parametrize("wanted", SUBSETS, ids=lambda wanted: "".join(n for n, w in zip("qkv", wanted) if w) or "none")
def test_only_the_gradients_asked_for_and_equal_to_the_full_ones(recipe, wanted):
    q, k, v, do = tensors(40)
    full = run(q, k, v, do, recipe=recipe)
    leaves = [x.detach().clone().requires_grad_(want) for x, want in zip((q, k, v), wanted)]
    o = flamia.attention_varlen(*leaves, at(0, 40), causal=True, recipe=recipe)
    assert o.requires_grad == any(wanted)
    if any(wanted):
        o.backward(do)
    for leaf, want, expected in zip(leaves, wanted, full[2:]):
        assert same_bits(leaf.grad, expected) if want else leaf.grad is None


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("tokens", [4, 150])
def test_lse_is_differentiable(recipe, tokens):
    """loss = LSE.sum() alone, then together with a loss on O; against float64."""
    q, k, v, do = tensors(tokens)
    ones = torch.ones(4, tokens)
    bound = by_route(recipe, mxfp8=0.13, nvfp4_fp8=0.35, nvfp4=0.45, bf16=0.02)
    leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    _, lse = flamia.attention_varlen(*leaves, at(0, tokens), causal=True, recipe=recipe, return_lse=True)
    lse.sum().backward()
    truth = exact(q, k, v, torch.zeros_like(do), ones)
    assert relative(leaves[0].grad, truth.dq) < bound and relative(leaves[1].grad, truth.dk) < bound
    assert not leaves[2].grad.any()
    both, truth = run(q, k, v, do, dlse=ones, recipe=recipe), exact(q, k, v, do, ones)
    for name in ("dq", "dk", "dv"):
        assert relative(getattr(both, name), getattr(truth, name)) < bound, name


def test_a_loss_on_lse_of_rows_that_see_nothing():
    q, k, v, do = tensors(4, 2)
    result = run(q, k, v, do, dlse=torch.ones(4, 4))
    assert not result.dq[:2].any() and all(x.isfinite().all() for x in (result.dq, result.dk, result.dv))


@pytest.mark.parametrize("recipe", ["mxfp8/strict", "nvfp4/fast"])
def test_a_graph_can_be_used_twice(recipe):
    leaves = [x.requires_grad_() for x in tensors(40)[:3]]
    o, lse = flamia.attention_varlen(*leaves, at(0, 40), causal=True, recipe=recipe, return_lse=True)
    loss = o.float().square().sum() + lse.sum()
    first = torch.autograd.grad(loss, leaves, retain_graph=True)
    second = torch.autograd.grad(loss, leaves)
    assert all_same(first, second)


def test_gradients_accumulate_like_any_others():
    q, k, v, do = tensors(40)
    once = run(q, k, v, do)
    leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    for _ in range(2):
        flamia.attention_varlen(*leaves, at(0, 40), causal=True).backward(do)
    assert all_same([x.grad for x in leaves], [2 * x for x in once[2:]])


def test_one_tensor_as_query_and_key():
    q, _, v, do = tensors(40, heads=(2, 2))
    apart = run(q, q, v, do)
    both, v = q.detach().clone().requires_grad_(), v.requires_grad_()
    flamia.attention_varlen(both, both, v, at(0, 40), causal=True).backward(do)
    assert same_bits(both.grad, apart.dq + apart.dk) and same_bits(v.grad, apart.dv)


# ---------------------------------------------------------------------------------------------------- nothing to compute


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("cu", [(0,), (0, 0), (0, 0, 0)], ids=str)
def test_zero_tokens(recipe, cu):
    result = run(*tensors(0), at(*cu), recipe=recipe)
    assert [x.shape for x in result] == [(0, 4, 16), (4, 0), (0, 4, 16), (0, 2, 16), (0, 2, 16)]


@pytest.mark.parametrize("shape", [(0, 5), (2, 0), (0, 0)], ids=str)
def test_empty_batches(shape):
    leaves = [torch.zeros(*shape, heads, 16, dtype=torch.bfloat16, requires_grad=True) for heads in (4, 2, 2)]
    o, lse = flamia.attention(*leaves, causal=True, return_lse=True)
    assert o.shape == (*shape, 4, 16) and lse.shape == (shape[0], 4, shape[1])
    (o.sum() + lse.sum()).backward()
    assert [x.grad.shape for x in leaves] == [x.shape for x in leaves]


@pytest.mark.parametrize("recipe", ["mxfp8/strict", "mxfp8/fast", "nvfp4/fold"])
def test_queries_without_keys_and_keys_without_queries(recipe):
    q, k, v, do = tensors(5, 0)
    result = run(q, k, v, do, at(0, 5), cu_seqlens_k=at(0, 0), recipe=recipe)
    assert not result.o.any() and not result.dq.any() and result.lse.isneginf().all() and result.dk.shape == (0, 2, 16)
    q, k, v, do = tensors(0, 5)
    result = run(q, k, v, do, at(0, 0), cu_seqlens_k=at(0, 5), recipe=recipe)
    assert not result.dk.any() and not result.dv.any() and result.dk.shape == (5, 2, 16)
