"""Decoding on a card: the kernels read 16-bit numbers that encode to the cache's own codes and scales (codes.py), so the bits are
those of the whole call and the bound is zero."""

import itertools

import pytest
import torch

if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
    pytest.skip("needs an NVIDIA Hopper GPU", allow_module_level=True)

import flamia
from flamia.codes import encode_tokens, token_values

LENGTHS = (1000, 1, 300, 129, 513)


def offsets(lengths):
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device="cuda")


def inputs(dim, heads=(4, 2)):
    torch.manual_seed(dim)
    q, k, v = (torch.randn(sum(LENGTHS), h, dim, device="cuda") for h in (heads[0], heads[1], heads[1]))
    size = torch.exp2(torch.randint(-3, 4, (2, sum(LENGTHS), 1, 1), device="cuda"))
    return q.bfloat16(), (k * size[0]).bfloat16(), (v * size[1]).bfloat16()


@pytest.mark.parametrize("window", [None, (200, 0), (31, 0)], ids=str)
@pytest.mark.parametrize("dim", [64, 128])
def test_decoding_is_training(dim, window):
    q, k, v = inputs(dim)
    k[77, 0, 3], v[1100, 1, 0] = torch.nan, torch.inf
    o, lse = flamia.attention_varlen(q, k, v, offsets(LENGTHS), causal=True, window=window, return_lse=True)
    cache = flamia.KVCache(len(LENGTHS), 2, dim, window=window, rollback=8, device="cuda")
    starts, sizes = offsets(LENGTHS).tolist(), itertools.cycle([1, 64, 1, 130, 2, 257])
    while cache.lengths != LENGTHS:
        take = [min(next(sizes), full - now) for full, now in zip(LENGTHS, cache.lengths)]
        rows = torch.cat([torch.arange(s + at, s + at + n) for s, at, n in zip(starts, cache.lengths, take)]).cuda()
        got, got_lse = flamia.decode(q[rows], k[rows], v[rows], cache, offsets(take), return_lse=True)
        for x, y in ((got, o[rows]), (got_lse, lse[:, rows])):
            assert torch.equal(x.isnan(), y.isnan()) and torch.equal(x.nan_to_num(), y.nan_to_num())
    assert cache.bytes_per_token == 2 * 2 * (dim + 1)


def test_one_token_each_and_rollback():
    q, k, v = inputs(128)
    cache = flamia.KVCache(2, 2, 128, rollback=4, device="cuda")
    prompt = offsets([300, 300])
    o = flamia.attention_varlen(q[:602], k[:602], v[:602], offsets([301, 301]), causal=True)
    first = torch.cat([torch.arange(300), torch.arange(301, 601)]).cuda()
    cache.append(k[first], v[first], prompt)
    flamia.decode(q[700:702], k[700:702], v[700:702], cache)
    cache.truncate([300, 300])
    last = torch.tensor([300, 601], device="cuda")
    assert torch.equal(flamia.decode(q[last], k[last], v[last], cache), o[last])


def test_other_recipes_need_the_reference():
    q, k, v = (x[:2] for x in inputs(128))
    cache = flamia.KVCache(2, 2, 128, recipe="mxfp8/strict", device="cuda")
    with pytest.raises(flamia.UnsupportedError, match="backend='reference'"):
        flamia.decode(q, k, v, cache)
    assert flamia.decode(q, k, v, cache, backend="reference").shape == q.shape


@pytest.mark.parametrize("cell", ["e4m3:token", "e4m3:coarse"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_bytes_are_those_of_the_cpu(dtype, cell):
    every = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(dtype)
    for x in (torch.stack([every, torch.ones_like(every)], -1), every[:, None]):
        codes, scales = encode_tokens(x[:, None].cuda(), cell)
        for got, want in zip((codes, scales), encode_tokens(x[:, None], cell)):
            assert torch.equal(got.cpu(), want)
        got = token_values(codes, scales, dtype, cell).cpu()
        want = token_values(codes.cpu(), scales.cpu(), dtype, cell)
        assert torch.equal(got.isnan(), want.isnan()) and torch.equal(got.nan_to_num(), want.nan_to_num())
