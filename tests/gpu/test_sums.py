"""Sums over long rows and large buffers: no bias that grows, attention sinks, and offsets that do not fit in 32 bits."""

from __future__ import annotations

import pytest
import torch

if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
    pytest.skip("needs an NVIDIA Hopper GPU", allow_module_level=True)

import oracle
from calls import NAMES, draw, error, of_document, offsets, run, run_alone, same
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from flamia import hopper
from flamia.packing import Documents
from flamia.recipe import Recipe


def causal(*lengths: int) -> Documents:
    cu = offsets(lengths)
    return Documents(cu, cu, None, 0)


@pytest.mark.slow
def test_no_bias_that_grows():
    """Random weights, V = 1 and dO = 1: O is 1 in every row, dV adds up to the number of queries. A truncating sum loses
    6% at 4,096 tokens and 40% at 65,536."""
    bias = {}
    for t in (1024, 4096, 16384, 65536, 131072):
        q, k, _, _, _ = draw(t, t, (2, 1), 128, seed=t)
        ones = torch.ones_like(q)
        o, _, dq, _, dv = run(q, k, ones[:, :1].clone(), ones, None, causal(t))
        assert (o.float() - 1).abs().max() <= 2.0**-8  # one step of BF16 around 1
        assert dq.isfinite().all()
        bias[t] = (o[-1024:].double().mean().item() - 1, dv.double().sum().item() / (t * 2 * 128) - 1)
    print({t: [f"{b:.1e}" for b in both] for t, both in bias.items()})
    for index in (0, 1):
        sizes = [abs(both[index]) for both in bias.values()]
        assert max(sizes) < 2.0**-8, bias
        assert sizes[-1] < sizes[0] + 2.0**-10, bias


def flash(q, k, v, do):
    """dQ and dK of 16-bit flash attention, torch's own."""
    leaves = [x.transpose(0, 1)[None].contiguous().requires_grad_() for x in (q, k, v)]
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        o = scaled_dot_product_attention(*leaves, is_causal=True)
    grads = torch.autograd.grad(o, leaves, do.transpose(0, 1)[None])
    return [x[0].transpose(0, 1) for x in grads[:2]]


def test_attention_sinks():
    """The first key draws weight from every row, at three strengths: dQ and dK are as far off as 16-bit flash attention's on
    the same input plus what 8 bits cost on Gaussian inputs. Without one reading of V in both O and E it would be tens of
    times that. A twentieth is the spread of one draw of 1,024 tokens."""
    t, d = 1024, 128
    generator = torch.Generator().manual_seed(0)

    def normal() -> torch.Tensor:
        return torch.randn(t, d, generator=generator).bfloat16().float()

    def errors(*given):
        q, k, v, do = (x.bfloat16().cuda()[:, None] for x in given)
        exact = oracle.attention(q, k, v, do, [(0, t, 0, t)], None, 0, d**-0.5, rounding=False)[2:4]
        got, theirs = run(q, k, v, do, None, causal(t))[2:4], flash(q, k, v, do)
        return [error(x, y) for x, y in zip(got, exact)], [error(x, y) for x, y in zip(theirs, exact)]

    plain, _ = errors(normal(), normal(), normal(), normal())
    assert max(plain) < 0.056
    for strength in (0.3, 0.4, 0.5):
        k = normal()
        k[0] = 4 * torch.sign(torch.randn(d, generator=generator))
        q = normal() + strength * torch.sign(k[0])
        own, theirs = errors(q, k, normal(), normal())
        print(strength, [f"{e:.3f}" for e in (*own, *theirs)])
        for name, e, f, g in zip(("dQ", "dK"), own, theirs, plain):
            assert e < 1.05 * (f + g), (strength, name, e, f, g)


