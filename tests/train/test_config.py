"""The schedule, and what a configuration refuses."""

from dataclasses import replace
from itertools import pairwise

import pytest

from flamia.train import PRESETS, TrainConfig, preset


@pytest.mark.parametrize("decay", ["cosine", "linear"])
def test_the_rate_climbs_to_its_peak_and_falls_to_its_final_share(decay):
    config = TrainConfig(steps=101, warmup=10, learning_rate=0.5, final_rate=0.2, decay=decay)
    rates = [config.rate(step) for step in range(config.steps)]
    assert rates[0] == pytest.approx(0.05) and rates[9] == pytest.approx(0.5) == pytest.approx(max(rates))
    assert rates[-1] == pytest.approx(0.1)
    assert all(a < b for a, b in pairwise(rates[:10]))
    assert all(a >= b for a, b in pairwise(rates[10:]))
    middle = rates[10 + (100 - 10) // 2]
    assert middle == pytest.approx(0.3)


def test_a_line_is_a_line():
    rates = [TrainConfig(steps=50, warmup=0, decay="linear").rate(step) for step in range(50)]
    steps = [a - b for a, b in pairwise(rates)]
    assert max(steps) == pytest.approx(min(steps))


@pytest.mark.parametrize("name", PRESETS)
def test_a_configuration_survives_the_trip_through_a_checkpoint(name):
    config = replace(PRESETS[name], seed=5, recipe="mxfp8/fast")
    assert TrainConfig.from_dict(config.to_dict()) == config


def test_the_study_is_the_papers_size():
    shape = PRESETS["study"].shape
    assert (shape.layers, shape.width) == (6, 1024)


@pytest.mark.parametrize(
    "change", [{"decay": "step"}, {"steps": 0}, {"context": -1}, {"warmup": -1}, {"final_rate": 2.0}, {"clip": 0.0}]
)
def test_nonsense_is_refused_by_name(change):
    name, value = next(iter(change.items()))
    with pytest.raises(ValueError, match=f"{name} = {value!r}"):
        preset("tiny", **change)


def test_an_unknown_preset_names_those_that_exist():
    with pytest.raises(ValueError, match="'tiny', 'study'"):
        preset("huge")
