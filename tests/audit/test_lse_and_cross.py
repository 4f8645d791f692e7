"""The LSE is audited like O, and so are documents whose numbers of queries and keys differ.

Every leak here is one that an audit of O alone, or of equal lengths alone, does not see.
"""

from itertools import pairwise

import pytest
import torch
from audit import toys

import flamia
from flamia.audit import audit_callable
from flamia.audit.contract import Packing, visible
from flamia.audit.controls import attend, by_groups, documents, mask_of, shared_scale, straight
from flamia.audit.efforts import query_counts
from flamia.audit.mass import measure
from flamia.audit.peers import Options, probe
from flamia.audit.targets import Target

SMALL = {"lengths": (13, 75, 0, 1, 21), "heads": (2, 1), "head_dim": 16, "effort": "brief"}
STRICT = ("repeat", "prefix", "truncate", "document", "offset", "mask", "nonfinite")

# ------------------------------------------------------------------------------------------------------------ the LSE


def exact(q, k, v, cu):
    return toys.with_lse(q, k, v, mask_of(len(q), cu))


def transposed(q, k, v, cu):
    o, lse = exact(q, k, v, cu)
    return o, lse.T


@pytest.mark.parametrize("fn", [exact, transposed])
def test_an_exact_lse_is_clean_and_was_looked_at(fn):
    report = audit_callable(fn, claims=("repeat", "prefix", "truncate", "document", "offset", "mask"), **SMALL)
    assert report.verdict == "clean" and not report.notes
    for contract, operand in (("prefix", "k"), ("document", "all"), ("offset", "layout"), ("mask", "v")):
        assert report.tried[contract, "LSE", operand] > 0


def looks_ahead(q, k, v, cu):
    """O is exact; the LSE counts one key too many."""
    o, _ = exact(q, k, v, cu)
    return o, toys.with_lse(q, k, v, toys.aligned(cu, cu, right=1))[1]


def of_shared_scale(q, k, v, cu):
    """O is exact; the LSE is that of keys under one scale for 32 tokens."""
    o, _ = exact(q, k, v, cu)
    rounded = straight(k, lambda x: by_groups(x.double(), 32, documents(cu), shared_scale))
    return o, exact(q, rounded, v, cu)[1]


def of_values(q, k, v, cu):
    """The LSE moves with the values of the row's own token."""
    o, lse = exact(q, k, v, cu)
    return o, lse + 1e-3 * v.detach().float().abs().amax(-1).mT.repeat_interleave(q.shape[1] // v.shape[1], 0)


def of_the_call(q, k, v, cu):
    """Relative to the largest score anywhere, and rounded so."""
    o, lse = exact(q, k, v, cu)
    top = lse[lse.isfinite()].detach().amax()
    return o, (lse - top) + top


class SharedGradient:
    """O and the LSE are exact; the gradient of the LSE is held in 8 bits under one scale for 32 rows."""

    def __call__(self, q, k, v, cu):
        o, lse = exact(q, k, v, cu)
        return o, _RoundGradient.apply(lse, cu)


class _RoundGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, lse, cu):
        ctx.spans = documents(cu)
        return lse.clone()

    @staticmethod
    def backward(ctx, grad):
        rows = grad.mT[..., None].double()
        return by_groups(rows, 32, ctx.spans, shared_scale)[..., 0].mT.to(grad.dtype), None


@pytest.mark.parametrize(
    "fn,contract,tensor,operands",
    [
        (looks_ahead, "prefix", "LSE", ["q", "k"]),
        (of_shared_scale, "prefix", "LSE", ["k"]),
        (of_values, "mask", "LSE", ["v"]),
        (of_the_call, "document", "LSE", None),
        (SharedGradient(), "prefix", "dQ", ["do"]),
    ],
    ids=lambda x: getattr(x, "__name__", None),
)
def test_leaks_of_the_lse_alone_are_caught(fn, contract, tensor, operands):
    claims = ("repeat", "prefix", "truncate", "document", "offset", "mask")
    report = audit_callable(fn, claims=claims, **SMALL)
    assert report.verdict == "leak" and report.statuses[contract] == "leak"
    found = {f.operand for f in report.findings if (f.contract, f.tensor, f.kind) == (contract, tensor, "leak")}
    assert found and not any(f.tensor == "O" for f in report.findings if f.contract in claims)
    if operands:
        assert set(report.diagnosis.carriers[tensor]) <= set(operands)
    # And without its LSE the same attention is clean: nothing else of it leaks.
    assert audit_callable(lambda *x: fn(*x)[0], claims=claims, **SMALL).verdict == "clean"


