"""Checkpoints are whole or absent, few, and refused with a reason when they are something else."""

import pytest
import torch

from flamia.train import checkpoint

CONTENT = {"config": {}, "step": 1, "model": {}}


def test_only_the_newest_are_kept_and_steps_sort_as_numbers(tmp_path):
    for step in (5, 99, 100, 1000):
        checkpoint.save(tmp_path, step, CONTENT | {"step": step}, keep=2)
    assert [path.name for path in checkpoint.list_all(tmp_path)] == ["step-0000100.pt", "step-0001000.pt"]
    assert checkpoint.load(checkpoint.latest(tmp_path))["step"] == 1000


def test_a_save_that_fails_leaves_the_one_before(tmp_path, monkeypatch):
    before = checkpoint.save(tmp_path, 1, CONTENT)

    def killed(content, file):
        file.write(b"half of a check")
        raise KeyboardInterrupt

    monkeypatch.setattr(torch, "save", killed)
    with pytest.raises(KeyboardInterrupt):
        checkpoint.save(tmp_path, 2, CONTENT)
    assert list(tmp_path.iterdir()) == [before]
    assert checkpoint.load(checkpoint.latest(tmp_path))["step"] == 1


def test_what_is_no_checkpoint_is_named(tmp_path):
    (tmp_path / "step-1.pt").write_bytes(b"not a checkpoint")
    torch.save({"step": 1}, tmp_path / "step-2.pt")
    with pytest.raises(ValueError, match="does not exist"):
        checkpoint.load(tmp_path / "step-3.pt")
    with pytest.raises(ValueError, match=r"step-1\.pt cannot be read"):
        checkpoint.load(tmp_path / "step-1.pt")
    with pytest.raises(ValueError, match="lacks config, model"):
        checkpoint.load(tmp_path / "step-2.pt")
    with pytest.raises(ValueError, match="keep = 0"):
        checkpoint.save(tmp_path, 4, CONTENT, keep=0)


def test_a_folder_without_checkpoints_has_no_latest(tmp_path):
    assert checkpoint.latest(tmp_path) is None and checkpoint.latest(tmp_path / "absent") is None
