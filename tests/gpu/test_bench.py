"""The bench end to end on the card, on a workload of no interest: the calls are captured, sums checked, memory measured."""

import pytest
import torch

if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
    pytest.skip("needs an NVIDIA Hopper GPU", allow_module_level=True)

from flamia.bench import report, run
from flamia.bench.workloads import Workload


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
