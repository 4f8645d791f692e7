"""The bench end to end on the card, on a workload of no interest: the calls are captured, sums checked, memory measured."""

import pytest
import torch

if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
    pytest.skip("needs an NVIDIA Hopper GPU", allow_module_level=True)

from flamia import Recipe, closeness
from flamia.bench import memory, model, report, run, share
from flamia.bench.workloads import Workload
from flamia.train import Shape


def test_a_report_of_this_card(tmp_path):
    dense = Workload("dense", (512,) * 3, heads=4, kv_heads=4)
    ragged = Workload("ragged", (300, 17, 700), heads=4, kv_heads=2)
    found = run.bench([dense, ragged], ["flamia", "torch-varlen", "cudnn"], rounds=3)
    for row in found["workloads"]:
        own = row["contenders"]["flamia"]
        assert own["eligible"] and own["peak_bytes"] > row["tokens"] * 4 * 128 * 2
        for kind in ("forward", "train"):
            assert own[kind]["how"] == "graph" and own[kind]["ms"] > 0
        assert 0.02 < own["check"]["errors"]["o"] < 0.07
        assert all(entry["eligible"] for entry in row["contenders"].values()), row
        assert own["train"]["ms"] > own["forward"]["ms"]
    assert "one length" in found["workloads"][1]["refused"]["cudnn"]
    assert torch.cuda.get_device_name() in report.text(found)
    assert len(report.write(found, tmp_path / "bench")) >= 2


def test_a_call_is_divided_on_this_card():
    row = share.measure(Workload("w", (2048, 300), heads=4, kv_heads=2), 3, 1.0)
    assert row["how"] == {} and 0.7 < row["parts_over_whole"] < 1.3 and 0.02 < row["share"] < 0.9
    assert all(ms > 0 for ms in row["ms"].values()) and 500 < row["gb_per_s"]["copy"] < 20_000


def test_memory_grows_with_padding():
    row = memory.measure(memory.Case("c", (2048, 100, 100), heads=2), ("flamia", "torch-varlen"))
    packed = row["calls"][0]
    assert packed["faults"] == [] and packed["peak_bytes"] > packed["input_bytes"]
    assert all(2 < x < 3 for x in row["padding"].values()), row


def test_a_model_steps_packed_and_padded():
    shape = Shape(layers=2, width=256, heads=4, kv_heads=4, head_dim=64, hidden=512)
    found = model.measure(3, 1.0, shape=shape, lengths=(700, 100, 300))
    assert {"torch padded", "flamia packed", "flamia padded"} <= set(found["variants"])
    assert all(v["gradient_error"] < 0.1 for v in found["variants"].values())


def test_the_kernels_are_as_close_as_their_reference():
    sample = closeness.drawn("gaussian", (700, 130), 2, 128, "cuda")
    expected = closeness.exact(sample, 128**-0.5)
    mine = closeness.by_peer("flamia", sample, expected)["error"]
    reference = closeness.by_reference(Recipe.strict(), sample, expected, 128**-0.5)["error"]
    assert mine == pytest.approx(reference, rel=0.05)
