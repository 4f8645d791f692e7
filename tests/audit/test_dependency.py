"""Sizes of what crosses: zero where nothing may, not zero for those known to leak, and each channel asks what it says."""

import json

import pytest

from flamia.audit import dependency
from flamia.audit.dependency import CHANNELS, OWED, WATCHED, experiments, measure


@pytest.fixture
def few(monkeypatch):
    """Only the first experiments of each channel."""
    every = dependency.experiments

    def some(channel, seed, effort="quick"):
        for _, made in zip(range(3), every(channel, seed, effort)):
            yield made

    monkeypatch.setattr(dependency, "experiments", some)


@pytest.mark.parametrize("channel", CHANNELS)
def test_a_channel_has_checks_of_its_own_rows(channel):
    mades = list(experiments(channel, 0))
    seen = {made().disturbance for made in (mades[0], mades[-1])}
    checks = [c for c in mades[0]().checks if c.contract in OWED[channel] and c.tensor in WATCHED]
    assert checks and all(len(c.rows) == len(c.into) > 0 for c in checks)
    if channel in ("2^20", "2^126", "nan"):
        assert seen == {"spike" if channel == "2^20" else channel}


def test_less_effort_is_fewer_experiments_of_every_channel():
    for channel in CHANNELS:
        brief, quick = (len(list(experiments(channel, 0, effort))) for effort in ("brief", "quick"))
        assert 0 < brief <= quick, channel
    assert len(list(experiments("k", 0, "brief"))) < len(list(experiments("k", 0)))


def test_operands_are_changed_alone():
    for operand in ("k", "v", "q", "do"):
        experiment = next(experiments(operand, 0))()
        for name in ("q", "k", "v", "do"):
            same = bool((getattr(experiment.base, name) == getattr(experiment.changed, name)).all())
            assert same == (name != operand)


def test_nothing_moves_where_nothing_may(few):
    found = measure("mxfp8_scores/strict")["channels"]
    assert list(found) == list(CHANNELS)
    for sizes in found.values():
        for size in sizes.values():
            assert size["comparisons"] > 0 and size["moved"] == 0 and size["largest"] == 0.0


def test_what_leaks_is_measured(few):
    found = measure("mxfp8/fast", ("k", "v", "do", "document"))["channels"]
    assert found["k"]["dQ"]["largest"] > 0.01 and found["v"]["dQ"]["moved"] > 0
    assert found["do"]["O"]["largest"] == 0.0 < found["do"]["dQ"]["largest"]
    assert found["document"]["O"]["moved"] == found["document"]["dQ"]["moved"] == 0
    assert "document 1" in found["v"]["dQ"]["by"]
    assert measure("current_scaling", ("document",))["channels"]["document"]["O"]["largest"] > 0.01


def test_the_command(few, tmp_path, monkeypatch, capsys):
    class Here:  # a process of its own would not see what this test has replaced
        def __init__(self, *given): ...
        def __enter__(self):
            return self

        def __exit__(self, *given): ...
        def map(self, fn, names):
            return map(fn, names)

    monkeypatch.setattr(dependency, "ProcessPoolExecutor", Here)
    out = tmp_path / "there" / "d.json"
    dependency.main(["--recipe", "bf16", "--recipe", "k_centered", "--out", str(out)])
    found = json.loads(out.read_text())
    assert [r["recipe"] for r in found["rows"]] == ["bf16", "k_centered"] and list(found["channels"]) == list(CHANNELS)
    assert found["rows"][1]["channels"]["k"]["O"]["largest"] > 0 and "k_centered: at most" in capsys.readouterr().out
    assert found["effort"] == "quick" and max(found["lengths"]) == 300
    dependency.main(["--recipe", "bf16", "--effort", "brief", "--out", str(out)])
    assert max(json.loads(out.read_text())["lengths"]) == 170
    with pytest.raises(SystemExit, match="no route"):
        dependency.main(["--recipe", "mxfp7", "--out", str(out)])
