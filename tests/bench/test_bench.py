"""What the bench counts, and what it says where it cannot time."""

from __future__ import annotations

import sys

import pytest
import torch

from flamia.bench import run
from flamia.bench.workloads import WORKLOADS
from flamia.packing import Documents, visible_pairs


@pytest.mark.parametrize("name", WORKLOADS)
def test_flops_are_those_of_the_visible_pairs(name):
    """Two products forward, two operations a multiply-add."""
    workload = WORKLOADS[name]
    cu = torch.tensor([0, *workload.lengths]).cumsum(0).to(torch.int32)
    pairs = visible_pairs(Documents(cu, cu, None, 0))
    assert workload.forward_flops == 2 * 2 * workload.dim * workload.heads * pairs


def test_known_pair_counts():
    pairs = {name: w.forward_flops // (4 * w.dim * w.heads) for name, w in WORKLOADS.items()}
    assert pairs["16x4096"] == 134_250_496
    assert pairs["8192 + 224x256"] == 40_927_232


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to time")
def test_no_gpu_is_said_and_not_worked_around(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["run"])
    with pytest.raises(SystemExit, match="GPU"):
        run.main()
