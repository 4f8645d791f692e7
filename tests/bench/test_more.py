"""The second report: what it counts is what there is, a failing row costs no other, and padded batches train on the same
tokens. The clock and the memory counter are stand-ins; attention is the reference."""

from __future__ import annotations

import itertools
import sys

import pytest
import torch

from flamia.bench import memory, model, more, peers, share, timing
from flamia.bench.workloads import Workload
from flamia.train import Shape

TINY = Shape(layers=1, width=32, heads=2, kv_heads=2, head_dim=16, hidden=48)
LENGTHS = (40, 9, 130)


@pytest.fixture
def clock(monkeypatch):
    ticks = itertools.count(1)

    def sample(timed):
        timed.run()
        return 10.0 * next(ticks)

    def peak(fn):
        fn()
        return 5_000

    monkeypatch.setattr(timing, "sample", sample)
    monkeypatch.setattr(timing, "peak", peak)


def test_traffic_is_what_the_tensors_hold():
    w = Workload("w", (130, 64), heads=4, kv_heads=2, dim=64)
    rows = 256 + 128
    q, k, v, do, _ = w.inputs("cpu")
    sixteen = sum(x.numel() * 2 for x in (q, k, v))
    codes = rows * 64 * (4 + 2 + 2)
    factors = rows * 4 * (4 + 2 + 2)
    decoded = rows * 64 * 2 * 2
    gradient = 2 * 2 * do.numel() + 4 * 194 * 4 + rows * 4 * (64 + 2 * 64) + 2 * 4 * rows * 4
    assert share.traffic(w) == {"encode": sixteen + codes + factors + decoded, "encode_gradient": gradient}


def test_a_call_is_divided_without_rest():
    ms = {"lists": 1, "encode": 3, "forward": 10, "encode_gradient": 2, "dkv": 9, "dq": 7, "train": 24, "copy": 2}
    found = share.divided(ms, {"encode": 4 * 10**6, "encode_gradient": 10**6})
    assert found["ms"] == {"lists": 1, "encode": 2, "forward": 7, "encode_gradient": 2, "dkv": 7, "dq": 5}
    assert found["parts_over_whole"] == 1.0 and found["share"] == 5 / 24
    assert found["gb_per_s"] == {"encode": 2.0, "encode_gradient": 0.5, "copy": 2 * 2**30 / 2e6}


def test_padded_is_every_document_as_long_as_the_longest():
    case = memory.Case("c", LENGTHS, heads=2)
    assert case.workload(False).lengths == LENGTHS
    assert case.workload(True).lengths == (256,) * 3
    assert [memory.Case("1", (4096,)).workload(p).lengths for p in (False, True)] == [(4096,)] * 2


def test_memory_is_inputs_and_what_a_call_adds(clock, monkeypatch):
    def absent(workload, inputs):
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setitem(peers.CONTENDERS, "absent", absent)
    row = memory.measure(memory.Case("c", LENGTHS, heads=1), ("flamia", "absent"), device="cpu")
    packed, _, padded, _ = row["calls"]
    given = [4 * rows * 128 * 2 + 16 for rows in (179, 768)]
    assert [packed["bytes"], padded["bytes"]] == [g + 5_000 for g in given]
    assert packed["faults"] == [] and padded["faults"] is None
    assert row["padding"] == {"flamia": padded["bytes"] / packed["bytes"]}
    assert row["against_packed"]["flamia packed"] == 1.0
    assert ["no room" in c.get("refused", "") for c in row["calls"]] == [False, True, False, True]
    assert "absent packed, 179 rows: OutOfMemoryError" in memory.lines(row)


def test_padding_changes_no_target():
    packed, padded = model.batch_of(LENGTHS, None), model.batch_of(LENGTHS, 256)
    assert padded.cu_seqlens.tolist() == [0, 256, 512, 768]
    real = padded.targets != -100
    assert torch.equal(padded.targets[real], packed.targets[packed.targets != -100])
    assert torch.equal(padded.tokens[real], packed.tokens[packed.targets != -100])
    assert int(real.sum()) == sum(LENGTHS) - 3


