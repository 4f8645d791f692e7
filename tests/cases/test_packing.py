"""Packed documents: any lengths, empty ones anywhere, a tail of stale rows, and nothing of one in another.

Origins: ms-swift #9723, SkyRL #1828, TransformerEngine #2719 (totals off a grid); flash-attention #2562, #2568, #2421
(empty documents), #1228 and #2324, flash-linear-attention #892 (tails); transformers #46634 and #47170, nanoVLM #204
(documents that saw each other); TransformerEngine #3070, vllm #37564, tilelang #2461 (stale memory in padding).
"""

import pytest
import torch
from cases.case_inputs import RECIPES, all_same, at, claiming, rows, run, tensors
from helpers import offsets
from hypothesis import example, given
from hypothesis import strategies as st

import flamia

MAIN = ["mxfp8/strict", "mxfp8/fast", "mxfp8/fold", "nvfp4/strict", "nvfp4/fast", "mxfp8_scores/strict", "bf16/strict"]


def stand_alone_equal(lengths, recipe, **options):
    given_ = tensors(sum(lengths), heads=(2, 1))
    cu = offsets(lengths)
    whole = run(*given_, cu, recipe=recipe, **options)
    for first, end in zip(cu[:-1].tolist(), cu[1:].tolist()):
        part = slice(first, end)
        alone = run(*(x[part] for x in given_), recipe=recipe, **options)
        assert all_same(rows(whole, part), alone), (lengths, part)


@pytest.mark.parametrize("recipe", MAIN)
def test_totals_off_every_grid(recipe):
    for lengths in ([48], [49], [1, 5, 31, 33], [16, 0, 1, 129], [127, 3]):
        stand_alone_equal(lengths, recipe)


@given(
    st.lists(st.integers(0, 70), min_size=1, max_size=5), st.sampled_from(claiming("document", "offset")), st.booleans()
)
@example([300, 1, 257], "mxfp8/strict", True)
@example([0, 0, 130, 0, 2, 0], "nvfp4/fast", False)
def test_every_document_equals_its_stand_alone_call(lengths, recipe, causal):
    stand_alone_equal(lengths, recipe, causal=causal, window=None if causal else (20, 4))


@pytest.mark.parametrize("recipe", MAIN)
def test_empty_documents_change_nothing(recipe):
    given_ = tensors(7)
    plain = run(*given_, at(0, 3, 7), recipe=recipe)
    for cu in (at(0, 0, 3, 7), at(0, 3, 7, 7), at(0, 0, 3, 7, 7), at(0, 3, 3, 7), at(0, 0, 0, 3, 3, 3, 7, 7, 7)):
        assert all_same(run(*given_, cu, recipe=recipe), plain)


@pytest.mark.parametrize("recipe", MAIN)
@pytest.mark.parametrize("dims", [(16, 16), (256, 256)], ids=str)
def test_keys_without_queries_and_queries_without_keys(recipe, dims):
    q, k, v, do = tensors(9, 12, dims=dims)
    result = run(q, k, v, do, at(0, 0, 5, 9), cu_seqlens_k=at(0, 4, 12, 12), recipe=recipe)  # 0|4, 5|8, 4|0
    assert not result.dk[:4].any() and not result.dv[:4].any()
    assert not result.o[5:].any() and not result.dq[5:].any() and result.lse[:, 5:].isneginf().all()
    middle = run(q[:5], k[4:], v[4:], do[:5], recipe=recipe)
    assert all_same(rows(result, slice(0, 5), slice(4, 12)), middle)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("stale", [torch.nan, torch.inf, 2.0**120])
def test_rows_after_the_last_offset_are_zero_and_never_used(recipe, stale):
    given_ = tensors(10)
    for x in given_:
        x[7:] = stale
    result = run(*given_, at(0, 3, 7), recipe=recipe)
    assert all_same(rows(result, slice(0, 7)), run(*(x[:7] for x in given_), at(0, 3, 7), recipe=recipe))
    for x in (result.o, result.dq, result.dk, result.dv):
        assert torch.equal(x[7:], torch.zeros_like(x[7:]))
    assert result.lse[:, 7:].isneginf().all()


def test_a_buffer_that_holds_no_document_at_all():
    given_ = [x.fill_(torch.nan) for x in tensors(5)]
    for cu in (at(0), at(0, 0), at(0, 0, 0)):
        result = run(*given_, cu)
        assert not any(x.any() for x in (result.o, result.dq, result.dk, result.dv))


@pytest.mark.parametrize("recipe", claiming("document"))
@pytest.mark.parametrize("changed", ["first", "second"])
@pytest.mark.parametrize("value", [3.0, 2.0**20, torch.nan])
def test_a_document_never_notices_another(recipe, changed, value):
    given_ = tensors(6)
    cu = at(0, 3, 6)
    before = run(*given_, cu, recipe=recipe)
    part, other = (slice(0, 3), slice(3, 6)) if changed == "first" else (slice(3, 6), slice(0, 3))
    for x in given_:
        x[part] *= value
    after = run(*given_, cu, recipe=recipe)
    assert all_same(rows(before, other), rows(after, other))
    assert not all_same(rows(before, part), rows(after, part))


@pytest.mark.parametrize("recipe", claiming("document", "offset"))
def test_the_order_of_documents_changes_no_document(recipe):
    lengths, order = [5, 33, 0, 140, 12], [3, 0, 4, 2, 1]
    given_ = tensors(sum(lengths))
    cu = offsets(lengths).tolist()
    spans = [slice(cu[i], cu[i + 1]) for i in range(5)]
    moved = [torch.cat([x[spans[i]] for i in order]) for x in given_]
    before, after = (
        run(*given_, offsets(lengths), recipe=recipe),
        run(*moved, offsets([lengths[i] for i in order]), recipe=recipe),
    )
    first = 0
    for i in order:
        assert all_same(rows(before, spans[i]), rows(after, slice(first, first + lengths[i])))
        first += lengths[i]


@pytest.mark.parametrize("recipe", ["mxfp8/strict", "nvfp4/fast", "bf16/strict"])
@pytest.mark.parametrize("tokens", [1, 31, 33, 127, 129])
def test_stale_memory_changes_nothing(recipe, tokens):
    """Large buffers of NaN are filled and freed first, so that what is allocated but not written shows."""
    given_ = tensors(tokens, heads=(2, 1), dims=(96, 96))
    results = []
    for _ in range(2):
        for size in (64, 2**12, 2**16, 2**20):
            garbage = [
                torch.full((size,), torch.nan, dtype=dtype) for dtype in (torch.bfloat16, torch.float32, torch.float64)
            ]
            del garbage
        results.append(run(*given_, recipe=recipe))
    assert all_same(*results)
    assert all(x.isfinite().all() for x in results[0])


def test_offsets_edited_in_place_give_new_results():
    """A plan cached under the identity of the tensor would be replayed stale."""
    q, k, v, _ = tensors(20)
    cu = at(0, 8, 20)
    first = flamia.attention_varlen(q, k, v, cu, causal=True)
    cu[1] = 13
    second = flamia.attention_varlen(q, k, v, cu, causal=True)
    assert torch.equal(second, flamia.attention_varlen(q, k, v, at(0, 13, 20), causal=True))
    assert not torch.equal(first, second)
    cu[1] = 20  # padded with a repeat: one document and an empty one
    assert torch.equal(
        flamia.attention_varlen(q, k, v, cu, causal=True), flamia.attention_varlen(q, k, v, at(0, 20), causal=True)
    )
