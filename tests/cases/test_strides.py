"""Views in, the bits of contiguous copies out; contiguous tensors out, whatever came in.

Origins: flash-attention #355, #325, #2611, pytorch #146377, FBGEMM #2919, SageAttention #386, NATTEN #347 (an expanded
gradient refused or misread, sliced keys, strides of the input used for the output, 32-bit offsets that wrap).
"""

import pytest
import torch
from cases.case_inputs import all_same, at, run, tensors

import flamia

SOME = ["mxfp8/strict", "mxfp8/fast", "nvfp4/strict", "bf16/strict"]
CU = at(0, 2, 6)


def fused(q, k, v, do):
    """q, k, v as slices of one projection's output, (T, (Hq + 2 Hk) D)."""
    buffer = torch.cat([x.flatten(1) for x in (q, k, v)], 1)
    parts = buffer.split([x[0].numel() for x in (q, k, v)], 1)
    return [part.unflatten(1, x.shape[1:]) for part, x in zip(parts, (q, k, v))] + [do]


def heads_first(*given):
    """Memory (H, T, D), seen as (T, H, D)."""
    return [x.transpose(0, 1).contiguous().transpose(0, 1) for x in given]


def features_apart(*given):
    """A stride of 2 between features."""
    return [torch.stack([x, torch.full_like(x, torch.nan)], -1)[..., 0] for x in given]


def every_other_row(*given):
    return [torch.stack([x, torch.full_like(x, torch.nan)], 1).flatten(0, 1)[::2] for x in given]


def offset_by_one(*given):
    """Contiguous, but starting in the middle of a buffer, off any alignment."""
    return [torch.cat([x.new_full((1,), torch.nan), x.flatten()])[1:].view_as(x) for x in given]


def wider_gradient(q, k, v, do):
    """dO as a slice of a concatenation's gradient."""
    return [q, k, v, torch.cat([torch.full_like(do, torch.nan), do], -1)[..., do.shape[-1] :]]


VIEWS = [fused, heads_first, features_apart, every_other_row, offset_by_one, wider_gradient]


@pytest.mark.parametrize("recipe", SOME)
@pytest.mark.parametrize("view", VIEWS, ids=lambda view: view.__name__)
def test_views_give_the_bits_of_copies(recipe, view):
    given = tensors(6, dims=(8, 8))
    views = view(*given)
    assert all(torch.equal(x, y) for x, y in zip(views, given))
    if view is not offset_by_one:
        assert not all(x.is_contiguous() for x in views)
    before = [x.clone() for x in views]
    result = run(*views, CU, recipe=recipe)
    assert all_same(result, run(*given, CU, recipe=recipe))
    assert all(x.is_contiguous() for x in result)
    assert all(torch.equal(x, y) for x, y in zip(views, before))  # nothing is written into what was lent


@pytest.mark.parametrize("recipe", SOME)
def test_expanded_inputs(recipe):
    """One key head seen as two, one query for all rows."""
    q, k, v, do = tensors(6, dims=(8, 8))
    views = [q[:1].expand(6, -1, -1), k[:, :1].expand(-1, 2, -1), v[:, :1].expand(-1, 2, -1), do]
    assert all_same(run(*views, CU, recipe=recipe), run(*(x.contiguous() for x in views), CU, recipe=recipe))


@pytest.mark.parametrize("recipe", SOME)
def test_gradients_of_sums_are_expanded_and_read_right(recipe):
    """sum() hands back a gradient with strides of 0."""
    q, k, v, _ = tensors(6, dims=(8, 8))
    expected = run(q, k, v, torch.ones(6, 4, 8, dtype=q.dtype), CU, recipe=recipe)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    flamia.attention_varlen(*leaves, CU, causal=True, recipe=recipe).sum().backward()
    assert all_same([x.grad for x in leaves], expected[2:])


def test_batched_views():
    """(B, H, T, D) memory, as projections leave it, seen as (B, T, H, D); forward and backward."""
    given = [x.view(2, 3, *x.shape[1:]) for x in tensors(6, dims=(8, 8))]
    results = []
    for variant in (given, [x.transpose(1, 2).contiguous().transpose(1, 2) for x in given]):
        leaves = [x.detach().requires_grad_() for x in variant[:3]]
        o, lse = flamia.attention(*leaves, causal=True, return_lse=True)
        results.append([o.detach(), lse.detach(), *torch.autograd.grad(o, leaves, variant[3])])
    assert all_same(*results)


def test_offsets_that_are_a_view():
    given = tensors(6, dims=(8, 8))
    cu = torch.tensor([0, 9, 2, 9, 6], dtype=torch.int32)[::2]
    assert not cu.is_contiguous()
    assert all_same(run(*given, cu), run(*given, CU))


def test_strides_beyond_two_to_the_thirty():
    """Three rows of a buffer of 4 GiB that is reserved and never touched: index * stride passes 2^31."""
    given = tensors(3, heads=(1, 1), dims=(8, 8))
    stride = 2**30 + 8
    try:
        buffer = torch.empty(2 * stride + 8, dtype=torch.bfloat16)
    except RuntimeError:
        pytest.skip("cannot reserve 4 GiB of address space")
    far = buffer.as_strided((3, 1, 8), (stride, 8, 1))
    far.copy_(given[1])
    assert all_same(run(given[0], far, *given[2:]), run(*given))
