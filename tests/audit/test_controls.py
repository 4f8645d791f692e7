"""The audit can fail: every known leak is caught in the right tensor, through the right operand, with the right groups."""

import pytest
import torch

from flamia.audit import LEAKY, audit_callable
from flamia.audit.auditor import run_controls
from flamia.audit.controls import EXACT, block_scaled, e4m3
from flamia.audit.efforts import EFFORTS, control_settings, settings_for

SMALL = {"lengths": (13, 75, 0, 1, 21), "heads": (2, 1), "head_dim": 16}


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
