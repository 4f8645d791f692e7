"""Curves: what is drawn is what was logged."""

import pytest

pytest.importorskip("matplotlib")

from flamia.train import Run, TrainConfig
from flamia.train.plots import loss_curves, save, smoothed, svg


def run(recipe: str, losses: list[float]) -> Run:
    records = [{"step": i + 1, "loss": loss} for i, loss in enumerate(losses)]
    records[-1]["validation"] = losses[-1] + 0.5
    return Run(TrainConfig(recipe=recipe), records)


def test_smoothing_is_a_trailing_mean():
    assert smoothed([1, 2, 3, 4], 2) == [1, 1.5, 2.5, 3.5] and smoothed([1, 2, 6], 9) == [1, 1.5, 3]


def test_one_run_has_one_panel_and_a_baseline_adds_the_paired_difference():
    low, plain = run("mxfp8/strict", [5.0, 4.0, 3.5]), run("bf16/strict", [5.0, 3.75, 3.0])
    assert len(loss_curves([low]).axes) == 1
    left, right = loss_curves([low, plain]).axes
    assert list(left.lines[0].get_ydata()) == [5.0, 4.0, 3.5] and list(left.lines[1].get_ydata()) == [4.0]
    assert list(right.lines[0].get_ydata()) == [0.0, 0.25, 0.5] and list(right.lines[0].get_xdata()) == [1, 2, 3]


def test_pictures_are_written_and_the_same_run_draws_the_same_page(tmp_path):
    runs = [run("mxfp8/strict", [5.0, 4.0]), run("bf16/strict", [5.0, 3.9])]
    save(loss_curves(runs), tmp_path / "deep/losses.png")
    assert (tmp_path / "deep/losses.png").read_bytes().startswith(b"\x89PNG")
    first, second = svg(loss_curves(runs)), svg(loss_curves(runs))
    assert first == second and first.startswith("<svg") and "mxfp8/strict" in first