@pytest.mark.parametrize("options", [{}, {"frontier_scores": "bf16"}], ids=["", "frontier"])
def test_the_remainder_of_o_mends_the_strongest_sink(options):
    """With what BF16 took from O in D as well, dQ and dK at the strongest of the three are nearer to exact than 16-bit flash
    attention's, and O plus its remainder has twice the bits of O."""
    t, d = 1024, 128
    recipe = Recipe.strict("mxfp8_scores", delta="compensated", **options)
    generator = torch.Generator().manual_seed(0)
    q, k, v, do = (torch.randn(t, d, generator=generator) for _ in range(4))
    k[0] = 4 * torch.sign(torch.randn(d, generator=generator))
    q = q + 0.5 * torch.sign(k[0])
    q, k, v, do = (x.bfloat16().cuda()[:, None] for x in (q, k, v, do))
    exact = oracle.attention(q, k, v, do, [(0, t, 0, t)], None, 0, d**-0.5, rounding=False)
    o, lse, rest, saved = hopper.forward_saving(q, k, v, causal(t), recipe, d**-0.5)
    plain = run(q, k, v, do, None, causal(t), recipe=Recipe.strict("mxfp8_scores", **options))
    assert torch.equal(o, plain[0]) and (rest.double().abs() <= o.double().abs() * 2.0**-8).all() and rest.any()
    grads = hopper.backward(do, None, q, k, None, o, lse, rest, causal(t), recipe, d**-0.5, saved=saved)
    own, before = ([error(x, y) for x, y in zip(some, exact[2:4])] for some in (grads[:2], plain[2:4]))
    theirs = [error(x, y) for x, y in zip(flash(q, k, v, do), exact[2:4])]
    print([f"{e:.3f}" for e in (*own, *before, *theirs)])
    assert all(e < min(b, f) for e, b, f in zip(own, before, theirs))


@pytest.mark.parametrize("at", [300, 450])
def test_a_sink_in_a_middle_block(at):
    """One key takes 0.999 of every row that sees it, and the rows before it are Gaussian. dQ is no farther off than that of
    16-bit flash attention on the same input and what 8 bits cost were the same rows Gaussian too, together: over all rows,
    and over those of the sink, whose dQ is nearly nothing. P = 1 exactly keeps it there, since O is then V of that key, in
    E4M3; a P that is rounded would take it farther (tests/reference/test_lag.py)."""
    t, d = 1024, 128
    generator = torch.Generator("cuda").manual_seed(at)
    q, k, v, do = (torch.randn(t, 1, d, device="cuda", generator=generator).bfloat16() for _ in range(4))
    sign = torch.randn(d, device="cuda", generator=generator).sign()

    def errors():
        """How far off ours and flash attention's are, of all rows and of those that see the key; its least weight there."""
        exact = oracle.attention(q, k, v, do, [(0, t, 0, t)], None, 0, d**-0.5, rounding=False)
        weight = (q[at:, 0].double() @ k[at, 0].double() * d**-0.5 - exact[1][0, at:]).exp().min().item()
        mine, theirs = run(q, k, v, do, None, causal(t))[2], flash(q, k, v, do)[0]
        return *([(x[n:] - exact[2][n:]).norm().item() for n in (0, at)] for x in (mine, theirs)), weight

    gaussian, _, _ = errors()
    k[at], q[at:] = 3 * sign, (q[at:].float() + 0.85 * sign).bfloat16()
    own, sixteen, weight = errors()
    print(at, weight, [f"{e:.3f}" for e in (*own, *sixteen, *gaussian)])
    assert weight > 0.999
    for e, f, g in zip(own, sixteen, gaussian):
        assert e < 1.05 * (f + g)


@pytest.mark.slow
def test_offsets_beyond_32_bits():
    """140,000 tokens of 128 heads of 128: more than 2^31 elements in every tensor, and in Q's stride from head to head too.
    The last documents against the oracle, and alone."""
    lengths = [1024] * 136 + [300, 1, 128, 307]
    t, heads, d = sum(lengths), 128, 128
    assert t == 140_000 and t * heads * d > 2**31
    if torch.cuda.mem_get_info()[0] < 90e9:
        pytest.skip("needs 90 GB of free device memory")
    generator = torch.Generator("cuda").manual_seed(0)

    def normal(*shape):
        return torch.empty(shape, device="cuda", dtype=torch.bfloat16).normal_(generator=generator)

    q, k, v, do = normal(heads, t, d).transpose(0, 1), normal(t, heads, d), normal(t, heads, d), normal(t, heads, d)
    documents = causal(*lengths)
    got = run(q, k, v, do, None, documents)
    for span in documents.spans()[-4:]:
        own = of_document(got, span)
        assert same(run_alone(q, k, v, do, None, documents, span), own), span
        q0, q1, k0, k1 = span
        if q1 - q0 == 1:
            continue
        few = [x[q0:q1, 126:] for x in (q, k, v, do)]
        want = oracle.attention(*few, [(0, q1 - q0, 0, k1 - k0)], None, 0, d**-0.5)
        for name, x, y in zip(NAMES, own, want):
            if name != "lse":
                assert error(x[:, 126:], y) < 3e-3, (span, name)
    del q, k, v, do, got, own, few, want
    torch.cuda.empty_cache()