def test_a_step_packed_and_padded(clock, monkeypatch):
    halved = model.Variant("wrong", False, lambda longest: lambda q, k, v, cu: q * 0.5)
    monkeypatch.setattr(model, "VARIANTS", (*model.VARIANTS, halved))
    found = model.measure(3, 1.0, "cpu", TINY, LENGTHS)
    assert found["padded_rows"] == 768 and found["tokens"] == 179
    variants = found["variants"]
    assert list(variants) == ["torch padded", "flamia packed", "flamia padded"]
    assert "cannot be imported" in found["refused"]["flash-attn-4 packed"]
    assert "gradients are" in found["refused"]["wrong"]
    assert variants["torch padded"]["gradient_error"] == 0.0
    assert 0 < variants["flamia packed"]["gradient_error"] < 0.1
    assert variants["flamia packed"]["ratio"] == [1.0] * 3
    assert variants["torch padded"]["tokens_per_s"] == 1e3 * 179 / variants["torch padded"]["ms"]
    assert "tokens/s" in model.lines(found)


@pytest.fixture
def sections(monkeypatch):
    """Sections that answer at once; the second row of `share` fails."""
    calls = itertools.count()

    def one(workload, *rest):
        if next(calls) == 1:
            raise RuntimeError("no such kernel")
        return {"name": workload.name}

    monkeypatch.setattr(more.share, "measure", one)
    monkeypatch.setattr(more.memory, "measure", lambda case, *rest: {"name": case.name})
    monkeypatch.setattr(more.run, "measure", lambda w, *rest: {"name": w.name, "contenders": {}, "ratios": {}})
    monkeypatch.setattr(more.model, "measure", lambda *rest: {"tokens": 1})
    for room in (more.share, more.memory, more.model, more.report):
        monkeypatch.setattr(room, "lines", lambda row: str(row))


def test_a_row_that_fails_costs_no_other(sections):
    kept: list[int] = []
    found = more.measure(
        more.SECTIONS,
        ["flamia"],
        "tiny",
        3,
        60.0,
        "abc",
        lambda text: None,
        lambda f: kept.append(len(f["share"])),
        "cpu",
    )
    assert [row["name"] for row in found["share"]] == [n for n in more.SHARED if n != more.SHARED[1]]
    assert list(found["failed"]) == [f"share: {more.SHARED[1]}"] and "no such kernel" in str(found["failed"])
    assert len(found["memory"]) == len(memory.CASES) and [w["name"] for w in found["workloads"]] == ["1024x64"]
    assert found["model"] == [{"tokens": 1}] and found["not_run"] == [] and kept[0] == 1


def test_what_there_is_no_time_for_is_listed(sections):
    found = more.measure(("share", "model"), ["flamia"], "tiny", 3, 0.0, "abc", lambda text: None, device="cpu")
    assert found["not_run"] == [*(f"share: {name}" for name in more.SHARED), "model: step"]


@pytest.mark.parametrize("options, said", [
    (["--sections", "speed"], "section 'speed' is not known"),
    (["--contenders", "fa5"], "contender 'fa5' is not known"),
    (["--workloads", "1x99"], "workload '1x99' is not known"),
])  # fmt: skip
def test_what_is_not_known_is_said_before_anything_is_looked_for(options, said):
    with pytest.raises(SystemExit, match=said):
        more.main(options)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to time")
def test_no_gpu_is_said(monkeypatch):
    with pytest.raises(SystemExit, match="GPU"):
        more.main([])


def test_warming_starts_a_process_for_each_configuration(monkeypatch):
    started: list[list[str]] = []
    monkeypatch.setattr(more.subprocess, "Popen", lambda command: started.append(command))
    more.start_warming()
    assert {command[-1] for command in started} == {"128,0,1", "128,100,1", "64,0,1", "64,100,1", "128,0,0"}
    assert all(command[:4] == [sys.executable, "-m", "flamia.bench.more", "--warm"] for command in started)
