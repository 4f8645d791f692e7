"""What documents and windows are read from transformers' masks, against the dense masks that it builds for itself."""

import types

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from integrations.hf import config, model, positions, registered, tokens
from transformers import DynamicCache, StaticCache
from transformers.masking_utils import (
    create_bidirectional_mask,
    create_causal_mask,
    create_chunked_causal_mask,
    create_sliding_window_causal_mask,
)

from flamia import UnsupportedError
from flamia.integrations import transformers as integration
from flamia.packing import Documents

NAME = registered("bf16")


def configured(name, window=None, **options):
    options = {"sliding_window": window} if window else options
    made = config("sliding" if window else "llama", **options)
    made._attn_implementation = name
    return made


def both(window, batch, length, padding=None, cache=None, position_ids=None):
    """transformers' mask (batch, 1, queries, keys) as bools, and ours."""
    create = create_sliding_window_causal_mask if window else create_causal_mask
    embeds = torch.zeros(batch, length, 64)
    arguments = {"position_ids": position_ids} if position_ids is not None else {}
    dense = create(configured("eager", window), embeds, padding, cache, **arguments)
    return dense == 0, create(configured(NAME, window), embeds, padding, cache, **arguments)


def visible(cu_q, cu_k, window, batch, queries, keys):
    """The dense mask of documents in a flattened batch, row by row."""
    left = None if window is None else window - 1
    seen = torch.zeros(batch * queries, batch * keys, dtype=torch.bool)
    documents = Documents(cu_q, cu_k, left, 0)
    for a, b, c, d in documents.spans():
        seen[a:b, c:d] = documents.visible(torch.arange(b - a) + (d - c) - (b - a), torch.arange(d - c))
    return torch.stack(
        [seen[i * queries : (i + 1) * queries, i * keys : (i + 1) * keys] for i in range(batch)]
    ), seen.sum()


def agree(dense, bits, window, queries, positions=None, real=None, most=None):
    batch, _, _, keys = dense.shape
    cu_q, cu_k = integration.documents(bits, positions, queries, most)
    mine, total = visible(cu_q, cu_k, window, batch, queries, keys)
    assert mine.sum() == total  # nobody sees another row of the batch
    real = torch.ones(batch, queries, dtype=torch.bool) if real is None else real
    assert torch.equal(mine[real], dense[:, 0][real])


@settings(max_examples=60)
@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=6),
    first=st.integers(0, 3),
    window=st.sampled_from([None, 1, 2, 4, 30]),
    batch=st.integers(1, 2),
    told=st.booleans(),
    bounded=st.booleans(),
)
def test_packed_positions(lengths, first, window, batch, told, bounded):
    """Whether or not the attention is told the positions too: not every model passes them on."""
    where = (positions(*lengths) + first).expand(batch, -1)
    dense, bits = both(window, batch, sum(lengths), position_ids=where)
    most = batch * sum(lengths) if bounded else None
    agree(dense, bits, window, sum(lengths), where if told else None, most=most)


@settings(max_examples=60)
@given(
    pads=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=1, max_size=3),
    length=st.integers(11, 16),
    window=st.sampled_from([None, 1, 3, 30]),
)
def test_padding(pads, length, window):
    padding = torch.ones(len(pads), length, dtype=torch.bool)
    for row, (left, right) in zip(padding, pads, strict=True):
        row[:left] = False
        row[length - right :] = False
    dense, bits = both(window, len(pads), length, padding)
    agree(dense, bits, window, length, real=padding)


@settings(max_examples=60)
@given(
    chunks=st.lists(st.integers(1, 7), min_size=1, max_size=5),
    left=st.integers(0, 4),
    window=st.sampled_from([None, 2, 5, 30]),
    static=st.booleans(),
    told=st.booleans(),
)
def test_caches(chunks, left, window, static, told):
    """Prefill, chunks and single tokens against a cache, which may hold room that is not yet filled."""
    made = configured(NAME, window)
    cache = StaticCache(made, max_cache_len=sum(chunks) + 3) if static else DynamicCache(config=made)
    done = 0
    for chunk in chunks:
        padding = torch.ones(2, done + chunk, dtype=torch.bool)
        padding[1, :left] = False
        dense, bits = both(window, 2, chunk, padding if told else None, cache)
        real = padding[:, done:] if told else None
        where = torch.arange(done, done + chunk)[None] if told else None
        agree(dense, bits, window, chunk, where, real=real)
        keys, _ = cache.update(*(torch.zeros(2, 2, chunk, 16) for _ in range(2)), 0)
        assert keys.shape[2] == bits.shape[-1]
        done += chunk


def test_positions_are_read_again_when_they_change_in_place():
    where = positions(10, 20)
    _, bits = both(None, 1, 30, cache=DynamicCache(config=configured(NAME)))
    assert integration.documents(bits, where, 30, None)[0].tolist() == [0, 10, 30]
    where.copy_(positions(15, 15))
    assert integration.documents(bits, where, 30, None)[0].tolist() == [0, 15, 30]
    assert integration.documents(bits, where, 30, 3)[0].tolist() == [0, 15, 30, 30]
    assert integration.documents(bits, None, 30, None)[0].tolist() == [0, 30]


def test_offsets_are_made_once_for_all_layers(monkeypatch):
    calls = []
    make = integration._documents
    monkeypatch.setattr(integration, "_documents", lambda *args: calls.append(1) or make(*args))
    with torch.no_grad():
        model("llama", NAME)(tokens(1, 30), position_ids=positions(10, 20))
    assert len(calls) == 1
    with torch.inference_mode():  # whose tensors count no changes: every layer reads them again
        llama = model("llama", NAME)
        llama(tokens(1, 30), position_ids=positions(10, 20))
    assert len(calls) == 1 + llama.config.num_hidden_layers > 2


