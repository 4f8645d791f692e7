"""What the audit refuses to vouch for: blunt cuts, dice, state, missing gradients, refusals, NaN."""

import pytest
import torch
from audit import toys

from flamia.audit import audit_callable
from flamia.audit.controls import LEAKY, attend, mask_lost
from flamia.audit.probes import blunt_groups

SMALL = {"lengths": (13, 75, 0, 1, 21), "heads": (2, 1), "head_dim": 16}
TINY = {"lengths": (5, 22, 0, 1), "heads": (2, 1), "head_dim": 16}  # for the toys that walk row by row


def by_name(name):
    return next(c for c in LEAKY if c.name == name)


def test_cuts_on_edges_warn_and_never_pass():
    """No cut divides a group of 32. What a truncation inside one shows is asked again there, and gives this leak away; on
    exact attention nothing does, and the audit still does not answer "clean"."""
    report = audit_callable(by_name("V scale per 32 tokens").fn, cuts=(32, 64, 128), effort="brief")
    assert report.verdict == "leak" and {f.cut for f in report.findings if f.contract == "prefix"} == {129}
    assert any("lies on an edge of groups of 16, 32" in d for d in report.doubts)
    assert any(c.name == "V scale per 32 tokens" and not c.caught for c in report.controls)
    report = audit_callable(attend, cuts=(32, 64), effort="brief")
    assert report.statuses["prefix"] == "clean" and report.verdict == "undecided" and report.exit_code == 2
    assert any("lies on an edge of groups of 16, 32" in d for d in report.doubts)


def test_blunt_groups():
    assert blunt_groups((64,), 170) == [16, 32, 64]
    assert blunt_groups((7,), 300) == [] and blunt_groups((64, 139), 300) == []
    assert blunt_groups((256,), 300) == [16, 32, 64, 128, 256]


def test_an_unsteady_callable_gets_no_bitwise_verdict():
    report = audit_callable(toys.Noisy(), effort="brief", **SMALL)
    assert report.verdict == "undecided" and any("no bitwise verdict" in r for r in report.reasons)
    assert any("8 times the floor" in s for s in report.blind_spots)
    assert {f.kind for f in report.findings if f.contract != "nonfinite"} == {"noise"}


def test_a_leak_far_above_the_noise_is_still_a_leak():
    report = audit_callable(toys.Noisy(mask_lost), effort="brief", **SMALL)
    assert report.verdict == "leak" and report.statuses["prefix"] == "leak" and report.statuses["repeat"] == "undecided"
    assert report.diagnosis.map is None and "v" in report.diagnosis.carriers["O"]


def test_state_between_calls():
    report = audit_callable(toys.Delayed(), effort="brief", **SMALL)
    assert report.statuses["repeat"] == "undecided"
    assert any("keeps state" in s for s in report.blind_spots)


def test_without_gradients_only_o_is_audited():
    def frozen(q, k, v, cu):
        with torch.no_grad():
            return by_name("dQ: U scale per 32 x 32 square").fn(q, k, v, cu)

    report = audit_callable(frozen, effort="brief", **SMALL)
    assert {tensor for _, tensor, _ in report.tried} == {"O"}
    assert any("no gradients" in s for s in report.blind_spots) and any("only O was audited" in n for n in report.notes)
    assert {tensor for _, tensor, _ in audit_callable(attend, backward=None, effort="brief", **SMALL).tried} == {"O"}


def test_a_backward_of_its_own_is_used():
    leaky = by_name("dQ: dO scale per 32 tokens").fn
    report = audit_callable(attend, backward=leaky.backward, effort="brief", **SMALL)
    assert report.diagnosis.carriers == {"dQ": ["do"]}


def test_nan_crosses_a_plain_product_and_not_a_gather():
    report = audit_callable(attend, effort="brief", **SMALL)
    assert report.verdict == "clean" and report.statuses["nonfinite"] == "leak"  # 0 * NaN, not claimed
    assert audit_callable(attend, claims=("nonfinite",), effort="brief", **SMALL).verdict == "leak"
    report = audit_callable(toys.per_row, claims=("nonfinite", "prefix"), effort="brief", **TINY)
    assert report.verdict == "clean" and report.statuses["nonfinite"] == "clean"


