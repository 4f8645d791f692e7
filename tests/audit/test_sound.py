"""No false alarms: exact attention is clean, and differences that arithmetic explains are not called leaks."""

import pytest
import torch
from audit import toys

import flamia
from flamia.audit import audit_callable
from flamia.audit.contract import SIDE, Change, Packing, owed, visible
from flamia.audit.controls import LEAKY, attend, mask_lost, packing_lost
from flamia.audit.targets import Inputs, Target

SMALL = {"lengths": (13, 75, 0, 1, 21), "heads": (2, 1), "head_dim": 16}


def test_exact_attention_is_clean():
    report = flamia.audit(attend, heads=(2, 1), head_dim=16)
    assert report.verdict == "clean" and report.exit_code == 0
    assert [f for f in report.findings if f.contract != "nonfinite"] == []
    assert all(count > 0 for count in report.tried.values())


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_exact_attention_is_clean_in_other_dtypes(dtype):
    claims = ("repeat", "prefix", "document")  # across shapes, float64 shows the order of its own sums
    assert audit_callable(attend, dtype=dtype, effort="brief", claims=claims, **SMALL).verdict == "clean"


def test_exact_windows_keep_mask():
    everything = ("repeat", "prefix", "truncate", "document", "offset", "mask", "mass")
    report = audit_callable(toys.windowed, window=(40, 0), claims=everything, effort="brief")
    assert report.verdict == "clean"
    assert sum(n for (contract, tensor, _), n in report.tried.items() if contract == "mask" and tensor == "O") > 0


def test_a_window_one_token_too_long():
    report = audit_callable(toys.reaching_back, window=(40, 0), claims=("mask",), effort="brief")
    assert report.verdict == "leak" and report.statuses["prefix"] == "clean"
    assert any("41 positions behind" in s and "ends at 40" in s for s in report.diagnosis.sentences)


def test_a_mask_off_by_three():
    report = audit_callable(toys.lookahead, effort="brief")
    assert report.diagnosis.reach == "lookahead" and "rows read 3 tokens ahead" in report.diagnosis.sentences


@pytest.mark.parametrize("tile", [32, 48, 64, 80, 128])
def test_a_mask_off_by_one_where_tiles_meet(tile):
    """One token in a whole tile is read too early: no cut elsewhere shows it."""
    report = audit_callable(toys.off_by_one(tile), effort="brief", heads=(2, 1), head_dim=16, explain=False)
    assert report.verdict == "leak" and report.statuses["prefix"] == "leak"


def test_not_causal():
    def full(q, k, v, cu):
        return attend(q, k, v, cu, causal=False)

    assert audit_callable(full, causal=False, effort="brief", **SMALL).verdict == "clean"
    assert audit_callable(full, effort="brief", **SMALL).verdict == "leak"
    with pytest.raises(ValueError, match=r"causal=False .*drop them"):
        audit_callable(full, causal=False, claims=("prefix",))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_torch_attention_is_never_accused(dtype):
    report = audit_callable(toys.torch_sdpa, dtype=dtype, effort="quick" if dtype == torch.bfloat16 else "brief")
    assert {f.kind for f in report.findings if f.contract != "nonfinite"} <= {"order"}
    assert "leak" not in {status for c, status in report.statuses.items() if c not in ("nonfinite", "mass")}
    assert report.statuses["prefix"] == report.statuses["document"] == "clean"


def test_a_length_that_decides_more_than_the_order_is_a_leak():
    control = next(c for c in LEAKY if c.name == "temperature follows the length")
    report = audit_callable(control.fn, effort="brief", **SMALL)
    assert report.statuses["truncate"] == "leak" and report.statuses["prefix"] == "clean"
    assert any("the length" in s for s in report.diagnosis.sentences)


def test_batched():
    report = audit_callable(toys.batched_exact, layout="batched", effort="brief", heads=(2, 1), head_dim=16)
    assert report.verdict == "clean" and any("equal lengths only" in s for s in report.blind_spots)
    for fn, contract in ((mask_lost, "prefix"), (packing_lost, "document"), (LEAKY[0].fn, "prefix")):
        report = audit_callable(toys.batched_packed(fn), layout="batched", effort="brief", heads=(2, 1), head_dim=16)
        assert report.statuses[contract] == "leak"


def test_suffixes_move_earlier_gradients_of_keys_and_nobody_minds():
    packing = Packing((40,))
    g = torch.Generator().manual_seed(0)
    q, k, v, do = (torch.randn(40, 1, 8, generator=g, dtype=torch.float64) for _ in range(4))
    base = Inputs(q, k, v, do, packing)
    target = Target(attend, heads=(1, 1), head_dim=8, dtype=torch.float64)
    rows = torch.arange(30, 40)
    before, after = target.run(base), target.run(base.with_rows("q", rows, -q[rows]))
    assert not torch.equal(before["dK"][:30], after["dK"][:30])
    keep = owed(Change(rows, frozenset({"q"})), visible(packing, None, 0))
    assert not keep["dK"][:30].any() and not keep["dV"][:30].any() and keep["O"][:30].all() and keep["dQ"][:30].all()


@pytest.mark.parametrize("queries", [None, (7, 2, 4, 0)])
@pytest.mark.parametrize("left,right", [(None, 0), (3, 0), (2, 2), (None, None)])
def test_what_is_owed_is_exactly_what_exact_attention_keeps(left, right, queries):
    """Rows that are owed keep their bits; rows that are not, move (row 0's softmax over one key is the exception)."""
    packing = Packing((5, 0, 9, 1), queries)
    sees = visible(packing, left, right)
    g = torch.Generator().manual_seed(1)
    counts = {"q": sum(queries or (15,)), "k": 15}
    sizes = (counts[SIDE[name]] for name in ("q", "k", "v", "do"))
    base = Inputs(*(torch.randn(n, 1, 8, generator=g, dtype=torch.float64) for n in sizes), packing=packing)

    def fn(q, k, v, *cu):
        return toys.with_lse(q, k, v, sees)

    target = Target(fn, heads=(1, 1), head_dim=8, dtype=torch.float64)
    target.lse_gradient = False
    before = target.run(base)
    moved_rows = kept_rows = 0
    for operand in ("q", "k", "v", "do"):
        for row in (1, 7, 12):
            rows = torch.tensor([row])
            after = target.run(base.with_rows(operand, rows, -getattr(base, operand)[rows]))
            for tensor, keep in owed(Change(rows, frozenset({operand}), rows), sees).items():
                if (SIDE[tensor] == "q" and operand in "kv") or (SIDE[tensor] == "k" and operand in ("q", "do")):
                    other = torch.tensor([], dtype=torch.long)
                    one = {"rows": rows, "queries": other} if operand in "kv" else {"rows": other, "queries": rows}
                    keep = owed(Change(operands=frozenset({operand}), **one), sees)[tensor]
                same = (before[tensor] == after[tensor]).flatten(1).all(1)
                assert bool(same[keep].all()), (operand, row, tensor)
                kept_rows += int(keep.sum())
                moved_rows += int((~same).sum())
    assert kept_rows > 250 and moved_rows > 50