def test_an_lse_of_another_order_of_summation_is_no_leak():
    """Float32 sums over chunks whose number follows the length."""

    def chunked(q, k, v, cu):
        o, _ = exact(q, k, v, cu)
        s = torch.einsum("ihd,jhd->hij", q.float(), k.float().repeat_interleave(2, 1)) * q.shape[-1] ** -0.5
        s = s.masked_fill(~mask_of(len(q), cu), -torch.inf)
        parts = [x.logsumexp(-1) for x in s.split(max(1, len(q) // 3), -1)]
        return o, torch.stack(parts).logsumexp(0)

    report = audit_callable(chunked, **SMALL)
    assert {f.kind for f in report.findings if f.tensor == "LSE"} <= {"order"}
    assert report.verdict in ("clean", "undecided") and report.statuses["prefix"] == "clean"


def test_a_backward_that_takes_no_gradient_of_the_lse_is_audited_without():
    class NoGradient(torch.autograd.Function):
        @staticmethod
        def forward(ctx, lse):
            return lse.clone()

        @staticmethod
        def backward(ctx, grad):
            raise NotImplementedError("the LSE is not differentiable")

    def fn(q, k, v, cu):
        o, lse = exact(q, k, v, cu)
        return o, NoGradient.apply(lse)

    report = audit_callable(fn, **SMALL)
    assert report.verdict == "clean" and report.tried["prefix", "dQ", "do"] > 0
    assert any("no gradient through the LSE: NotImplementedError: the LSE" in note for note in report.notes)


def test_the_sums_are_those_of_do_alone():
    plain, both = Target(attend, heads=(2, 1), head_dim=16), Target(exact, heads=(2, 1), head_dim=16)
    a, b = measure(plain, 64), measure(both, 64)
    assert b.dq_equal == pytest.approx(a.dq_equal, abs=1e-6) and b.dv_bias == pytest.approx(a.dv_bias, abs=1e-6)
    assert both.lse_gradient  # asked again afterwards


@pytest.mark.parametrize("recipe", ["mxfp8_scores/strict", "mxfp8/strict", "bf16/strict"])
def test_our_lse_keeps_every_contract(recipe):
    def fn(q, k, v, cu):
        return flamia.attention_varlen(q, k, v, cu, causal=True, recipe=recipe, return_lse=True)

    report = audit_callable(fn, claims=STRICT, **SMALL)
    assert report.verdict == "clean" and report.tried["prefix", "LSE", "k"] > 0


def test_a_batched_lse():
    def fn(q, k, v):
        return flamia.attention(q, k, v, causal=True, return_lse=True)

    report = audit_callable(fn, layout="batched", effort="spot", heads=(2, 1), head_dim=16)
    assert report.verdict == "clean" and report.tried["prefix", "LSE", "k"] > 0


# ------------------------------------------------------------------------------------------------------ unequal lengths


def crossed(q, k, v, cu_q, cu_k):
    return toys.with_lse(q, k, v, toys.aligned(cu_q, cu_k))


def test_positions_are_those_of_the_keys_and_end_together():
    p = Packing((5, 0, 3), (2, 1, 4))
    assert p.position_of("q").tolist() == [3, 4, -1, -1, 0, 1, 2] and p.document_of("q").tolist() == [
        0,
        0,
        1,
        2,
        2,
        2,
        2,
    ]
    assert p.rows(0, 4, side="q").tolist() == [1] and p.rows(2, 1, side="q").tolist() == [5, 6]
    assert p.rows(2, 0, 1, side="q").tolist() == [3, 4]  # what stands before the first key goes with position 0
    assert torch.equal(visible(p, None, 0), toys.aligned(torch.tensor(p.offsets_of("q")), torch.tensor(p.offsets)))


def test_queries_are_fewer_more_none_and_without_keys():
    lengths = (13, 300, 0, 1, 45, 2)
    queries = query_counts(lengths, "packed")
    assert len(queries) == len(lengths) and 0 < queries[1] < 300 and queries[2] > 0 and 0 in queries
    assert any(a > b > 0 for a, b in zip(queries, lengths)) and (300 - queries[1]) % 16
    assert query_counts((300, 300), "batched") == (queries[1],) * 2


def test_exact_attention_of_other_numbers_of_queries_is_clean():
    claims = ("repeat", "prefix", "truncate", "document", "offset", "mask")
    report = audit_callable(crossed, cross=True, claims=claims, **SMALL)
    assert report.verdict == "clean" and report.target["cross"]
    for key in (("prefix", "dQ", "do"), ("document", "dK", "all"), ("truncate", "O", "layout"), ("prefix", "LSE", "k")):
        assert report.tried[key] > 0
    assert "equal query and key lengths" not in " ".join(report.blind_spots)
    assert "equal query and key lengths" in " ".join(audit_callable(attend, **SMALL).blind_spots)


@pytest.mark.parametrize(
    "recipe,verdict", [("mxfp8_scores/strict", "clean"), ("mxfp8/strict", "clean"), ("mxfp8/fast", "leak")]
)
def test_our_recipes_with_other_numbers_of_queries(recipe, verdict):
    def fn(q, k, v, cu_q, cu_k):
        return flamia.attention_varlen(q, k, v, cu_q, cu_seqlens_k=cu_k, causal=True, recipe=recipe)

    claims = STRICT if verdict == "clean" else None
    assert audit_callable(fn, cross=True, claims=claims, **SMALL).verdict == verdict


def one_more_where_fewer(q, k, v, cu_q, cu_k):
    """Right at equal lengths; with fewer queries than keys every row sees one key too many."""
    seen = toys.aligned(cu_q, cu_k)
    for (a, b), (c, d) in zip(pairwise(cu_q), pairwise(cu_k)):
        if b - a < d - c:
            seen[a:b] = toys.aligned(cu_q, cu_k, right=1)[a:b]
    return toys.with_lse(q, k, v, seen)[0]


def keys_by_offsets_of_queries(q, k, v, cu_q, cu_k):
    """The scale groups of V start where the *queries* of a document start: across documents, if numbers differ."""
    spans = [(int(a), min(int(b), len(v))) for a, b in pairwise(cu_q) if a < len(v)]
    rounded = straight(v, lambda x: by_groups(x.double(), 32, spans, shared_scale))
    return toys.with_lse(q, k, rounded, toys.aligned(cu_q, cu_k))[0]


@pytest.mark.parametrize(
    "fn,contract",
    [(one_more_where_fewer, "prefix"), (keys_by_offsets_of_queries, "document")],
    ids=lambda x: getattr(x, "__name__", x),
)
def test_leaks_that_need_other_numbers_of_queries(fn, contract):
    report = audit_callable(fn, cross=True, **SMALL)
    assert report.verdict == "leak" and report.statuses[contract] == "leak"


def test_one_more_where_fewer_is_clean_at_equal_lengths():
    assert audit_callable(lambda q, k, v, cu: one_more_where_fewer(q, k, v, cu, cu), **SMALL).verdict == "clean"


def test_a_mask_of_the_other_corner_is_not_the_attention_asked_for():
    """Top-left reads nothing that it must not where queries are fewer: it is found by its O, not by its leaks."""

    def top_left(q, k, v, cu_q, cu_k):
        return toys.with_lse(q, k, v, toys.aligned(cu_q, cu_k, corner="top"))

    row = probe(top_left, Options(cross=True), 16, "spot", 0, "cpu")
    assert row.foreign and not probe(crossed, Options(cross=True), 16, "spot", 0, "cpu").foreign


def test_batched_and_given_counts():
    def batched(q, k, v):
        counts = [torch.tensor([0, x.shape[1]]) for x in (q, k)]
        return torch.stack([crossed(q[b], k[b], v[b], *counts)[0] for b in range(len(q))])

    report = audit_callable(batched, layout="batched", cross=True, effort="spot", heads=(2, 1), head_dim=16)
    assert report.verdict in ("clean", "undecided") and report.statuses["prefix"] == "clean"
    given = audit_callable(crossed, cross=(20, 70, 3, 0, 21), **SMALL)
    assert given.verdict == "clean"
    with pytest.raises(ValueError, match="number of queries of each of the 5 documents"):
        audit_callable(crossed, cross=(20, 40), **SMALL)
    with pytest.raises(ValueError, match="fn\\(q, k, v, cu_seqlens_q, cu_seqlens_k\\)"):
        audit_callable(attend, cross=True, **SMALL)
