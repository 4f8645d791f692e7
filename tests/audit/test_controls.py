"""The audit can fail: every known leak is caught in the right tensor, through the right operand, with the right groups."""

import pytest
import torch

from flamia.audit import LEAKY, audit_callable
from flamia.audit.auditor import run_controls
from flamia.audit.controls import EXACT, block_scaled, e4m3
from flamia.audit.efforts import EFFORTS, control_settings, settings_for

SMALL = {"lengths": (13, 75, 0, 1, 21), "heads": (2, 1), "head_dim": 16}


# (channel, smallest change that shows it) of every control.
ONE_ULP, DOUBLED = "times 1.00781", "times 2"
CHANNEL_OF = {
    "V scale per 32 tokens": ("scale", DOUBLED),
    "K scale per 32 tokens": ("scale", "times"),
    "Q scale per 32 tokens": ("scale", "times"),
    "V scale per 32 addresses": ("scale", DOUBLED),
    "one scale per tensor": ("scale", DOUBLED),
    "K mixed with 64-token means": ("statistic", ONE_ULP),
    "V mixed with 16-token means": ("statistic", ONE_ULP),
    "circular filter on K": ("statistic", ONE_ULP),
    "K centred over all documents": ("statistic", ONE_ULP),
    "causal mask lost": ("mask", ONE_ULP),
    "packing lost": ("other document", None),
    "dQ: U scale per 32 x 32 square": ("scale", DOUBLED),
    "dQ: dO scale per 32 tokens": ("scale", DOUBLED),
    "dQ: float16 boost over the call": ("scale", "times 1.125"),
    "temperature follows the length": ("length", None),
}


@pytest.mark.parametrize("control", LEAKY, ids=lambda c: c.name)
def test_the_channel_is_named_and_the_smallest_change(control):
    diagnosis = audit_callable(control.fn, effort="brief", **SMALL).diagnosis
    channel, smallest = CHANNEL_OF[control.name]
    assert diagnosis.channel == channel
    assert diagnosis.smallest is None if smallest is None else f" {smallest}" in diagnosis.smallest
    if smallest:
        assert any(s.startswith("the smallest change") and diagnosis.smallest in s for s in diagnosis.sentences)
        assert any(s.startswith(f"channel: {channel} (") for s in diagnosis.sentences)


def test_a_smaller_change_is_not_claimed_where_none_shows_it():
    """This scale moves nothing for a change of one unit in the last place, and does when doubled."""
    fn = next(c for c in LEAKY if c.name == "V scale per 32 tokens").fn
    q, k, v = (
        torch.randn(75, h, 16, dtype=torch.bfloat16, generator=torch.Generator().manual_seed(3)) for h in (2, 1, 1)
    )
    v[:11] *= 2.0**-12
    cu, moved = torch.tensor([0, 75], dtype=torch.int32), []
    for factor in (1 + 2.0**-7, 4.0):
        changed = v.clone()
        changed[11:] *= factor
        moved.append(not torch.equal(fn(q, k, v, cu)[:11], fn(q, k, changed, cu)[:11]))
    assert moved == [False, True]


@pytest.mark.parametrize("control", LEAKY, ids=lambda c: c.name)
def test_each_leak_is_caught_and_explained(control):
    report = audit_callable(control.fn, effort="quick", cuts=(7, 21, 45), **SMALL)
    assert report.verdict == "leak" and report.exit_code == 1
    found = {(f.contract, f.tensor, f.operand) for f in report.findings if f.kind == "leak"}
    assert set(control.expects) <= found
    for contract, tensor, operand in control.expects:
        if contract in ("prefix", "document") and tensor in ("O", "dQ"):
            assert operand in report.diagnosis.carriers[tensor]
    if control.group:
        assert (report.diagnosis.reach, report.diagnosis.group) == ("group", control.group)
        assert report.diagnosis.alignment == ("address" if "addresses" in control.name else "document")


def test_faults_of_the_backward_stay_in_dq():
    for control in LEAKY:
        if control.name.startswith("dQ"):
            report = audit_callable(control.fn, effort="brief", explain=False, **SMALL)
            assert {f.tensor for f in report.findings if f.contract in ("prefix", "document")} == {"dQ"}


@pytest.mark.parametrize("effort", EFFORTS[:4])
def test_every_effort_catches_every_control_and_spares_the_exact_one(effort):
    results = run_controls(control_settings(settings_for(effort, "packed", torch.bfloat16, (None, 0), None, None, 0)))
    assert [r.name for r in results] == [c.name for c in (*LEAKY, EXACT)]
    assert [(r.name, r.missed) for r in results if not r.caught] == []


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_controls_are_caught_in_other_dtypes(dtype):
    results = run_controls(control_settings(settings_for("brief", "packed", dtype, (None, 0), None, None, 3)))
    assert [(r.name, r.missed) for r in results if not r.caught] == []


@pytest.mark.parametrize("size,longest", [(16, 75), (48, 170), (128, 300)])
def test_group_sizes_are_read_off(size, longest):
    report = audit_callable(block_scaled("v", size), effort="brief", lengths=(13, longest), heads=(2, 1), head_dim=16)
    assert (report.diagnosis.group, report.diagnosis.alignment) == (size, "document")
    assert report.diagnosis.carriers == {"O": ["v"], "dQ": ["v"]}


def test_groups_without_bound_are_called_what_they_are():
    names = {c.name: c for c in LEAKY}
    reach = {}
    for name in ("one scale per tensor", "circular filter on K"):
        reach[name] = audit_callable(names[name].fn, effort="brief", **SMALL).diagnosis.reach
    assert reach == {"one scale per tensor": "call", "circular filter on K": "document"}


def test_values_and_magnitudes_are_told_apart():
    def sentence(control):
        said = audit_callable(control.fn, effort="brief", **SMALL).diagnosis.sentences
        return next(s for s in said if s.startswith("negating"))

    assert "moves nothing" in sentence(LEAKY[0])
    assert "values cross" in sentence(next(c for c in LEAKY if c.name == "V mixed with 16-token means"))


def test_the_controls_own_rounding_is_e4m3():
    x = torch.cat([torch.linspace(-448, 448, 2001), 2.0 ** torch.linspace(-12, 8, 500)]).double()
    assert torch.equal(e4m3(x, torch.tensor(448.0)), x.float().to(torch.float8_e4m3fn).double())
