"""Leaks as others have reported them, in a few lines each, with the operand, the group and the channel that they have.

Most of the kind are controls (``test_controls``) and mutants; here are those that neither has.
"""

import pytest
import torch
from audit import toys

import flamia
from flamia.audit import audit_callable
from flamia.audit.controls import by_groups, documents, e4m3, mask_of, straight

SMALL = {"lengths": (13, 75, 0, 1, 21), "heads": (2, 1), "head_dim": 16, "effort": "brief"}
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)


def nvfp4(x):
    """(tokens, heads, features) in E2M1 under one E4M3 scale, of the largest sixth, for all the tokens of a feature."""
    scale = e4m3(x.abs().amax(0, keepdim=True) / 6, torch.tensor(448.0).double()).clamp_min(2.0**-9)
    y = (x / scale).clamp(-6, 6)
    nearest = (y.abs()[..., None] - E2M1).abs().argmin(-1)
    return E2M1[nearest] * y.sign() * scale


def four_bit_values(q, k, v, cu):
    v = straight(v, lambda x: by_groups(x.double(), 16, documents(cu), nvfp4))
    return toys.with_lse(q, k, v, mask_of(len(q), cu))[0]


def test_one_beside_a_three():
    """Under the scale of its own, 1.03125 reads 1.03125; eight tokens before a 3, it reads 1."""
    x = torch.full((9, 1, 1), 1.03125, dtype=torch.float64)
    alone = nvfp4(x)[0].item()
    x[8] = 3.0
    assert (alone, nvfp4(x)[0].item()) == (1.03125, 1.0)
    report = audit_callable(four_bit_values, **SMALL)
    assert report.verdict == "leak" and report.statuses["document"] == "clean"
    diagnosis = report.diagnosis
    assert diagnosis.carriers == {"O": ["v"], "dQ": ["v"]} and diagnosis.channel == "scale"
    assert (diagnosis.reach, diagnosis.group, diagnosis.alignment) == ("group", 16, "document")


def test_blocks_of_8_bits():
    """Scales on Q, K, V, P and U at once: O names the scale of V, where dQ alone would look like a hole in the mask."""

    def fast(q, k, v, cu):
        return flamia.attention_varlen(q, k, v, cu, causal=True, recipe="mxfp8/fast")

    diagnosis = audit_callable(fast, effort="spot", heads=(2, 1), head_dim=16).diagnosis
    assert {"q", "k", "v"} <= set(diagnosis.carriers["O"]) and diagnosis.channel == "scale"
    assert (diagnosis.group, diagnosis.alignment) == (32, "document")


def padded(fill):
    """Every document is filled up in front to a multiple of 32, and the mask forgets the padding."""

    def fn(q, k, v, cu):
        out, group = torch.zeros_like(q), q.shape[1] // k.shape[1]
        for a, b in documents(cu):
            n = -(b - a) % 32
            kk, vv = (torch.cat([fill(x, a, n), x[a:b]]).double().repeat_interleave(group, 1) for x in (k, v))
            seen = torch.ones(b - a, n + b - a, dtype=torch.bool).tril(n)
            out[a:b] = toys.with_lse(q[a:b], kk.to(q.dtype), vv.to(q.dtype), seen)[0]
        return out

    return fn


def zeros(x, a, n):
    return x.new_zeros(n, *x.shape[1:])


def whatever_lies_before(x, a, n):
    return torch.cat([zeros(x, a, max(0, n - a)), x[max(0, a - n) : a]])


@pytest.mark.parametrize(
    "fill,contract,channel",
    [(zeros, "truncate", "length"), (whatever_lies_before, "document", "other document")],
    ids=["zeros", "content"],
)
def test_padding_that_carries(fill, contract, channel):
    report = audit_callable(padded(fill), **SMALL)
    assert report.verdict == "leak" and report.statuses[contract] == "leak"
    assert report.diagnosis.channel == channel


def test_padding_that_takes_weight_is_seen_in_the_sums():
    """In full attention zeros behind the end leak nothing and take their share: with V = 1, O is not 1."""

    def fn(q, k, v, cu):
        out = torch.zeros_like(q)
        for a, b in documents(cu):
            kk, vv = (torch.cat([x[a:b], zeros(x, a, -(b - a) % 64)]) for x in (k, v))
            seen = torch.ones(b - a, len(kk), dtype=torch.bool)
            out[a:b] = toys.with_lse(q[a:b], kk, vv, seen)[0]
        return out

    report = audit_callable(fn, causal=False, claims=("repeat", "document", "offset", "mass"), **SMALL)
    assert report.statuses["document"] == report.statuses["offset"] == "clean"
    assert report.verdict == "leak" and report.statuses["mass"] == "leak"
    assert any("O with V = 1 is off by" in reason for reason in report.reasons)


def test_a_mean_over_all_packed_documents():
    def fn(q, k, v, cu):
        return toys.with_lse(q, k - k.double().mean(0, keepdim=True).to(k.dtype), v, mask_of(len(q), cu))[0]

    report = audit_callable(fn, **SMALL)
    assert report.verdict == "leak" and report.statuses["document"] == "leak"
    assert report.diagnosis.channel == "statistic" and report.diagnosis.reach == "call"
    assert report.diagnosis.carriers["O"] == ["k"]
