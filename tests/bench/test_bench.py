"""What the bench counts, whom it believes, and what it says where it cannot time. The clock is a stand-in; the checks, the
report and the reference run as they are, on a CPU."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import sys

import pytest
import torch
from helpers import exact_attention

from flamia.bench import checks, peers, report, run, timing
from flamia.bench.workloads import WORKLOADS, Workload, chosen
from flamia.packing import Documents, visible_pairs

SMALL = Workload("small", (40, 9), heads=2, kv_heads=1, dim=16)

# ----------------------------------------------------------------------------------------------------------- workloads


@pytest.mark.parametrize("name", WORKLOADS)
def test_flops_are_those_of_the_visible_pairs(name):
    """Two products forward, two operations a multiply-add."""
    workload = WORKLOADS[name]
    cu = torch.tensor([0, *workload.lengths]).cumsum(0).to(torch.int32)
    pairs = visible_pairs(Documents(cu, cu, workload.window, 0 if workload.causal else None))
    assert workload.forward_flops == 2 * 2 * workload.dim * workload.heads * pairs


def test_known_pair_counts():
    pairs = {name: w.forward_flops // (4 * w.dim * w.heads) for name, w in WORKLOADS.items()}
    assert pairs["16x4096"] == 134_250_496
    assert pairs["8192+224x256"] == 40_927_232


def test_ragged_lengths_are_as_promised():
    lengths = WORKLOADS["log-uniform"].lengths
    assert sum(lengths) == 65536 and all(0 < n <= 16384 for n in lengths) and all(n >= 16 for n in lengths[:-1])
    starts = torch.tensor(lengths).cumsum(0)[:-1]
    assert (starts % 8 != 0).float().mean() > 0.5


def test_other_orders_and_lengths_are_the_same_work():
    for name, group in (("log-uniform", "order"), ("16x4096", "skewed")):
        for other in chosen([group]):
            assert (other.tokens, other.pairs) == (WORKLOADS[name].tokens, WORKLOADS[name].pairs), other.name
            assert other.lengths != WORKLOADS[name].lengths
    assert len(chosen(["order"])) == len(chosen(["skewed"])) == 3


def test_choosing():
    assert len(chosen(["packed"])) == 9
    assert [w.name for w in chosen(["64x1024", "ragged", "64x1024"])] == ["64x1024", "log-uniform"]
    assert len(chosen(["all"])) == len(WORKLOADS)
    with pytest.raises(ValueError, match="not known"):
        chosen(["1x99"])


# -------------------------------------------------------------------------------------------------------------- checks


@pytest.mark.parametrize("causal, window", [(True, None), (False, None), (True, 7)])
def test_exact_is_the_textbook(causal, window, monkeypatch):
    monkeypatch.setattr(checks, "CHUNK", 16 * 40)
    q, k, v, do, _ = SMALL.inputs("cpu")
    cu = torch.tensor([0, 40], dtype=torch.int32)
    want = exact_attention(
        q[:40], k[:40], v[:40], do[:40], None, Documents(cu, cu, window, 0 if causal else None), 16**-0.5
    )
    got = checks.exact(q[:40], k[:40, 0], v[:40, 0], do[:40], causal, window)
    for x, y in zip(got, (want[0], *want[2:])):
        assert torch.allclose(x.double(), y.view(x.shape), atol=1e-5)


def contender(workload, inputs, spoil=lambda *results: results):
    own = peers.ours(workload, inputs)
    return dataclasses.replace(own, train=lambda: spoil(*own.train()))


@pytest.mark.parametrize(
    "spoil, fault",
    [
        (lambda o, dq, dk, dv: (o * 0.99, dq, dk, dv), "O keeps"),
        (lambda o, dq, dk, dv: (o, dq, dk, dv * 1.01), "dV keeps"),
        (lambda o, dq, dk, dv: (o, dq * 1.2, dk, dv), "dQ is off"),
        (lambda o, dq, dk, dv: (o, dq, dk * torch.nan, dv), "dK is off by inf"),
        (lambda o, dq, dk, dv: (o * torch.nan, dq, dk, dv), "O keeps nan"),
    ],
)
def test_wrong_sums_are_found(spoil, fault):
    inputs = SMALL.inputs("cpu")
    before = [x.clone() for x in inputs]
    verdict = checks.check(contender(SMALL, inputs, spoil), SMALL, inputs)
    assert any(found.startswith(fault) for found in verdict.faults), verdict
    assert all(torch.equal(x, y) for x, y in zip(inputs, before))


@pytest.mark.parametrize("changes", [{}, {"causal": False}, {"window": 12}], ids=str)
def test_right_sums_are_believed(changes):
    workload = dataclasses.replace(SMALL, **changes)
    inputs = workload.inputs("cpu")
    verdict = checks.check(contender(workload, inputs), workload, inputs)
    assert not verdict.faults
    assert 0.01 < max(verdict.errors) < 0.07


# ---------------------------------------------------------------------------------------------------------- the report


@pytest.fixture
def clock(monkeypatch):
    """Figures that say who was timed: the n-th contender takes n milliseconds forward and 4 n a training call."""
    made: list[timing.Timed] = []

    def capture(fn):
        made.append(timing.Timed(fn, "graph"))
        return made[-1]

    def sample(timed):
        index = made.index(timed)
        return (1 + index // 2) * (1.0 if index % 2 == 0 else 4.0)

    monkeypatch.setattr(timing, "capture", capture)
    monkeypatch.setattr(timing, "sample", sample)
    monkeypatch.setattr(timing, "peak", lambda fn: 5_000_000)
    return made


@pytest.fixture
def rivals(monkeypatch):
    """A right one, one that loses 2% of every sum, and one that is not here."""

    def right(workload, inputs):
        return dataclasses.replace(contender(workload, inputs), name="right")

    def lossy(workload, inputs):
        return contender(workload, inputs, lambda o, dq, dk, dv: (o * 0.98, dq, dk, dv * 0.98))

    def absent(workload, inputs):
        peers.imported("no_such_attention.here")

    for name, made in (("right", right), ("lossy", lossy), ("absent", absent)):
        monkeypatch.setitem(peers.CONTENDERS, name, made)
    return ["flamia", "right", "lossy", "absent"]


def test_a_report(clock, rivals, tmp_path):
    said: list[str] = []
    found = run.bench([SMALL], rivals, rounds=4, device="cpu", say=said.append)
    (row,) = found["workloads"]
    assert row["ratios"] == {"right": {"forward": [2.0] * 3, "train": [2.0] * 3},
                             "lossy": {"forward": [3.0] * 3, "train": [3.0] * 3}}  # fmt: skip
    assert [row["contenders"][name]["eligible"] for name in ("flamia", "right", "lossy")] == [True, True, False]
    assert "cannot be imported" in row["refused"]["absent"]
    assert len(row["contenders"]["flamia"]["train"]["samples"]) == row["rounds"] == 4
    assert report.means(found) == {
        "right": {kind: {"mean": 2.0, "least": 2.0, "workloads": 1} for kind in ("forward", "train")}
    }
    text = report.text(found)
    for words in ("INELIGIBLE: O keeps 0.98", "not here: no_such", "against right on 1 packed", "encoding of Q, K, V"):
        assert words in text
    written = report.write(found, tmp_path / "a.b")
    assert json.loads(written[0].read_text())["means"]["right"]["train"]["least"] == 2.0
    lines = list(csv.DictReader(io.StringIO(written[1].read_text())))
    assert len(lines) == 6 and {line["contender"] for line in lines} == {"flamia", "right", "lossy"}
    assert {line["ratio"] for line in lines if line["contender"] == "lossy"} == {"3.0"}


def test_no_report_while_our_own_sums_are_wrong(clock, rivals, monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(peers.CONTENDERS, "flamia", peers.CONTENDERS["lossy"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(run, "chosen", lambda names: [SMALL])
    bench = run.bench
    monkeypatch.setattr(run, "bench", lambda *args, **options: bench(*args, device="cpu", **options))
    with pytest.raises(SystemExit, match=r"refuses to report.*O keeps 0\.98"):
        run.main(["--contenders", "flamia,right", "--out", str(tmp_path / "x")])
    assert not list(tmp_path.iterdir()) and not clock
    assert "ms" not in capsys.readouterr().out


def test_our_own_failure_is_not_hidden_as_an_absent_peer(clock, rivals, monkeypatch):
    monkeypatch.setitem(peers.CONTENDERS, "flamia", peers.CONTENDERS["absent"])
    with pytest.raises(peers.Refused):
        run.bench([SMALL], rivals, device="cpu")


def test_what_there_is_no_time_for_is_listed(clock, rivals):
    found = run.bench([SMALL, SMALL], rivals[:1], seconds=0.0, device="cpu")
    assert found["workloads"] == [] and found["not_run"] == ["small", "small"]
    assert "no time for: small, small" in report.text(found)


def test_rounds_alternate_and_stop_with_the_time(monkeypatch):
    order: list[str] = []
    some = [timing.Timed(lambda: None, "a"), timing.Timed(lambda: None, "b")]
    monkeypatch.setattr(timing, "sample", lambda timed: order.append(timed.how) or 10.0)
    assert timing.interleave(some, 9, seconds=0.0) == 3
    assert "".join(order) == "aabb" + "ab" + "ba" + "ab"
    assert [timed.calls for timed in some] == [2, 2]


@pytest.mark.parametrize("command", [False, True], ids=["module", "command"])
def test_a_picture_of_an_earlier_report(command, clock, rivals, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    found = run.bench([SMALL], rivals, rounds=3, device="cpu")
    source = tmp_path / "r.json"
    source.write_text(json.dumps(found))
    from typer.testing import CliRunner

    from flamia.cli import app

    if command:
        result = CliRunner().invoke(app, ["bench", "--plot", str(source)])
        assert result.exit_code == 0, result.output
        said = result.output
    else:
        run.main(["--plot", str(source)])
        said = capsys.readouterr().out
    picture = tmp_path / "r.png"
    assert picture.read_bytes().startswith(b"\x89PNG") and str(picture) in said


def test_a_picture_goes_where_it_is_asked_for(clock, rivals, tmp_path):
    pytest.importorskip("matplotlib")
    source = tmp_path / "r.json"
    source.write_text(json.dumps(run.bench([SMALL], rivals, rounds=3, device="cpu")))
    run.main(["--plot", str(source), "--out", str(tmp_path / "there" / "x")])
    assert (tmp_path / "there" / "x.png").is_file() and not (tmp_path / "r.png").exists()


@pytest.mark.parametrize("text,said", [(None, "No such file"), ("{", "no report"), ("{}", "no report")])
def test_no_picture_of_what_is_no_report(text, said, tmp_path):
    source = tmp_path / "r.json"
    if text is not None:
        source.write_text(text)
    with pytest.raises(SystemExit, match=said):
        run.main(["--plot", str(source)])


def test_peers_that_take_no_packs_say_so():
    ragged = WORKLOADS["log-uniform"]
    for make in (peers.cudnn, peers.cudnn_fp8):
        with pytest.raises(peers.Refused, match="one length"):
            make(ragged, None)


def test_unknown_contenders_are_named():
    with pytest.raises(ValueError, match="flash-attn-4"):
        run.bench([SMALL], ["fa5"], device="cpu")
    for options in (["--contenders", "fa5"], ["--workloads", "1x99"]):  # whether or not there is a GPU
        with pytest.raises(SystemExit, match=f"{options[1]}' is not known"):
            run.main(options)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to time")
def test_no_gpu_is_said_and_not_worked_around(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["run"])
    with pytest.raises(SystemExit, match="GPU"):
        run.main()