def test_a_row_must_show_the_nan_that_it_sees():
    def hiding(q, k, v, cu):
        return toys.per_row(q, *(torch.nan_to_num(x, 0.0, 0.0, 0.0) for x in (k, v)), cu)

    report = audit_callable(hiding, claims=("nonfinite",), effort="brief", **TINY)
    assert report.verdict == "leak" and {f.disturbance for f in report.findings} == {"nan hidden"}


def test_refusing_non_finite_input_is_fair():
    def strict(q, k, v, cu):
        if not all(bool(x.isfinite().all()) for x in (q, k, v)):
            raise ValueError("q, k, v must be finite")
        return toys.per_row(q, k, v, cu)

    report = audit_callable(strict, claims=("prefix",), effort="brief", **TINY)
    assert report.verdict == "clean" and any("must be finite" in s for s in report.blind_spots)


def test_lengths_that_are_refused_are_named():
    def grid(q, k, v, cu):
        if bool((cu % 128).any()):
            raise ValueError("documents must be multiples of 128 tokens")
        return attend(q, k, v, cu)

    report = audit_callable(grid, effort="brief", heads=(2, 1), head_dim=16)
    assert any("(13, 170, 0, 1, 33) were refused" in s and "multiples of 128" in s for s in report.blind_spots)
    assert report.statuses["prefix"] == "clean" and report.statuses["truncate"] == "untried"
    assert report.verdict == "undecided" and "truncate: claimed, and could not be tried" in report.reasons

    def never(q, k, v, cu):
        raise NotImplementedError("head_dim 32 is not supported")

    with pytest.raises(ValueError, match=r"none of the packings.*head_dim 32 is not supported"):
        audit_callable(never)


@pytest.mark.parametrize(
    "options,message",
    [
        ({"claims": ("prefx",)}, "unknown contract"),
        ({"effort": "huge"}, "allowed are spot, brief, quick"),
        ({"layout": "bshd"}, "packed.*batched"),
        ({"heads": (4, 3)}, "divide"),
        ({"cuts": (0, 400)}, "strictly inside"),
        ({"lengths": (5, -1)}, "none negative"),
        ({"backward": "manual"}, "autograd"),
    ],
)
def test_arguments_that_make_no_sense(options, message):
    with pytest.raises(ValueError, match=message):
        audit_callable(attend, **options)


def test_shapes_and_tuples():
    report = audit_callable(lambda q, k, v, cu: (attend(q, k, v, cu), q[0]), effort="brief", **SMALL)
    assert report.verdict == "clean" and any("more than O" in n for n in report.notes)
    report = audit_callable(lambda q, k, v, cu: (attend(q, k, v, cu), None), effort="spot", **SMALL)
    assert report.verdict == "clean" and not report.notes
    with pytest.raises(ValueError, match="O of shape"):
        audit_callable(lambda q, k, v, cu: attend(q, k, v, cu)[:-1], **SMALL)


def test_writing_into_the_callers_tensors_is_noticed():
    def centring(q, k, v, cu):
        out = attend(q, k, v, cu)
        with torch.no_grad():
            k.sub_(1.0)
        return out

    report = audit_callable(centring, backward=None, effort="spot", **SMALL)
    assert "the callable writes into the caller's k" in report.notes


def test_progress_is_told_and_time_ends_an_audit():
    told = []
    whole = audit_callable(attend, effort="spot", progress=lambda *x: told.append(x), seconds=1000, **SMALL)
    done, totals, notes = zip(*told)
    assert done == tuple(range(len(told))) and set(totals) == {len(told) - 1} and "spike" in " ".join(notes)
    assert whole.verdict == "clean" and not whole.doubts
    late = audit_callable(attend, effort="spot", seconds=0, **SMALL)
    assert late.verdict == "undecided" and late.exit_code == 2
    assert f"out of time: {len(told) - 1} of {len(told) - 1} experiments were not run" in late.reasons