# --------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize("cached", [False, True])
def test_overlays_are_refused(cached):
    embeds, where = torch.zeros(1, 12, 64), positions(5, 7)
    made = configured(NAME)
    cache = DynamicCache(config=made) if cached else None
    image = torch.full((1, 12), -1)
    image[:, 6:9] = 0
    overlay = {"or_mask_function": lambda b, h, q, k: k == 0}, {"and_mask_function": lambda b, h, q, k: k >= 0}
    for options, words in (
        (overlay[0], "own mask"),
        (overlay[1], "own mask"),
        ({"block_sequence_ids": image}, "causal"),
    ):
        with pytest.raises(UnsupportedError, match=words):
            create_causal_mask(made, embeds, None, cache, position_ids=where, **options)


def test_chunks_are_documents_and_refused_where_a_cache_has_lost_their_beginning():
    for window in (None, 5):
        made, eager = configured(NAME, window), configured("eager", window)
        made.attention_chunk_size = eager.attention_chunk_size = 5
        padding = torch.ones(2, 12, dtype=torch.bool)
        padding[1, :3] = False
        embeds = torch.zeros(2, 12, 64)
        bits = create_chunked_causal_mask(made, embeds, padding, None)
        agree(create_chunked_causal_mask(eager, embeds, padding, None) == 0, bits, window, 12, real=padding)
        cache = DynamicCache()
        cache.update(*(torch.zeros(1, 2, 7, 16) for _ in range(2)), 0)
        with pytest.raises(UnsupportedError, match="not causal attention with documents and a window"):
            create_chunked_causal_mask(made, embeds[:1, :2], None, cache)


def test_both_sides_are_refused():
    with pytest.raises(UnsupportedError, match="not causal"):
        create_bidirectional_mask(configured(NAME), torch.zeros(1, 12, 64), None)


@pytest.mark.parametrize(
    "odd",
    [
        lambda q, k: (k <= q) & (k > q - 7),  # a wider window
        lambda q, k: (k <= q) & (k > q - 3),  # a narrower one
        lambda q, k: (k <= q) & (k > q - 5) & ((k < q) | (q == 0)),  # all but itself
        lambda q, k: (k <= q + 1) & (k > q - 5),
        lambda q, k: (q - k).abs() < 5,
    ],
)
def test_every_edge_of_a_mask_is_looked_at(odd):
    arguments = {"q_length": 12, "local_size": 5, "config": types.SimpleNamespace(sliding_window=5)}
    integration.mask(1, 12, lambda b, h, q, k: (k <= q) & (k > q - 5), **arguments)
    with pytest.raises(UnsupportedError, match="not causal attention with documents and a window"):
        integration.mask(1, 12, lambda b, h, q, k: odd(q, k), **arguments)


def layer(**options):
    return types.SimpleNamespace(is_causal=True, config=types.SimpleNamespace(sliding_window=5), **options)


def heads(length=12):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, h, length, 16, generator=generator).bfloat16() for h in (4, 2, 2)]


def attend(module, mask, *qkv, **options):
    return integration._interfaces()[0]._global_mapping[NAME](module, *qkv, mask, **options)[0]


def test_a_window_that_mask_and_layer_do_not_share_is_refused():
    full, windowed = both(None, 1, 12)[1], both(5, 1, 12)[1]
    with pytest.raises(UnsupportedError, match="sliding_window is 5 but its mask has no window"):
        attend(layer(), full, *heads(), sliding_window=5)
    told, untold = attend(layer(), windowed, *heads(), sliding_window=5), attend(layer(), windowed, *heads())
    assert torch.equal(told, untold) and not torch.equal(told, attend(layer(), full, *heads()))
    without = layer()
    without.config = types.SimpleNamespace(sliding_window=None)
    with pytest.raises(UnsupportedError, match="sliding_window is None but its mask has a window"):
        attend(without, windowed, *heads())


def test_layers_without_a_mask():
    """Causal ones read documents from the positions; others, as in a vision tower, see all of their row."""
    q, k, v = heads()
    causal = attend(layer(), None, q, k, v)
    assert torch.equal(causal, attend(layer(), both(None, 1, 12)[1], q, k, v))
    packed = attend(layer(), None, q, k, v, position_ids=positions(5, 7))
    assert torch.equal(packed[:, 5:], attend(layer(), None, q[:, :, 5:], k[:, :, 5:], v[:, :, 5:]))
    full = attend(layer(), None, q, k, v, is_causal=False)
    expected = torch.nn.functional.scaled_dot_product_attention(
        *(x.float() for x in (q, k, v)), enable_gqa=True
    ).transpose(1, 2)
    assert (full - expected).abs().max() < 0.02 and (causal - expected).abs().max() > 0.2
    with pytest.raises(UnsupportedError, match="which keys are filled is unknown"):
        attend(layer(), None, q[:, :, :1], k, v)
    with pytest.raises(UnsupportedError, match="see both sides"):
        attend(layer(), None, q, k, v, is_causal=False, sliding_window=5)


def test_the_scale_is_the_layer_s():
    mask = both(None, 1, 12)[1]
    assert not torch.equal(attend(layer(), mask, *heads(), scaling=0.1), attend(layer(), mask, *heads()))
    assert torch.equal(attend(layer(), mask, *heads(), scaling=0.25), attend(layer(), mask, *heads()))
